"""Running of the forward of one call again, in eager, to differentiate it there.

[Note: what is kept] The inputs of a call are kept until its backward: weights live anyway, and values from earlier
regions are mostly saved for the backward too. Inputs are kept longer only if another backward may come as in eager,
through an output that had no gradient for example: while the call's node lives, and the tensors that this output
depends on are not changed. A checkpoint exists to free inputs, so inside of one they are held weakly: its own arguments
are still alive, and if others are gone the backward is stock's. Inputs that the region writes into are copied before,
except for statistics that no output depends on (BatchNorm's).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from deepytorch.compiler.step.past import Past
from deepytorch.torch_internals import will_engine_execute_node


def edges_before(call: Past) -> set[Any]:
    """Return the edges that gradients of the inputs, as they were before the call, go to."""
    found = {edge_of(each) for each in call.living_inputs() or () if isinstance(each, torch.Tensor)}
    return found | {edge_behind(copy) for copy in call.copies.values()}


class Passage(NamedTuple):
    """The way of one backward through a node.

    outputs: those, by number, that had gradients. edges: those that wanted gradients; None: all of them.
    """

    outputs: frozenset[int]
    edges: frozenset[Any] | None


@dataclass(slots=True)
class Rerun:
    """A forward that was run again: its outputs, its inputs as it left them, and the tensors that stood in for them."""

    outputs: Sequence[Any]
    inputs: list[Any]
    sources: dict[Any, torch.Tensor] = field(default_factory=dict)  # by edge


def run_again(
    call: Past,
    edges: Collection[Any],
    *,
    unread: Collection[int],
    needed: Collection[int] | None,
    generators: Sequence[torch.Generator],
) -> Rerun | None:
    """Run the forward of a call in eager; return None if one of its inputs is gone.

    Raises `RuntimeError`, as eager does, if a needed input has been changed since.

    Args:
        call: The call as it began.
        edges: The edges that gradients are wanted for.
        unread: Places of inputs that are written, and that no output depends on.
        needed: Places of inputs that the wanted gradients depend on; None: all.
        generators: All generators that the region could draw from.
    """
    inputs = call.living_inputs()
    if inputs is None:
        return None
    _check(call, inputs, needed)
    found = Rerun((), list(inputs))
    aliases: dict[int, torch.Tensor] = {}
    with call.as_it_was(generators), torch.enable_grad():
        for place, given in enumerate(inputs):
            if not isinstance(given, torch.Tensor):
                continue
            if id(given) not in aliases:
                copy = call.copies.get(place)
                aliases[id(given)] = (
                    given.detach().clone() if place in unread else _stand_in(given, copy, edges, found.sources)
                )
            found.inputs[place] = aliases[id(given)]
        found.outputs = call.eager(*found.inputs)
    return found


def _stand_in(
    given: torch.Tensor, copy: torch.Tensor | None, edges: Collection[Any], sources: dict[Any, torch.Tensor]
) -> torch.Tensor:
    """Return the tensor on which the forward runs in place of an input, so that the input's own hooks do not run."""
    before, edge = (given, edge_of(given)) if copy is None else (copy, edge_behind(copy))
    if edge not in edges:
        return before.detach() if copy is None else before.detach().clone()
    source = before.view_as(before) if before.requires_grad else before.detach().requires_grad_()
    sources[edge] = source
    return source if copy is None else source.clone()


def _check(call: Past, inputs: Sequence[Any], needed: Collection[int] | None) -> None:
    for place in call.changed():
        if needed is None or place in needed:
            given = inputs[place]
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"[{given.type()} {list(given.shape)}] is at version {given._version}; expected version "
                f"{call.versions[place]} instead."
            )


