"""Activations that compiled code computes again in its backward, in place of holding them since the forward.

Torch's partitioner takes the share of a forward's activations to hold (`torch._functorch.config.
activation_memory_budget`), and chooses by a knapsack what costs least to compute again. What a step then holds is not
that share, and a smaller share may hold more. So a graph is parted for one share after another, and what each way
holds is added up from the sizes of the tensors.

With a share below 1 the partitioner of torch 2.13 would draw random numbers anew in the backward (`aten.bernoulli`,
`aten.randint`; dropout too, where the share is 0): others than the forward has drawn. So they are marked to be held.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

from deepytorch.log import logger
from deepytorch.passes.graphs import copied
from deepytorch.torch_internals import functorch_config, min_cut_rematerialization_partition

Parts = tuple[fx.GraphModule, fx.GraphModule]
_MOST_TRIES = 6
_LEAST_ASKED = 0.001  # at 0 torch holds nothing but inputs, whatever is marked


def partition(joint: fx.GraphModule, joint_inputs: Sequence[Any], *, share: float, **settings: Any) -> Parts:
    """Part a joint graph into a forward and a backward, as `min_cut_rematerialization_partition` does.

    Args:
        joint: The graph of forward and backward.
        joint_inputs: Its inputs.
        share: The most activations that the forward may hold, as a share of what torch would have it hold, from 0 to 1.
            If no way holds as little, the one that holds the least is taken.
        settings: Passed on.
    """
    if is_used(share):
        _hold_random_numbers(joint)
    spare = _copy(joint) if share < 1.0 else joint
    best = min_cut_rematerialization_partition(joint, joint_inputs, **settings)  # type: ignore[arg-type]
    if share >= 1.0:
        return best
    count = settings["num_fwd_outputs"]
    most = least = held_bytes(best[0], count)
    for number in range(_MOST_TRIES):
        if least <= share * most:
            break
        asked = max(share * (1 - number / (_MOST_TRIES - 1)), _LEAST_ASKED)
        with functorch_config.patch(activation_memory_budget=asked):
            parts = min_cut_rematerialization_partition(_copy(spare), joint_inputs, **settings)  # type: ignore[arg-type]
        held = held_bytes(parts[0], count)
        if held < least:
            best, least = parts, held
    logger.info("%.1f MB of activations are held for the backward, in place of %.1f MB", least / 2**20, most / 2**20)
    return best


def is_used(share: float) -> bool:
    """Return whether activations are computed again: by our share, or by the one that a script has set for torch."""
    return share < 1.0 or functorch_config.activation_memory_budget < 1.0


def _hold_random_numbers(joint: fx.GraphModule) -> None:
    """Mark what a forward draws to be held for its backward."""
    of_backward: set[fx.Node] = set()
    for node in joint.graph.nodes:
        is_tangent = node.op == "placeholder" and "tangents" in str(node.target)
        if is_tangent or any(each in of_backward for each in node.all_input_nodes):
            of_backward.add(node)
        elif torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


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
            value = node.meta["val"]  # type: ignore[union-attr]
            sizes = [(each.node.hint or 1) if isinstance(each, torch.SymInt) else each for each in value.shape]
            found[memory] = max(found.get(memory, 0), functools.reduce(int.__mul__, sizes, 1) * value.element_size())
    return sum(found.values())


def _memory(node: fx.Node) -> Any:
    """Return a key of the memory that a node's tensor is in; None if it has no tensor."""
    value = node.meta.get("val")
    return value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None


def partitioner(share: float, key: str) -> Any:
    """Return `partition` for a share of activations, in the form that Inductor takes (`custom_partitioner_fn`).

    key: of the source of `partition`, for the compile caches.
    """
    from deepytorch.torch_internals import CustomPartitionerFn

    @dataclass(frozen=True)
    class HeldShare(CustomPartitionerFn):
        share: float
        key: str

        def __call__(self, gm: fx.GraphModule, joint_inputs: Sequence[Any], **settings: Any) -> Parts:
            return partition(gm, joint_inputs, share=self.share, **settings)

        def uuid(self) -> str:
            """Return the key in the compile caches."""
            return f"{self.key} {self.share}"

    return HeldShare(share, key)
