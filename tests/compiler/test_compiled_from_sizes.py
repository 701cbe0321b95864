"""Graphs that another process compiles from sizes alone, as it would for a GPU: here with tensors on the CPU."""

from __future__ import annotations

import logging
import types
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx, nn

from deepytorch.compiler.code.compiled_step import CompiledStep
from deepytorch.compiler.code.lower_region import RegionLowering
from deepytorch.compiler.code.worker import gpu, job, keys, process, queue, store
from deepytorch.compiler.code.worker.gpu import Gpu
from deepytorch.compiler.code.worker.graph_data import CannotSend
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.plan import Plan
from deepytorch.compiler.report import RegionRecord
from deepytorch.torch_internals import FakeTensor, FakeTensorMode, compiler_counters, reset_dynamo
from tests.cold import run_cold
from tests.compiler.test_takeover import SCRIPT as TWO_RANKS
from tests.compiler.test_worker import kept, tensors
from tests.compiler.worker_scripts import UNTIL_COMPILED, run, words

assert kept  # a fixture

aten = torch.ops.aten


def product() -> fx.GraphModule:
    """x @ w, forward and backward of which need no C++."""
    made = fx.Graph()
    x, weight = made.placeholder("x"), made.placeholder("weight")
    made.output((made.call_function(aten.mm.default, (x, weight)),))
    return fx.GraphModule(nn.Module(), made)


def lowering(**options: Any) -> RegionLowering:
    """Of a region that is compiled from sizes."""
    config = CompilerConfig(**{"wait": False, "gpu_background": True, **options})
    return RegionLowering(config, Plan.initial("region", config))


def step(**options: Any) -> CompiledStep:
    """Of `product()`; every call is at the beginning of a step."""
    made = CompiledStep(product(), [(0,), ()], lowering(**options), RegionRecord("region", "rewritten", "inductor"))
    made._is_at_boundary = lambda: True  # type: ignore[method-assign]
    return made


# ---------------------------------------------------------------- the setting


def test_the_setting_is_off_unless_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DEEPYTORCH_COMPILE", "background")
    assert not CompilerConfig().compiles_from_sizes
    monkeypatch.setenv("DEEPYTORCH_GPU_COMPILE", "background")
    assert CompilerConfig().compiles_from_sizes
    assert not CompilerConfig(gpu_background=False).compiles_from_sizes
    assert not CompilerConfig(wait=True).compiles_from_sizes


def test_code_of_either_setting_is_kept_apart() -> None:
    plans = [Plan.initial("region", CompilerConfig(wait=False, gpu_background=each)) for each in (None, False, True)]
    assert plans[0].digest() == plans[1].digest() != plans[2].digest()
    assert "shape_padding" not in plans[0].config.inductor_options()
    assert plans[2].config.inductor_options() == {"shape_padding": False}  # else timed while it is compiled
    asked = CompilerConfig(wait=False, gpu_background=True, inductor={"shape_padding": True})
    assert asked.inductor_options() == {"shape_padding": True}


# ---------------------------------------------------------------- arguments without memory


@pytest.mark.parametrize("kind", tensors())
def test_an_argument_is_made_up_without_memory(kind: str) -> None:
    given = tensors()[kind]()
    with FakeTensorMode():
        made = job.Argument.of(given).make(is_fake=True)
    assert isinstance(made, FakeTensor)
    assert isinstance(made, nn.Parameter) == isinstance(given, nn.Parameter)
    for name in ("dtype", "shape", "device", "requires_grad", "is_leaf"):
        assert getattr(made, name) == getattr(given, name), name
    assert (made.stride(), made.storage_offset()) == (given.stride(), given.storage_offset())
    assert made.untyped_storage().nbytes() == given.untyped_storage().nbytes()
    if not given.is_leaf:
        made.add_(1)  # a graph may write to it, as to the given one


def test_an_argument_is_made_up_on_a_device_that_is_not_there() -> None:
    described = replace(job.Argument.of(torch.randn(10, 4)[2:5].t()), device=torch.device("cuda", 1))
    with FakeTensorMode():
        made = described.make(is_fake=True)
    assert (str(made.device), made.shape, made.stride(), made.storage_offset()) == ("cuda:1", (4, 3), (1, 4), 8)
    assert made.untyped_storage().nbytes() == 160


# ---------------------------------------------------------------- from there to here


