"""`deepytorch verify`: what it finds in scripts that agree, differ, fail, or train in a way of their own."""

from __future__ import annotations

import json
import math
import os
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from deepytorch import cli
from deepytorch.errors import ConfigError, ScriptError
from deepytorch.verify.compare import COUNT, LOSS, NORM, TOTAL, compare
from deepytorch.verify.recorder import Draws, drop_nothing, move_last_bit, parameter_names
from deepytorch.verify.records import Gradients, Job, Loss, Run, read_run
from deepytorch.verify.run import VerifyOptions, refuse_without_training, verify

ROOT = Path(__file__).parents[2]

# A model without a module: nothing is armed, so that the run with the import takes no time to compile.
PLAIN = """
import os, random, sys
import torch
weight = torch.nn.Parameter(torch.randn(4, 3))
bias = torch.nn.Parameter(torch.zeros(3))
with_import = os.environ["DEEPYTORCH"] == "on"
def loss_of(x):
    return (x @ weight + bias).tanh().square().mean()
"""

LLAMA = """
import torch
from transformers import LlamaConfig, LlamaForCausalLM

model = LlamaForCausalLM(
    LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=4,
        max_position_embeddings=64,
    )
)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
for step in range(100):
    ids = torch.randint(3, 64, (4, 16))
    mask = (torch.arange(16) < torch.tensor([[16], [9], [5], [12]])).long()
    loss = model(input_ids=ids, attention_mask=mask, labels=ids.masked_fill(mask == 0, -100)).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
print("went on")
"""


