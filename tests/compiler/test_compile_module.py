"""Modules that the import compiles: what they share, and what they run while Dynamo is busy."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

from deepytorch import autowrap
from deepytorch.compiler import compile_module
from deepytorch.compiler.beside import queue
from deepytorch.compiler.compile_module import compiled_call
from deepytorch.compiler.outcome import Outcome, tell


class Counts(nn.Module):
    """Notes each call that runs in eager."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.in_eager = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_compiling():
            self.in_eager.append(tuple(x.shape))
        return self.linear(x).relu()


def call_of(**options: object) -> object:
    return compiled_call(Counts, None, {"lowering": "aot_eager", "wait": True, **options})


def test_while_dynamo_is_busy_known_graphs_run_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    module, call = Counts(), call_of()
    call(module, torch.ones(2, 4))
    module.in_eager.clear()
    monkeypatch.setattr(compile_module, "dynamo_is_busy", lambda: True)
    call(module, torch.ones(2, 4))
    assert module.in_eager == []
    torch.testing.assert_close(call(module, torch.ones(2, 3, 4)), module.linear(torch.ones(2, 3, 4)).relu())
    assert module.in_eager == [(2, 3, 4)]
    monkeypatch.setattr(compile_module, "dynamo_is_busy", lambda: False)
    call(module, torch.ones(2, 3, 4))
    assert module.in_eager == [(2, 3, 4)]  # it was left to eager that once


def test_while_dynamo_is_busy_no_graph_of_other_options_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Dynamo keeps graphs by code object, and asks for no backend where it is only to run."""
    torch._dynamo.reset()
    call_of()(Counts(), torch.ones(2, 4))
    monkeypatch.setattr(compile_module, "dynamo_is_busy", lambda: True)
    other = Counts()
    call_of(unpad=False)(other, torch.ones(2, 4))
    assert other.in_eager == [(2, 4)]


class OpenDoor:
    """Of a model whose graphs cannot be packed."""

    is_the_only_way = False

    def call(self, run: Callable[..., object], args: object, kwargs: object) -> str:
        return "packed"


def test_a_door_is_not_judged_by_a_call_that_was_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiled(module: nn.Module) -> str:
        if not queue.dynamo_is_busy():
            tell(Outcome.UNTRACEABLE)
        return "padded"

    module = nn.Linear(2, 2)
    handle = autowrap.Handle(module, compiled, OpenDoor())  # type: ignore[arg-type]
    monkeypatch.setattr(queue, "dynamo_is_busy", lambda: True)
    assert [handle(module) for _ in range(2)] == ["padded", "padded"]
    monkeypatch.setattr(queue, "dynamo_is_busy", lambda: False)
    assert [handle(module) for _ in range(3)] == ["padded", "packed", "packed"]