@pytest.fixture
def in_this_process(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """Have jobs done at once, with caches of their own, by what the other process runs; the arguments made for them."""
    made, make = [], job.Argument.make

    def remember(argument: job.Argument, is_fake: bool = False) -> Any:
        made.append(make(argument, is_fake))
        return made[-1]

    def hand_over(asked: Any) -> None:
        with monkeypatch.context() as there:
            there.setenv("TORCHINDUCTOR_CACHE_DIR", "set below")  # and given back
            answer: dict[str, Any] = process._compile(asked.digest, "Net", asked.job, kept, tmp_path / "scratch")
        reset_dynamo()
        compiler_counters.clear()
        if "error" in answer:
            asked.compilation.finish(answer["error"])
        else:
            queue._load(asked.compilation, asked.digest, answer["seconds"], answer["peak_mb"])

    monkeypatch.setattr(job.Argument, "make", remember)
    monkeypatch.setattr(queue, "_hand_over", hand_over)
    monkeypatch.setattr(queue, "_warm_up", lambda: None)
    reset_dynamo()
    yield made
    reset_dynamo()


def test_what_is_compiled_from_sizes_is_found_by_the_process_that_trains(in_this_process: list[Any]) -> None:
    here = step()
    x, weight = torch.randn(5, 4), nn.Parameter(torch.randn(4, 3))
    assert here.poll((x, weight))
    assert [type(each) for each in in_this_process] == [FakeTensor, FakeTensor]
    (entry,) = store.entries()
    assert "example_inputs[1]" in entry.key()
    [found] = here((x, weight))
    found.sum().backward()
    assert torch.equal(found, x @ weight)
    torch.testing.assert_close(weight.grad, x.sum(0)[:, None].expand(4, 3))
    assert compiler_counters["aot_autograd"]["autograd_cache_hit"] == 1
    assert compiler_counters["inductor"]["fxgraph_cache_hit"] == 2  # forward and backward
    assert compiler_counters["inductor"]["fxgraph_cache_miss"] == 0
    assert (here._record.compiled_by, here._record.compiles, here._record.compiled_here) == ("a process", 0, [])


def test_a_key_that_differs_is_told_by_its_part(in_this_process: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    here = step()
    x, weight = torch.randn(5, 4), nn.Parameter(torch.randn(4, 3))
    assert here.poll((x, weight))
    with job.inductor_config.patch(max_fusion_size=63):  # as if the other process had not been told
        [found] = here((x, weight))
    assert torch.equal(found, x @ weight)
    assert here._record.compiles == 1
    (told,) = here._record.compiled_here
    assert told.endswith("gave it was not found: inductor_config[max_fusion_size] is 64 there and 63 here")


def test_where_the_other_process_fails_this_one_compiles(
    in_this_process: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    def end(asked: Any) -> None:
        asked.compilation.finish("the process that compiled it ended with -9")

    monkeypatch.setattr(queue, "_hand_over", end)
    monkeypatch.setattr(CompiledStep, "_is_for_gpu", lambda *_: True)
    here = step()
    x, weight = torch.randn(5, 4), nn.Parameter(torch.randn(4, 3))
    assert not here.poll((x, weight))
    assert here.poll((x, weight))
    assert torch.equal(here((x, weight))[0], x @ weight)
    record = here._record
    assert (record.compiled_by, record.compiles, record.fallbacks) == ("this process", 1, [])
    assert record.compiled_here == ["another process could not: the process that compiled it ended with -9"]


# ---------------------------------------------------------------- in another process

FROM_SIZES = {"DEEPYTORCH_GPU_COMPILE": "background"}


@pytest.mark.slow
def test_a_script_goes_over_to_code_that_was_compiled_from_sizes(tmp_path: Path) -> None:
    found = words(run(UNTIL_COMPILED, tmp_path, **FROM_SIZES))
    assert (found["by"], found["compiles"], found["fell"]) == ("a-process", "0", "0")
    eager = f"for _ in range({found['steps']}): step()\n" + UNTIL_COMPILED.splitlines()[-1]
    reference = words(run(eager, tmp_path, DEEPYTORCH="off"))
    assert float(found["sum"]) == pytest.approx(float(reference["sum"]), rel=1e-6)


@pytest.mark.slow
def test_where_the_process_is_killed_the_script_compiles_itself(tmp_path: Path) -> None:
    script = """
        from deepytorch import background
        from deepytorch.compiler.code.compiled_step import CompiledStep
        CompiledStep._is_for_gpu = lambda *_: True
        while not background._STARTED: step(); time.sleep(0.05)
        background._STARTED[0].kill()
        deadline = time.time() + 150
        while not compiled() and time.time() < deadline: step(); time.sleep(0.05)
        step()
        region = LEDGER.report().regions[0]
        print("by", region.compiled_by.replace(" ", "-"), "fell", len(region.fallbacks))
        print("why", region.compiled_here[0].replace(" ", "-"))
    """
    why = "another-process-could-not:-the-process-that-compiled-it-ended-with--9"
    assert words(run(script, tmp_path, **FROM_SIZES)) == {"by": "this-process", "fell": "0", "why": why}


@pytest.mark.slow
def test_two_ranks_go_over_to_code_that_was_compiled_from_sizes(tmp_path: Path) -> None:
    script = TWO_RANKS.replace("{total!r}", "{total!r} {told()}").replace("def is_over", f"{TOLD}\ndef is_over")
    settings = {"DEEPYTORCH_COMPILE": "background", "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"), **FROM_SIZES}
    (tmp_path / "xdg").mkdir(mode=0o700)
    done = run_cold(script, num_ranks=2, env={**settings, "XDG_CACHE_HOME": str(tmp_path / "xdg")}, timeout=450)
    one, other = sorted(line.split() for line in done.stdout.splitlines())
    assert one[1:3] == other[1:3]  # steps, and the sum of all weights
    assert one[3] in ("a-process", "an-earlier-run")  # of another rank
    assert one[4:] == other[4:] == ["0", "0"]


TOLD = """
def told():
    from deepytorch.compiler.report import LEDGER
    region = LEDGER.report().regions[0]
    return f"{region.compiled_by.replace(' ', '-')} {region.compiles} {len(region.compiled_here)}"
"""


# ---------------------------------------------------------------- parts of a key


def test_differences_are_few_and_short() -> None:
    there = {f"inputs[{place}]": (f"hash {place}", str(place)) for place in range(12)}
    assert keys.differences(there, there) == ["the keys are equal: what was kept is gone, or its guards do not hold"]
    assert keys.differences({"gm": ("a", "x = 1")}, {"gm": ("b", "x = 2")}) == ["gm is x = 1 there and x = 2 here"]
    without = {name: part for name, part in there.items() if name != "inputs[0]"}
    assert keys.differences(there, without) == ["inputs[0] is 0 there and nothing here"]
    assert keys.differences(there, {})[0].endswith("in this process")
    told = keys.differences(there, dict.fromkeys(there, ("another", "another")))
    assert (len(told), told[-1]) == (9, "4 other parts differ")


def test_of_a_long_value_that_is_told_which_differs() -> None:
    code = "y = x\n" * 100
    (told,) = keys.differences({"gm": ("a", f"{code}z = y{code}")}, {"gm": ("b", f"{code}z = x{code}")})
    there, here = told.removeprefix("gm is ").removesuffix(" here").split(" there and ")
    assert there.replace("z = y", "z = x") == here
    assert "z = y" in there
    assert len(there) < 100


def test_the_log_of_torch_is_as_before(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger(keys._LOGGER)
    before = logger.level
    with keys.seen() as found:
        logger.debug(keys._SAYS + " for key %s:\n%s", "a", "[h] gm: GraphModule()\nmore of it\n[g] config[a.b]: 1: 2")
        logger.debug("something else")
        logger.warning("a warning")
    assert found == {"gm": ("h", "GraphModule()\nmore of it"), "config[a.b]": ("g", "1: 2")}
    assert [each.message for each in caplog.records] == ["a warning"]
    assert (logger.level, logger.filters) == (before, [])


# ---------------------------------------------------------------- the device


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> types.SimpleNamespace:
    """What torch says of two GPUs that are not there, and what it is asked to do there."""
    state = types.SimpleNamespace(current=1, free=2 << 30, asked=[])
    properties = types.SimpleNamespace(name="GPU", major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda index: (state.free, 80 << 30))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: properties)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: state.asked.append(index))
    monkeypatch.setattr(
        torch.cuda, "set_per_process_memory_fraction", lambda part, index: state.asked.append((part, index))
    )
    return state


CUDA_0, CUDA_1, CPU = torch.device("cuda", 0), torch.device("cuda", 1), torch.device("cpu")


def test_a_process_for_a_gpu_may_hold_next_to_nothing_there(device: types.SimpleNamespace) -> None:
    assert Gpu.of([CPU, CPU], {}) is None
    found = Gpu.of([CUDA_1, CPU, CUDA_1], {})
    assert found is not None
    found.expect_memory()
    before = torch.backends.cuda.math_sdp_enabled()
    try:
        torch.backends.cuda.enable_math_sdp(not before)
        found.enter()
        assert torch.backends.cuda.math_sdp_enabled() == before
    finally:
        torch.backends.cuda.enable_math_sdp(before)
    assert device.asked[0] == 1
    part, index = device.asked[1]
    assert (part * (80 << 30), index) == (gpu._MOST_BYTES, 1)
    device.current = 0
    assert Gpu.of([CUDA_0], {}) != found  # code is for one device


@pytest.mark.parametrize(
    ("devices", "options", "free_mb", "why"),
    [
        ((CUDA_0, CUDA_1), {}, 2048, "another device"),
        ((CUDA_0,), {}, 2048, "another device"),
        ((CUDA_1,), {"max_autotune": True}, 2048, "kernels are timed"),
        ((CUDA_1,), {}, 1000, "1000 MB left"),
    ],
)
def test_what_would_disturb_training_on_the_device_is_not_sent(
    device: types.SimpleNamespace, devices: Any, options: Any, free_mb: int, why: str
) -> None:
    def send() -> None:
        found = Gpu.of(devices, options)
        assert found is not None
        found.expect_memory()

    device.free = free_mb << 20
    with pytest.raises(CannotSend, match=why):
        send()


def test_graphs_on_a_device_are_sent_with_the_setting_alone() -> None:
    there = torch.empty(2, device="meta")
    with pytest.raises(CannotSend, match="meta"):
        job.Argument.of(there)
    assert job.Argument.of(there, ("meta",)).device == there.device
