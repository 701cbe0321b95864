"""A model that returns its loss, and a maker of batches for it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Workload:
    """A model whose forward returns its loss, and a maker of batches for it.

    batches: called with (examples of a batch, seed, number of batches); each batch holds the forward's arguments by
    name. rows: examples of a batch: those of the table that the model is known from, or fewer on a CPU.
    """

    model: nn.Module
    batches: Callable[[int, int, int], list[dict[str, Tensor]]]
    rows: int = 8


@contextlib.contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Draw from `seed` inside of the block, and leave the generator as it was."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield
