"""Scripts whose graphs cannot be sent to another process: training waits for the compile, and is as in eager."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from tests.compiler.worker_scripts import UNTIL_COMPILED, run, words

TWICE = """
@torch.library.custom_op("of_a_script::twice", mutates_args=())
def twice(x: torch.Tensor) -> torch.Tensor:
    return 2 * x
twice.register_fake(lambda x: torch.empty_like(x))
twice.register_autograd(lambda context, gradient: 2 * gradient)
class Twice(nn.Module):
    def forward(self, x): return twice(x)
model.append(Twice())
"""


@pytest.mark.slow
def test_a_graph_that_cannot_be_sent_is_compiled_while_training_waits(tmp_path: Path) -> None:
    found = words(run(TWICE + NOISY + UNTIL_COMPILED + NOISE, tmp_path))
    assert (found["by"], found["compiles"], found["fell"]) == ("this-process", "1", "0")
    assert_same_in_eager(found, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("error", ["NotImplementedError", "IndexError"])  # Dynamo wraps the one, not the other
def test_where_it_cannot_be_compiled_either_training_goes_on_in_eager_and_says_why(tmp_path: Path, error: str) -> None:
    script = f"""
        from deepytorch.compiler.code import lower_region
        def lower(*_, **__):
            raise {error}("nothing that this compiler knows")
        lower_region.lower = lower
        deadline = time.time() + 60
        while not any(each.fallbacks for each in LEDGER.report().regions) and time.time() < deadline:
            step()
        for _ in range(3):
            step()
        region = LEDGER.report().regions[0]
        print("why", "said" if "nothing that this compiler knows" in region.fallbacks[0] else region.fallbacks)
        print("by", region.compiled_by or "nobody")
    """
    found = words(run(TWICE + NOISY + textwrap.dedent(script) + NOISE, tmp_path))
    assert (found["why"], found["by"]) == ("said", "nobody")
    assert_same_in_eager(found, tmp_path)


@pytest.mark.slow
def test_ranks_whose_graphs_cannot_be_sent_change_over_together(tmp_path: Path) -> None:
    found = words(run(TWICE + RANKS + END, tmp_path, RANKED))
    assert (found["by"], found["ours"]) == ("this-process", "True")
    expected = words(run(TWICE + RANKS + END, tmp_path, RANKED, DEEPYTORCH="off", STEPS=found["steps"]))
    assert float(found["sum"]) == pytest.approx(float(expected["sum"]), rel=1e-6)


@pytest.mark.slow
def test_where_one_rank_cannot_compile_no_rank_changes_over(tmp_path: Path) -> None:
    found = words(run(TWICE + ONE_CANNOT + RANKS + AFTERWARDS + END, tmp_path, RANKED, STEPS="60"))
    assert (found["fell0"], found["fell1"], found["by"]) == ("False", "True", "nobody")
    expected = words(run(TWICE + RANKS + END, tmp_path, RANKED, DEEPYTORCH="off", STEPS="60"))
    assert float(found["sum"]) == pytest.approx(float(expected["sum"]), rel=1e-6)


def assert_same_in_eager(found: dict[str, str], tmp_path: Path) -> None:
    """As many steps without the import draw the same random numbers, and end with the same weights."""
    steps = f"for _ in range({found['steps']}): step()\n"
    expected = words(run(TWICE + NOISY + steps + NOISE, tmp_path, DEEPYTORCH="off"))
    assert found["noise"] == expected["noise"]
    assert float(found["sum"]) == pytest.approx(float(expected["sum"]), rel=1e-6)


# A script that draws random numbers, as dropout does, besides.
NOISY = """
ordinary, drawn = step, []
def step():
    drawn.append(torch.rand(()).item())
    return ordinary()
"""

NOISE = """
print("noise", repr(sum(drawn)))
if "steps" not in globals():
    print("steps", len(drawn))
    print("sum", repr(sum(p.double().sum().item() for p in model.parameters())))
"""

RANKED = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")

RANKS = """
import torch.distributed as dist
dist.init_process_group("gloo")
data.manual_seed(dist.get_rank())
plain, model = model, nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
number, extra, over, deadline = 0, int(os.environ.get("STEPS", "0")), 0, time.time() + 120
while number < extra if extra else (over < 5 and time.time() < deadline):
    step(); number += 1
    if not extra:
        everywhere = torch.tensor(float(compiled()))
        dist.all_reduce(everywhere, op=dist.ReduceOp.MIN)
        over += int(everywhere)
if dist.get_rank() == 0:
    print("steps", number)
    print("sum", repr(sum(p.double().sum().item() for p in plain.parameters())))
    if not extra:
        print("by", LEDGER.report().regions[0].compiled_by.replace(" ", "-"))
        [entry] = deepytorch.report().to_json()["gradients"]
        print("ours", entry["syncs"] > 0)
"""

ONE_CANNOT = """
from deepytorch.compiler.code import lower_region
def lower(*_, **__):
    raise NotImplementedError("nothing that this compiler knows")
if os.environ["RANK"] == "1":
    lower_region.lower = lower
time.sleep(5)  # old enough for a trace
"""

END = "dist.destroy_process_group()\n"

AFTERWARDS = """
[region] = LEDGER.report().regions
fell = [None, None]
dist.all_gather_object(fell, bool(region.fallbacks))
if dist.get_rank() == 0:
    print("fell0", fell[0], "fell1", fell[1], "by", region.compiled_by or "nobody")
"""