def differentiate(
    node: Any, again: Rerun, edges: Sequence[Any], gradients: Sequence[Any], *, creates: bool, keeps: bool
) -> tuple[Any, ...] | None:
    """Return the gradients that the node hands to its edges; None if its edges or outputs cannot be identified."""
    values = _values(node._forward_cls.metadata, again, len(gradients))
    if values is None or len(edges) != sum(node.needs_input_grad) or any(edge not in again.sources for edge in edges):
        return None
    came = [(value, each) for value, each in zip(values, gradients, strict=True) if each is not None]
    if any(not isinstance(value, torch.Tensor) or value.shape != each.shape for value, each in came):
        return None
    came = [(value, each) for value, each in came if value.requires_grad]
    wanted = wanted_edges(node, edges)
    if not came or not wanted:
        return (None,) * len(node.needs_input_grad)
    results = torch.autograd.grad(
        [value for value, _ in came],
        [again.sources[edge] for edge in wanted],
        [each for _, each in came],
        create_graph=creates,
        retain_graph=keeps,
        allow_unused=True,
    )
    handed = dict(zip(wanted, results, strict=True))
    left = iter(edges)
    return tuple(handed.pop(next(left), None) if needs else None for needs in node.needs_input_grad)


def go_through(node: Any, again: Rerun, passage: Passage, count: int) -> None:
    """Free what an earlier backward freed, so that autograd raises, as in eager, if no further backward may come.

    count: the number of the node's outputs.
    """
    values = _values(node._forward_cls.metadata, again, count)
    came = [] if values is None else [values[number] for number in sorted(passage.outputs)]
    came = [value for value in came if isinstance(value, torch.Tensor) and value.requires_grad]
    wanted = [source for edge, source in again.sources.items() if passage.edges is None or edge in passage.edges]
    if came and wanted:
        torch.autograd.grad(came, wanted, [torch.zeros_like(value) for value in came], allow_unused=True)


def wanted_edges(node: Any, edges: Sequence[Any]) -> list[Any]:
    """Return those of a node's edges, each once, that the running backward goes on to or returns gradients of."""
    behind = [each for each, _ in node.next_functions if each is not None]
    return list({edge: None for edge, each in zip(edges, behind, strict=True) if _is_wanted(each)})


def _is_wanted(node: Any) -> bool:
    try:
        return bool(will_engine_execute_node(node))
    except RuntimeError:  # the engine does not tell of a leaf if only some gradients are asked for
        return True


def _values(metadata: Any, again: Rerun, count: int) -> list[Any] | None:
    """Return eager's values of the node's outputs: changed inputs, outputs, and the bases that outputs are views of."""
    changed, bases = metadata.mutated_inp_runtime_indices, metadata.num_intermediate_bases
    if count != len(changed) + metadata.num_outputs + bases or len(again.outputs) != metadata.num_outputs:
        return None
    if changed and len(metadata.input_info) != len(again.inputs):
        return None
    views: dict[int, Any] = {}
    for info, output in zip(metadata.output_info, again.outputs, strict=True):
        if info.output_type.name in ("alias_of_intermediate", "alias_of_intermediate_save_as_output"):
            views.setdefault(info.base_idx, output._base)
    return [
        *(again.inputs[place] for place in changed),
        *again.outputs,
        *(views.get(number) for number in range(bases)),
    ]


# ---------------------------------------------------------------------- edges, along which gradients go


def edge_of(given: torch.Tensor) -> Any:
    """Return the edge that the gradient of a tensor goes to; None for a tensor that is neither a result nor a leaf."""
    if given.grad_fn is not None:
        return given.grad_fn, given.output_nr
    return (id(given), 0) if given.is_leaf else None


def edge_behind(copy: torch.Tensor) -> Any:
    """Return the edge that the gradient of the tensor behind `copy`, from which `copy` was made, goes to."""
    return None if copy.grad_fn is None else _comparable(*copy.grad_fn.next_functions[0])


def _comparable(node: Any, number: int) -> Any:
    """Return an edge of autograd's in the form that `edge_of` gives."""
    return (id(node.variable), 0) if type(node).__name__ == "AccumulateGrad" else (node, number)


def edges_of(node: Any, known: Collection[Any]) -> list[Any]:
    """Return the edges that the gradients of a node go to.

    An alias of a known edge's tensor, which was made to carry marks for Dynamo, stands for that edge.
    """
    found = []
    for each in node.next_functions:
        if each[0] is None:
            continue
        edge = _comparable(*each)
        behind = each[0].next_functions
        if edge not in known and len(behind) == 1 and behind[0][0] is not None:
            beyond = _comparable(*behind[0])
            edge = beyond if beyond in known else edge
        found.append(edge)
    return found