@pytest.fixture(autouse=True)
def _processes_find_this_tree(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.chdir(tmp_path)


def command(monkeypatch, *arguments: str) -> int:
    """Run `deepytorch verify`; return the exit status."""
    monkeypatch.setattr(sys, "argv", ["deepytorch", "verify", *arguments])
    try:
        cli.main()
    except SystemExit as end:
        return int(end.code or 0)
    return 0


def found(script: str, *arguments: str, **options):
    """What `verify` finds in a plain script."""
    Path("script.py").write_text(PLAIN + script)
    return verify(VerifyOptions(command=("script.py", *arguments), timeout_s=120.0, **options))


# scripts


@pytest.mark.slow
def test_a_script_that_agrees(monkeypatch, capsys):
    Path("train.py").write_text(LLAMA)
    status = command(
        monkeypatch, "--steps", "3", "--seed", "7", "--lowering", "aot_eager", "--json", "out.json", "train.py"
    )
    shown = capsys.readouterr().out
    assert status == 0, shown
    assert "Agrees" in shown
    assert "went on" not in shown
    answer = json.loads(Path("out.json").read_text())
    assert answer["agrees"]
    assert answer["steps"] == {"without": 3, "with": 3, "moved": 3}
    assert answer["differs_first"] is None
    assert answer["differences"] == []
    assert answer["report"]["steps_packed"] + answer["report"]["steps_profiled"] == 3
    assert answer["report"]["regions"][0]["lowering"] == "aot_eager"
    assert answer["draws_random_numbers"] == []
    assert [len(losses) for losses in answer["losses"].values()] == [3, 3, 3]
    parameters = 12  # of one layer, its norms, both ends
    assert answer["compared"] == 3 + 3 + 3 * parameters + parameters


@pytest.mark.matrix
@pytest.mark.slow
def test_dropout_can_be_left_out(monkeypatch, capsys):
    Path("script.py").write_text(
        PLAIN
        + """
dropout = torch.nn.Dropout(0.5)
optimizer = torch.optim.SGD([weight, bias], lr=0.1)
loss_of(dropout(torch.ones(5, 4))).backward()
assert dropout.p == 0.0
optimizer.step()
"""
    )
    assert command(monkeypatch, "--no-dropout", "script.py") == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "--no-dropout: 1 settings of dropout were set to zero in all runs." in shown
    assert "The script came to its end after 1 of 10 steps." in shown


DIFFERS = """
optimizer = torch.optim.SGD([weight, bias], lr=0.1)
for step in range(1, 20):
    optimizer.zero_grad()
    loss = loss_of(torch.randn(5, 4))
    if with_import and step >= 2:
        loss = loss * 1.01
    loss.backward()
    optimizer.step()
"""


@pytest.mark.slow
def test_a_script_that_differs(monkeypatch, capsys):
    Path("script.py").write_text(PLAIN + DIFFERS)
    assert command(monkeypatch, "--steps", "4", "--json", "-", "script.py") == 1
    shown = capsys.readouterr()
    answer = json.loads(shown.out)
    first = answer["differs_first"]
    assert not answer["agrees"]
    assert (first["step"], first["kind"], first["name"]) == (2, LOSS, "loss")
    assert first["relative"] == pytest.approx(0.01, rel=0.02)
    assert first["with_import"] == pytest.approx(1.01 * first["without"], rel=1e-6)
    assert 0.0 <= first["sensitivity"] < 1e-5
    assert first["allowed"] == 1e-4
    assert {each["kind"] for each in answer["differences"]} == {LOSS, TOTAL, NORM, "weight at the end"}
    assert "Differs from step 2 on: loss is" in shown.err
    assert "Nothing was packed" in shown.err


@pytest.mark.slow
def test_a_script_that_fails_with_the_import_only(monkeypatch, capsys):
    Path("script.py").write_text(
        PLAIN
        + """
optimizer = torch.optim.SGD([weight, bias], lr=0.1)
for step in range(20):
    loss_of(torch.randn(5, 4)).backward()
    optimizer.step()
    if with_import and step == 1:
        raise ValueError("only [with] it")
"""
    )
    assert command(monkeypatch, "--steps", "4", "--json", "out.json", "script.py") == 1
    shown = capsys.readouterr().out
    assert "Fails with the import only, after 2 of 4 steps" in shown
    assert "ValueError: only [with] it" in shown
    assert "script.py" in shown
    assert "runpy" not in shown
    answer = json.loads(Path("out.json").read_text())
    assert answer["failure"].endswith("ValueError: only [with] it")
    assert answer["steps"]["with"] == 2
    assert answer["compared"] == 2 * (1 + 1 + 2)  # as far as it came
    assert answer["differences"] == []


def test_a_script_that_fails_by_itself(monkeypatch, capsys):
    Path("script.py").write_text('print("before it")\nraise KeyError("rows")\n')
    assert command(monkeypatch, "script.py") == 2
    shown = capsys.readouterr().err
    assert "Error: script.py fails without the import" in shown
    assert "before it" in shown
    assert "KeyError: 'rows'" in shown
    assert "worker.py" not in shown


@pytest.mark.parametrize(
    ("script", "words"),
    [
        ("torch.optim.SGD([weight], lr=0.1).step()", "never called backward"),
        ("import signal\nos.kill(os.getpid(), signal.SIGKILL)", "ended with status -9"),
    ],
)
def test_a_script_with_nothing_to_compare(monkeypatch, capsys, script, words):
    Path("script.py").write_text(PLAIN + script)
    assert command(monkeypatch, "script.py") == 2
    assert words in " ".join(capsys.readouterr().err.split())


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "made no optimizer"),
        ({"optimizers": 1, "backwards": 3}, "called backward 3 times and never the step"),
        ({"failure": "It ended itself: SystemExit(3).", "output": "bad option"}, "SystemExit.*bad option"),
        ({"failure": "It did not come to its end in 5 seconds"}, "in 5 seconds"),
    ],
)
def test_a_run_with_nothing_to_compare_is_refused(fields, words):
    Path("script.py").write_text("")
    with pytest.raises(ScriptError, match=f"(?s)script.py .*{words}"):
        refuse_without_training(VerifyOptions(command=("script.py",)), Run("without", **fields))


