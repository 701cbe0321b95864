"""Activations that compiled code computes again in its backward, in place of holding them since the forward.

Torch's partitioner takes the share of a forward's activations to hold (`torch._functorch.config.
activation_memory_budget`), and chooses by a knapsack what costs least to compute again. What a step then holds is not
that share, and a smaller share may hold more. So a graph is parted for one share after another, and what each way
holds is added up from the sizes of the tensors.

With a share below 1 the partitioner of torch 2.13 may draw random numbers anew in the backward (`aten.bernoulli` and
`aten.randint`; dropout too, where the share is 0): others than the forward has drawn. It also computes operators of a
script's own again, which may draw, or have effects. So both are marked to be held, and a way that computes one of them
again all the same is not taken. Marks of activation checkpointing are left as they are: torch puts the random
generators back for these.

What a forward reads from an input that it writes to (a queue, a weight that it normalizes) is always held: the backward
comes after the write, and torch 2.13 computes cheap operators again from what stands there then, with any share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from deepytorch.log import logger
from deepytorch.passes.graphs import copied
from deepytorch.torch_internals import (
    CustomPartitionerFn,
    HigherOrderOperator,
    OpOverload,
    functorch_config,
    min_cut_rematerialization_partition,
)

Parts = tuple[fx.GraphModule, fx.GraphModule]
_MOST_TRIES = 6
_LEAST_SHARE = 0.001  # at 0 torch holds nothing but inputs, whatever is marked
_KNOWN = ("aten", "prims", "inductor", "deepytorch")  # operators without effects


def is_used(share: float) -> bool:
    """Return whether activations are computed again: by our share, or by the one that a script has set for torch."""
    return share < 1.0 or functorch_config.activation_memory_budget < 1.0


def partition(joint: fx.GraphModule, joint_inputs: Sequence[Any], *, share: float, **settings: Any) -> Parts:
    """Part a joint graph into a forward and a backward, as `min_cut_rematerialization_partition` does.

    Args:
        joint: The graph of forward and backward.
        joint_inputs: Its inputs.
        share: The most activations that the forward may hold, as a share of what torch would have it hold, from 0 to 1.
            If no way holds as little, the one that holds the least is taken. At 1, the share that the script has set
            for torch is asked for instead.
        settings: Passed on.
    """
    if not is_used(share):
        return min_cut_rematerialization_partition(joint, joint_inputs, **settings)  # type: ignore[arg-type]
    kept = _mark(joint)

    def parted(asked: float) -> Parts:
        with functorch_config.patch(activation_memory_budget=asked):
            return min_cut_rematerialization_partition(_copy(joint), joint_inputs, **settings)  # type: ignore[arg-type]

    theirs = functorch_config.activation_memory_budget
    best, count = parted(1.0), settings["num_fwd_outputs"]
    most = least = held_bytes(best[0], count)
    asked = [theirs] if share == 1.0 else [share * (1 - number / (_MOST_TRIES - 1)) for number in range(_MOST_TRIES)]
    for each in dict.fromkeys(max(each, _LEAST_SHARE) for each in asked):
        if share < 1.0 and least <= share * most:
            break
        parts = parted(each)
        held = held_bytes(parts[0], count)
        if held < least and not any(node.name in kept for node in parts[1].graph.nodes if node.op == "call_function"):
            best, least = parts, held
    logger.info("%.1f MB of activations are held for the backward, in place of %.1f MB", least / 2**20, most / 2**20)
    return best


def _mark(joint: fx.GraphModule) -> set[str]:
    """Mark what a forward draws, and a script's operators in it, to be held; return the names of these nodes.

    A node of several outputs cannot be marked: its outputs are held, one by one.
    """
    of_backward: set[fx.Node] = set()
    found, reads = set(), _reads_before_writes(joint.graph)
    for node in joint.graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(each in of_backward for each in node.all_input_nodes):
            of_backward.add(node)
        elif node in reads or (_is_to_run_once(node) and node.meta.get("recompute") is None):
            found.add(node.name)
            _hold(node)
    return found


def _hold(node: fx.Node) -> None:
    """Mark a node to be held."""
    if isinstance(node.meta.get("val"), torch.Tensor) and node.meta.get("recompute") is None:
        node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def hold_reads_before_writes(graph: fx.Graph) -> None:
    """Mark what a joint graph reads from inputs that it writes to: a pass over graphs of AOTAutograd."""
    for node in _reads_before_writes(graph):
        _hold(node)


def _reads_before_writes(graph: fx.Graph) -> set[fx.Node]:
    """Return the nodes that read an input to which the step writes, through views of it or not."""
    written, found = _written_inputs(graph), set[fx.Node]()
    if not written:
        return set()
    memory = {_memory(each) for each in written}
    for node in graph.nodes:
        if any(each in written for each in node.all_input_nodes):
            (written if _memory(node) in memory else found).add(node)
    return found


def _written_inputs(graph: fx.Graph) -> set[fx.Node]:
    """Return the inputs that a step writes to: in the graph, or behind it, of which its outputs tell."""
    outputs = graph.output_node().meta.get("desc") or ()
    behind = [each for each in (getattr(desc, "mutated_input", None) for desc in outputs) if each is not None]
    found = {
        node
        for node in graph.nodes
        if node.op == "placeholder" and any(node.meta.get("desc") == each for each in behind)
    }
    for node in graph.nodes:
        schema = node.target._schema.arguments if isinstance(node.target, OpOverload) else ()
        for argument, given in zip(schema, node.args, strict=False):
            is_write = argument.alias_info is not None and argument.alias_info.is_write
            if is_write and isinstance(given, fx.Node) and given.op == "placeholder":
                found.add(given)
    return found


def _is_to_run_once(node: fx.Node) -> bool:
    """Return whether a node draws random numbers, or may have effects."""
    target = node.target
    if isinstance(target, HigherOrderOperator):
        return True
    if not isinstance(target, OpOverload):
        return False
    if torch.Tag.nondeterministic_seeded in target.tags:
        names = [each.name for each in target._schema.arguments]
        given = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
        return given.get("dropout_p", 0.0 if "dropout_p" in names else 1.0) != 0.0  # attention draws with dropout alone
    return target.namespace not in _KNOWN


def _copy(joint: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a joint graph; what its outputs stand for is noted at its output node."""
    made = copied(joint)
    made.graph.output_node().meta.update(joint.graph.output_node().meta)
    return made


