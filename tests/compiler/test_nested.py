"""Graphs that are compiled and not run: nothing of them has happened, and what is called afterwards is the graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from deepytorch.compiler.code.nested import prepare_nested


def draws(x: torch.Tensor, seen: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Draws random numbers and writes to an argument, as dropout and statistics of batches do."""
    seen.add_(1.0)
    return (torch.nn.functional.dropout(x, 0.5),)


def as_it_is(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
    return module.forward


@pytest.mark.parametrize("stance", ["default", "eager_on_recompile", "fail_on_recompile", "force_eager"])
def test_nothing_runs_whatever_stance_the_script_takes(stance: str) -> None:
    torch._dynamo.reset()
    x, seen, state = torch.ones(4, 6), torch.zeros(()), torch.get_rng_state()
    with torch.compiler.set_stance(stance):
        call = prepare_nested(fx.symbolic_trace(draws), as_it_is, [x, seen], [(0,), ()])
    assert torch.equal(torch.get_rng_state(), state)
    assert seen.item() == 0.0
    (found,) = call(x, seen)
    torch.set_rng_state(state)
    assert torch.equal(found, torch.nn.functional.dropout(x, 0.5))
    assert seen.item() == 1.0


def test_what_has_been_compiled_is_what_runs() -> None:
    torch._dynamo.reset()
    made = []

    def backend(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        made.append(module)
        return lambda *arguments: tuple(7 * each for each in module.forward(*arguments))

    call = prepare_nested(fx.symbolic_trace(lambda x: (x + 1,)), backend, [torch.ones(4, 6)], [(0,)])
    for rows in (4, 5, 9):
        assert torch.equal(call(torch.ones(rows, 6))[0], torch.full((rows, 6), 14.0))
    assert len(made) == 1


def test_autocast_that_a_graph_enters_by_calls_is_traced_as_with_blocks() -> None:
    """Dynamo of torch 2.11 traces no such calls, and left autocast as they had set it."""
    torch._dynamo.reset()
    graph = fx.Graph()
    x = graph.placeholder("x")
    outer = graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, True, None))
    first = graph.call_function(torch.matmul, (x, x))
    inner = graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.bfloat16, False, None))
    second = graph.call_function(torch.matmul, (x, x))
    graph.call_function(torch.amp.autocast_mode._exit_autocast, (inner,))
    empty = graph.call_function(torch.amp.autocast_mode._enter_autocast, ("cpu", torch.float16, True, None))
    graph.call_function(torch.amp.autocast_mode._exit_autocast, (empty,))
    third = graph.call_function(torch.matmul, (x, x))
    graph.call_function(torch.amp.autocast_mode._exit_autocast, (outer,))
    graph.output((first, second, third, graph.call_function(torch.matmul, (x, x))))
    module = fx.GraphModule(torch.nn.Module(), graph)
    call = prepare_nested(module, as_it_is, [torch.ones(3, 3)], [()])
    assert "_autocast(" not in module.code
    half, single = torch.bfloat16, torch.float32
    assert [each.dtype for each in call(torch.ones(3, 3))] == [half, single, half, single]
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("error", [NotImplementedError, IndexError])
def test_nothing_has_run_where_it_cannot_be_compiled(error: type[Exception]) -> None:
    torch._dynamo.reset()
    x, seen, state = torch.ones(4, 6), torch.zeros(()), torch.get_rng_state()

    def backend(module: fx.GraphModule, _: Sequence[Any]) -> Callable[..., Any]:
        raise error("nothing that this compiler knows")

    with pytest.raises(Exception, match="nothing that this compiler knows"):
        prepare_nested(fx.symbolic_trace(draws), backend, [x, seen], [(0,), ()])
    assert torch.equal(torch.get_rng_state(), state)
    assert seen.item() == 0.0
