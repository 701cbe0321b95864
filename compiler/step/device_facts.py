"""Facts of a batch that only a device knows: `pack_facts` writes index tensors before the host reads a count."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from deepytorch.log import once
from deepytorch.passes.ops.pack_facts import Packing, Target, pack_facts, takes
from deepytorch.passes.unpad.program import Program


@dataclass(frozen=True)
class OnDevice:
    """The kernel's results for one batch: tokens of each space; for each loss, labels and tokens of its space."""

    spaces: tuple[Packing, ...]
    losses: tuple[Packing, ...]


@dataclass
class _Failure:
    """The memory of a kernel's failure in this process: after one, no kernel is tried again."""

    seen: bool = False


_FAILURE = _Failure()


def pack_on_device(
    program: Program, values: Sequence[torch.Tensor], masks: Sequence[tuple[torch.Tensor, str]]
) -> OnDevice | None:
    """Return the facts of a batch, by a launch or two for each loss and for each space without a loss.

    None if torch's operators have to find them: without a CUDA device or Triton, or for a dtype or shape that the
    kernel was not made for. values: the outputs of `Program.facts`. masks: of each space, values (rows, positions) and
    the name of their reading.
    """
    if _FAILURE.seen:
        return None
    targets = [Target(values[loss.target], loss.ignore_index, loss.offset) for loss in program.losses]
    asked = [(*masks[loss.space], target) for loss, target in zip(program.losses, targets, strict=True)]
    if not all(takes(*each) for each in asked) or not all(takes(*each) for each in masks):
        return None
    try:
        losses = tuple(pack_facts(*each) for each in asked)
        known = {loss.space: packing for loss, packing in zip(program.losses, losses, strict=True)}
        spaces = tuple(known.get(number) or pack_facts(*each) for number, each in enumerate(masks))
    except (torch.OutOfMemoryError, KeyboardInterrupt):
        raise
    except Exception as error:  # no compiler for the launcher, as a rule
        _FAILURE.seen = True
        once(logging.WARNING, "batches are read by torch's operators: %s", str(error)[:500])
        return None
    return OnDevice(spaces, losses)