@pytest.mark.matrix
@pytest.mark.slow
def test_accumulated_gradients_two_optimizers_and_gradients_of_gradients():
    verdict = found(
        """
one = torch.optim.SGD([weight], lr=0.1)
other = torch.optim.Adam([{"params": [bias]}], lr=0.1)
for step in range(6):
    for _ in range(2):
        loss_of(torch.randn(5, 4)).backward()
    x = torch.randn(5, 4, requires_grad=True)
    (slope,) = torch.autograd.grad(loss_of(x), x, create_graph=True)
    torch.autograd.backward([slope.square().sum(), loss_of(x)])
    one.step(); one.zero_grad()
    other.step(); other.zero_grad()
""",
        steps=4,
    )
    assert verdict.agrees
    kinds = [type(each).__name__ for each in verdict.without.events[1]]
    assert kinds == ["Loss"] * 5 + ["Gradients"]
    assert verdict.without.backwards == 2 * 4
    assert [type(each).__name__ for each in verdict.without.events[2]] == ["Gradients"]
    assert sorted(verdict.without.names) == [0, 1]
    assert [each.name for each in verdict.compared if each.kind == LOSS][:2] == ["loss 1 of 5", "loss 2 of 5"]


@pytest.mark.matrix
@pytest.mark.slow
def test_closures_and_what_python_shows_a_script():
    Path("folder").mkdir()
    Path("folder/beside.py").write_text("ITERATIONS = 3\n")
    Path("folder/script.py").write_text(
        PLAIN
        + """
import beside, numpy
assert __name__ == "__main__" and sys.argv == ["folder/script.py", "--steps", "3"], sys.argv
assert sys.modules["__main__"].__file__.endswith("script.py")
optimizer = torch.optim.LBFGS([weight, bias], max_iter=beside.ITERATIONS)
x = torch.randn(5, 4) * random.random() * numpy.random.rand()
def closure():
    optimizer.zero_grad()
    loss = loss_of(x)
    loss.backward()
    return loss
optimizer.step(closure)
optimizer.step(closure=closure)
"""
    )
    verdict = verify(VerifyOptions(command=("folder/script.py", "--steps", "3"), timeout_s=120.0))
    assert verdict.agrees
    assert verdict.without.losses() == verdict.with_import.losses()  # of the same seeds
    assert verdict.without.ended == verdict.with_import.ended == "script"
    assert verdict.without.steps == 2
    for step in (1, 2):
        kinds = [type(each).__name__ for each in verdict.without.events[step]]
        assert kinds == ["Loss", "Gradients"] * 3
    assert [each.name for each in verdict.compared if each.kind == "weight at the end"] == [
        "parameter 0",
        "parameter 1",
    ]


@pytest.mark.slow
def test_a_script_that_catches_everything_and_a_script_in_a_module():
    Path("package").mkdir()
    Path("package/__init__.py").write_text("")
    Path("package/helper.py").write_text("RATE = 0.1\n")
    Path("package/train.py").write_text(
        PLAIN
        + """
from package.helper import RATE
assert __name__ == "__main__" and sys.argv[1:] == ["--rate", "x"], sys.argv
optimizer = torch.optim.SGD([weight, bias], lr=RATE)
while True:
    try:
        loss_of(torch.randn(5, 4)).backward()
        optimizer.step()
    except BaseException:
        pass
"""
    )
    options = VerifyOptions(command=("package.train", "--rate", "x"), is_module=True, steps=2, timeout_s=120.0)
    verdict = verify(options)
    assert verdict.agrees
    assert verdict.with_import.ended == "steps"


@pytest.mark.matrix
@pytest.mark.slow
def test_a_script_that_does_not_end_is_ended_with_what_it_started(monkeypatch, capsys):
    Path("script.py").write_text(
        PLAIN
        + """
import subprocess, time
optimizer = torch.optim.SGD([weight, bias], lr=0.1)
loss_of(torch.randn(5, 4)).backward()
optimizer.step()
if with_import:
    child = subprocess.Popen(["sleep", "300"])
    open("pids", "w").write(f"{os.getpid()} {child.pid}")
    time.sleep(300)
"""
    )
    before = time.monotonic()
    assert command(monkeypatch, "--timeout", "15", "script.py") == 1
    assert time.monotonic() - before < 120
    shown = capsys.readouterr()
    assert "did not come to its end in 15 seconds (1 of 10 steps made)" in " ".join((shown.out + shown.err).split())
    deadline = time.monotonic() + 10
    for pid in map(int, Path("pids").read_text().split()):
        while _alive(pid):
            assert time.monotonic() < deadline, pid
            time.sleep(0.1)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("missing.py",), "expected a path to a Python script"),
        (("torchrun", "train.py"), "expected the script itself"),
        (("--tolerance", "0", "missing.py"), "tolerance=0.0; expected more than 0"),
        (("--timeout", "0", "missing.py"), "timeout_s=0.0; expected more than 0"),
    ],
)
def test_what_cannot_be_run_is_refused(monkeypatch, capsys, arguments, words):
    assert command(monkeypatch, *arguments) == 2
    assert words in " ".join(capsys.readouterr().err.split())


