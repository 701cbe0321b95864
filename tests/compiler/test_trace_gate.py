"""Which frames are traced and when: never what the run cannot afford; what is left to eager runs as Python has it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from deepytorch.compiler import budget, compile_module
from deepytorch.compiler.budget import SHARE, Budget
from deepytorch.compiler.code import compilers
from deepytorch.compiler.code.compiled_step import CompiledStep
from deepytorch.compiler.code.worker.queue import Compilation
from deepytorch.compiler.compile_module import compiled_call
from deepytorch.compiler.dynamo import trace_gate
from deepytorch.compiler.dynamo.trace_gate import TracedCode, TraceHistory
from deepytorch.compiler.report import LEDGER
from tests.compiler.plain_models import Plain, sdpa_bool


class Run:
    """The run that pauses are charged to: how old it is, as the test says, and its budget."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.age, self.budget = 1e9, Budget()
        monkeypatch.setattr(budget, "seconds_since_start", lambda: self.age)
        for module in (trace_gate, compile_module):
            monkeypatch.setattr(module, "BUDGET", self.budget)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    """A run that nothing has been charged to."""
    torch._dynamo.reset()
    yield Run(monkeypatch)
    torch._dynamo.reset()


def counted(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of nodes of each graph that is handed over from now on; graphs run as they are."""
    graphs: list[int] = []

    def backend(module: Any, example_inputs: Any) -> Any:
        graphs.append(len(module.graph.nodes))
        return module.forward

    monkeypatch.setattr(compile_module, "TorchCompileWrapper", lambda *_: backend)
    return graphs


TRACED: list[None] = []


@torch._dynamo.assume_constant_result
def trace_slowly() -> int:
    TRACED.append(None)
    time.sleep(0.02)
    return 0


def of_own(name: str, forward: Any) -> nn.Module:
    """A linear layer in a class of its own, with this forward."""
    module = type(name, (nn.Module,), {"forward": forward})()
    module.layer = nn.Linear(4, 4)
    return module.train()


def test_what_the_run_cannot_afford_runs_as_python_has_it(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, seen = counted(monkeypatch), []

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        seen.append(torch.compiler.is_compiling())
        return self.layer(x)

    model, x = of_own("Unaffordable", forward), torch.ones(2, 4)
    call = compiled_call(type(model), None, {"wait": False}, first_seconds=1.0)
    compile_module._OWN[type(model)].history.granted = False
    run.age = 0.5 / SHARE
    for _ in range(3):
        torch.testing.assert_close(call(model, x), model(x), rtol=0, atol=0)
    assert graphs == []
    assert not any(seen)
    run.age = 1e9
    call(model, x)
    assert len(graphs) >= 1
    assert run.budget.paused > 0
    assert run.budget.balance == -run.budget.paused


def test_a_trace_that_takes_longer_than_the_run_can_afford_is_ended(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    graphs, traced = counted(monkeypatch), TRACED
    traced.clear()

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        for turn in range(200):
            if torch.compiler.is_compiling():
                trace_slowly()
            x = self.layer(x) / (turn + 1)
        return x

    model, x = of_own("SlowToTrace", forward), torch.ones(2, 4)
    call = compiled_call(type(model), None, {"wait": False}, first_seconds=0.01)  # as was thought
    history, run.age = compile_module._OWN[type(model)].history, 0.3 / SHARE
    torch.testing.assert_close(call(model, x), model(x), rtol=0, atol=0)
    assert graphs == []
    assert 0 < len(traced) < 30
    [seconds] = [each.seconds for each in history.codes.values()]
    assert seconds >= 2 * trace_gate._OF_PAUSE * 0.3
    call(model, x)  # would take what is thought now
    assert len(traced) < 30
    run.age = 1000 / SHARE
    torch.testing.assert_close(call(model, x), model(x), rtol=0, atol=0)
    assert len(graphs) == 1


def test_the_first_frame_was_decided_on_and_those_behind_a_break_are_not(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = counted(monkeypatch)

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(x)
        torch._dynamo.graph_break()
        return torch.relu(x)

    model, x = of_own("Broken", forward), torch.ones(2, 4)
    run.age = 0.0
    call = compiled_call(type(model), None, {"wait": False}, first_seconds=1.0)
    torch.testing.assert_close(call(model, x), model(x), rtol=0, atol=0)
    first = len(graphs)
    assert first <= 1
    run.age = 1e9
    torch.testing.assert_close(call(model, x), model(x), rtol=0, atol=0)
    assert len(graphs) > first


def test_a_hook_that_comes_later_is_traced_when_that_can_be_afforded_and_runs_at_once(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphs = counted(monkeypatch)
    model, x = of_own("Hooked", lambda self, x: torch.relu(self.layer(x))), torch.ones(2, 4)
    call = compiled_call(type(model), None, {"wait": False})
    call(model, x)
    traced = len(graphs)
    model.layer.register_forward_hook(lambda module, given, output: output * 0.5)
    run.age = 0.0
    expected = torch.relu(model.layer(x))
    torch.testing.assert_close(call(model, x), expected, rtol=0, atol=0)
    assert len(graphs) == traced
    run.age = 1e9
    torch.testing.assert_close(call(model, x), expected, rtol=0, atol=0)
    assert len(graphs) > traced


def test_nothing_is_traced_inside_of_a_backward(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a checkpoint around the model computes a call again, as it was computed first."""
    graphs = counted(monkeypatch)
    model, x = of_own("Recomputed", lambda self, x: torch.relu(self.layer(x))), torch.ones(2, 4)
    call, seen = compiled_call(type(model), None, {"wait": False}), []
    weight = torch.ones(2, requires_grad=True)
    weight.register_hook(lambda gradient: seen.append(call(model, x)))
    weight.sum().backward()
    torch.testing.assert_close(seen[0], model(x), rtol=0, atol=0)
    assert graphs == []
    call(model, x)
    assert len(graphs) >= 1


class Reversed(torch.autograd.Function):
    """What no other process can compile: a custom function."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ran.append(torch.compiler.is_compiling())
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return -gradient


ran: list[bool] = []


def test_what_no_other_process_can_compile_stays_in_eager_until_a_long_run_pays_for_it(run: Run) -> None:
    model, x = of_own("Custom", lambda self, x: Reversed.apply(self.layer(x)).sum()), torch.ones(2, 4)
    run.age = 10.0 / SHARE  # enough for the trace, not for the compile
    call = compiled_call(type(model), None, {"wait": False})
    for _ in range(2):
        ran.clear()
        call(model, x).backward()
        assert ran == [False]  # the function itself, not what Dynamo has made of it
    torch.testing.assert_close(model.layer.bias.grad, torch.full((4,), -4.0))
    [record] = [each for each in LEDGER.report().regions if each.name == "a part of Custom"]
    assert "no other process can compile it" in record.declined[0]


def test_a_frame_that_comes_out_for_each_size_is_traced_twice(run: Run) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        state = x[:, 0]
        for place in range(1, x.shape[1]):
            state = torch.tanh(self.layer(state) + x[:, place])
        return state.sum()

    model = of_own("Loop", forward)
    call = compiled_call(type(model), None, {"wait": False})
    for length in (3, 4, 5, 6):
        x = torch.ones(2, length, 4)
        torch.testing.assert_close(call(model, x), model(x))
    history = compile_module._OWN[type(model)].history
    assert [len(each.sizes) for each in history.codes.values() if each.sizes] == [2]
    assert [each.is_fixed() for each in history.codes.values() if each.sizes] == [True]


def test_what_dynamo_cannot_follow_runs_in_eager_and_says_so_once(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> Any:
        raise RuntimeError("nothing that this tracer knows")

    model, x = of_own("Strange", lambda self, x: self.layer(x)), torch.ones(2, 4)
    counted(monkeypatch)
    made = compile_module.TraceGate
    monkeypatch.setattr(compile_module, "TraceGate", lambda traces, *rest: made(fails, *rest))
    call = compiled_call(type(model), None, {"wait": False})
    for _ in range(2):
        torch.testing.assert_close(call(model, x), model(x), rtol=0, atol=0)
    [record] = [each for each in LEDGER.report().regions if each.name == "a part of Strange"]
    assert "could not follow" in record.declined[0]


def test_what_the_next_trace_is_thought_to_take() -> None:
    code, other = test_what_the_next_trace_is_thought_to_take.__code__, of_own.__code__
    history = TraceHistory(first_seconds=3.0)
    assert history.expected_seconds(code) == 3.0
    history.codes[other] = TracedCode(seconds=5.0)
    assert history.expected_seconds(code) == 5.0  # as long as another frame of the class
    history.codes[code] = TracedCode(seconds=1.0, extra_seconds=20.0)
    assert history.expected_seconds(code) == 21.0
    history.of(code).sizes |= {1, 2}
    assert history.expected_seconds(code) == float("inf")


def test_a_pause_inside_of_another_one_is_charged_once() -> None:
    account = Budget()
    with account.pause(), account.pause():
        pass
    assert account.balance == -account.paused
    with pytest.raises(ValueError, match="of the work"), account.pause():
        raise ValueError("of the work")
    with account.pause():
        pass
    assert account.balance == pytest.approx(-account.paused)


@pytest.mark.parametrize("packs", [True, False])
def test_steps_run_padded_until_they_are_compiled_where_packing_in_eager_does_not_pay(
    run: Run, monkeypatch: pytest.MonkeyPatch, packs: bool
) -> None:
    under_way = Compilation("a graph")
    monkeypatch.setattr(compilers, "compile_in_worker", lambda *_: under_way)
    monkeypatch.setattr(CompiledStep, "__call__", lambda self, arguments: self._module.forward(*arguments))
    model = Plain(sdpa_bool).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    call = compiled_call(type(model), None, {"wait": False}, packs_in_eager=packs)
    ids = torch.randint(1, 90, (4, 12))
    mask = (torch.arange(12) < torch.tensor([[12], [3], [5], [2]])).long()

    def steps(number: int) -> int:
        before = LEDGER.report().total("steps_packed")
        for _ in range(number):
            call(model, ids, mask, ids.masked_fill(mask == 0, -100)).backward()
            optimizer.step()
        return LEDGER.report().total("steps_packed") - before

    steps(2)  # their outputs are watched
    assert steps(3) == (3 if packs else 0)
    under_way.finish()
    steps(1)
    assert steps(3) == 3