def held_bytes(forward: fx.GraphModule, num_outputs: int) -> int:
    """Return the bytes of memory that a forward keeps for its backward, its own inputs left out.

    num_outputs: of the forward's outputs, those of the script; the others are kept.
    """
    found: dict[Any, int] = {}
    own = {_memory(node) for node in forward.graph.nodes if node.op == "placeholder"}
    for node in forward.graph.output_node().args[0][num_outputs:]:  # type: ignore[union-attr,index]
        memory = _memory(node) if isinstance(node, fx.Node) else None
        if memory is not None and memory not in own:
            size = node.meta["val"].untyped_storage().nbytes()  # type: ignore[union-attr]
            found[memory] = (size.node.hint or 1) if isinstance(size, torch.SymInt) else size
    return sum(found.values())


def _memory(node: fx.Node) -> Any:
    """Return a key of the memory that a node's tensor is in; None if it has no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


@dataclass(frozen=True)
class HeldShare(CustomPartitionerFn):
    """`partition` for a share of activations, in the form that Inductor takes (`custom_partitioner_fn`).

    key: of the source of `partition`, for the compile caches; None: nothing is kept there.
    """

    share: float
    key: str | None

    def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **settings: Any) -> Parts:
        return partition(gm, joint_inputs, share=self.share, **settings)

    def uuid(self) -> str | None:
        """Return the key in the compile caches."""
        return None if self.key is None else f"{self.key} {self.share}"