def test_one_of_several_ranks_is_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="expected one process"):
        VerifyOptions(command=("script.py",))


# the comparison


def a_run(*steps, role="without", **fields) -> Run:
    """A run of steps that are lists of events."""
    run = Run(role, steps=len(steps), ended="steps", names={0: ["one", "two"]}, **fields)
    run.events = {number + 1: list(events) for number, events in enumerate(steps)}
    return run


def losses_compared(without, with_import, moved=None, tolerance=1e-4):
    runs = [None if each is None else a_run(*([Loss(x)] for x in each)) for each in (without, with_import, moved)]
    return [each for each in compare(*runs, tolerance) if each.kind == LOSS]


def test_a_difference_is_judged_by_eagers_own_sensitivity():
    (one,) = losses_compared([1.0], [1.001], [1.0002])
    assert one.agrees
    assert one.sensitivity == pytest.approx(0.0002, rel=0.01)
    assert one.allowed == pytest.approx(10 * one.sensitivity)
    assert not losses_compared([1.0], [1.001], [1.00001])[0].agrees
    assert not losses_compared([1.0], [1.001])[0].agrees
    assert losses_compared([1.0], [1.001], tolerance=0.01)[0].agrees


def test_a_loss_of_nothing_does_not_hide_a_difference():
    # relative to itself, a loss of zero is as sensitive as can be
    (one,) = losses_compared([0.0], [0.123], [1e-12])
    assert not one.agrees
    assert one.relative == 1.0
    assert losses_compared([0.0], [0.0])[0].agrees
    assert losses_compared([0.0], [3e-13], [1e-13])[0].agrees


def test_the_sensitivity_of_the_last_steps_counts():
    found = losses_compared([1.0, 1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.001, 1.0, 1.001], [1.0, 1.001, 1.0, 1.0, 1.0])
    assert [each.agrees for each in found] == [True, True, True, True, False]


def test_numbers_that_are_none():
    nan, inf = math.nan, math.inf
    found = losses_compared([nan, inf, nan, 1.0, 1.0], [nan, inf, 1.0, nan, inf], [nan, inf, nan, 1.0, nan])
    assert [each.agrees for each in found] == [True, True, False, False, False]
    assert json.loads(json.dumps(found[2].to_json(), allow_nan=False))["relative"] == "inf"


def test_gradients_are_compared_by_parameter_and_small_ones_as_parts_of_the_whole():
    one = a_run([Gradients(0, 1.0, (1.0, 1e-9))])
    other = a_run([Gradients(0, 1.0, (1.0, 3e-9))])
    assert all(each.agrees for each in compare(one, other, None, 1e-4))
    other = a_run([Gradients(0, 1.0, (1.0, 1e-4))])
    (differs,) = [each for each in compare(one, other, None, 1e-4) if not each.agrees]
    assert (differs.kind, differs.name, differs.step) == (NORM, "two", 1)
    nothing = a_run([Gradients(0, 1.0, (1.0, None))])
    assert [each.name for each in compare(nothing, nothing, None, 1e-4)] == [TOTAL, "one"]
    assert not all(each.agrees for each in compare(nothing, other, None, 1e-4))


def test_the_first_difference_is_the_first_in_the_order_of_the_script():
    one = a_run([Loss(1.0), Gradients(0, 1.0, (1.0, 1.0)), Loss(2.0)])
    other = a_run([Loss(1.0), Gradients(0, 2.0, (1.0, 1.0)), Loss(3.0)])
    differences = [each for each in compare(one, other, None, 1e-4) if not each.agrees]
    assert [each.name for each in differences] == [TOTAL, "loss 2 of 2"]


