"""The bias of `varlen_attention` as one tile sees it, and its gradient: padded positions against packed tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepytorch.passes.ops.attention_tile import statistics_dtype


class Span(NamedTuple):
    """Where consecutive tokens of one row stand along one dimension of the bias: from `start`, or at `at`."""

    start: int
    length: int
    at: Tensor | None = None

    def of(self, x: Tensor, dim: int) -> Tensor:
        """The entries of `x` for these tokens; all of it where `dim` is broadcast."""
        if x.size(dim) == 1 and self.at is None:
            return x
        return x.narrow(dim, self.start, self.length) if self.at is None else x.index_select(dim, self.at)


def span(x: Tensor, dim: int, positions: Tensor | None, start: int, stop: int, row_start: int) -> Span:
    """Where tokens start:stop of the row that begins at token `row_start` stand along `dim` of `x`."""
    if x.size(dim) == 1:
        return Span(0, 1)
    if positions is None:
        return Span(start - row_start, stop - start)
    wanted = positions[start:stop]
    values = wanted.tolist()
    if values == list(range(values[0], values[0] + len(values))):  # so it is where padding stands at the ends only
        return Span(values[0], len(values))
    return Span(0, len(values), wanted)


class BiasGradient:
    """Sums the gradients of scores, tile by tile, into the gradient of the bias that was added to them."""

    def __init__(self, bias: Tensor) -> None:
        self._dtype = bias.dtype
        self._total = torch.zeros(bias.shape, dtype=statistics_dtype(bias.dtype), device=bias.device)

    def add(self, row: int, grad_scores: Tensor, at_q: Span, at_k: Span) -> None:
        """Add the gradient (heads, num_q, num_k) of the scores of some tokens of `row`."""
        target = self._total[row if self._total.size(0) > 1 else 0]
        broadcast = [dim for dim in range(3) if target.size(dim) == 1]
        if broadcast:
            grad_scores = grad_scores.sum(broadcast, keepdim=True)
        grad_scores = grad_scores.to(target.dtype)
        if at_k.at is not None:  # index_add_ takes one dimension: the keys first, into full width
            widened = grad_scores.new_zeros(*grad_scores.shape[:2], target.size(2))
            grad_scores, at_k = widened.index_copy_(2, at_k.at, grad_scores), Span(0, target.size(2))
        target = at_k.of(target, 2)
        if at_q.at is not None:
            target.index_add_(1, at_q.at, grad_scores)
        else:
            at_q.of(target, 1).add_(grad_scores)

    def result(self) -> Tensor:
        """The gradient in the bias's dtype and shape."""
        return self._total.to(self._dtype)