def test_calls_are_counted():
    one, other = a_run([Loss(1.0), Loss(1.0)], [Loss(1.0)]), a_run([Loss(1.0)])
    counts = [each for each in compare(one, other, None, 1e-4) if each.kind == COUNT]
    assert [(each.step, each.name) for each in counts] == [
        (1, "number of losses handed to backward"),
        (2, "number of losses handed to backward"),
        (None, "number of optimizer steps"),
    ]
    assert not any(each.agrees for each in counts)
    # a line search that rounding leads elsewhere
    counts = [each for each in compare(one, other, other, 1e-4) if each.kind == COUNT]
    assert all(each.agrees for each in counts)


# the recorder


def test_records_of_a_script_that_died_can_be_read(tmp_path):
    job = Job(
        command=["x"], is_module=False, role="with", steps=2, seed=0, lowering=None, dropout=True, folder=str(tmp_path)
    )
    assert read_run(job).steps == 0
    lines = [
        '{"kind": "backward", "step": 1, "values": [NaN]}',
        '{"kind": "step", "step": 1, "regions": [["r", 1, 0]]}',
    ]
    job.records.write_text("\n".join([*lines, '{"kind": "backw']))
    run = read_run(job)
    assert (run.steps, run.backwards, run.ended) == (1, 1, None)
    assert math.isnan(run.losses()[0])
    assert run.packed == {1: [("r", 1, 0)]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_weights_are_moved_by_one_bit_and_random_numbers_stay(dtype):
    weight = nn.Parameter(torch.randn(50, dtype=dtype))
    before, state, version = weight.detach().clone(), torch.get_rng_state(), weight._version
    move_last_bit(weight, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    assert weight._version == version
    up = torch.nextafter(before, torch.full_like(before, math.inf))
    down = torch.nextafter(before, torch.full_like(before, -math.inf))
    assert ((weight == up) | (weight == down)).all()
    assert (weight == up).any()
    assert (weight == down).any()


def test_every_kind_of_dropout_is_set_to_zero():
    class Config:
        def __init__(self, **values):
            vars(self).update(values)

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.config = Config(attention_dropout=0.1, hidden_size=8, text_config=Config(resid_pdrop=0.2))
            self.attention_dropout = 0.1
            self.drop_path_rate = 0.5
            self.drop_last = True
            self.rate = 0.5

    model = nn.Sequential(nn.Dropout(0.1), nn.Dropout2d(0.2), nn.LSTM(2, 2, 2, dropout=0.3), Attention())
    assert drop_nothing(model) == 7
    assert drop_nothing(model) == 0
    assert model[0].p == model[1].p == model[2].dropout == model[3].attention_dropout == 0.0
    assert model[3].config.text_config.resid_pdrop == 0.0
    assert (model[3].rate, model[3].drop_last, model[3].config.hidden_size) == (0.5, True, 8)


def test_a_model_that_draws_is_named():
    class Noisy(nn.Module):
        def forward(self, x):
            return nn.functional.dropout(x, 0.5, self.training)

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.noisy, self.last = nn.Linear(3, 3), nn.Sequential(Noisy()), nn.Linear(3, 3)

        def forward(self, x):
            return self.last(self.noisy(self.inner(x)))

    model, other = Model(), nn.Dropout()
    draws = Draws()
    draws.watch([model, other], list(model.last.parameters()))
    assert draws.watching
    model.eval()(torch.ones(2, 3))
    other(torch.ones(2))
    assert draws.stop() == []
    draws.watch([model, other], list(model.last.parameters()))
    model.train()(torch.ones(2, 3))
    assert draws.stop() == ["Noisy"]
    assert not draws.watching
    assert not any(each._forward_hooks or each._forward_pre_hooks for each in model.modules())


def test_parameters_have_the_names_of_their_models():
    class First(nn.Linear):
        pass

    one, other = First(2, 2), nn.Sequential(nn.Linear(2, 2))
    loose = nn.Parameter(torch.zeros(1))
    assert parameter_names([one.weight, other[0].bias, loose]) == ["weight", "0.bias", "parameter 2"]
    other = nn.Linear(2, 2)
    assert parameter_names([one.weight, other.weight]) == ["First: weight", "Linear: weight"]
