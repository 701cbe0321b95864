"""The bias of `varlen_attention` for one tile, and its gradient: padded positions of the bias against packed tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from deepytorch.passes.ops.attention_tile import statistics_dtype


class Span(NamedTuple):
    """The places of consecutive tokens of one row along one dimension of the bias: from `start` on, or at `at`."""

    start: int
    length: int
    at: Tensor | None = None

    def of(self, x: Tensor, dim: int) -> Tensor:
        """Return the entries of `x` for these tokens, or all of `x` if `dim` is broadcast."""
        if x.size(dim) == 1 and self.at is None:
            return x
        return x.narrow(dim, self.start, self.length) if self.at is None else x.index_select(dim, self.at)


def span(x: Tensor, dim: int, positions: Tensor | None, start: int, stop: int, row_start: int) -> Span:
    """Return the places, along `dim` of `x`, of tokens start:stop of the row that begins at token `row_start`."""
    if x.size(dim) == 1:
        return Span(0, 1)
    if positions is None:
        return Span(start - row_start, stop - start)
    wanted = positions[start:stop]
    values = wanted.tolist()
    if values == list(range(values[0], values[0] + len(values))):  # true if padding is only at the ends of rows
        return Span(values[0], len(values))
    return Span(0, len(values), wanted)


class BiasGradient:
    """The gradient of the bias, summed tile by tile from the gradients of the scores that the bias was added to."""

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
        if at_k.at is not None:  # index_add_ takes one dimension, so keys are added up first, into full width
            widened = grad_scores.new_zeros(*grad_scores.shape[:2], target.size(2))
            grad_scores, at_k = widened.index_copy_(2, at_k.at, grad_scores), Span(0, target.size(2))
        target = at_k.of(target, 2)
        if at_q.at is not None:
            target.index_add_(1, at_q.at, grad_scores)
        else:
            at_q.of(target, 1).add_(grad_scores)

    def result(self) -> Tensor:
        """Return the gradient in the bias's dtype and shape."""
        return self._total.to(self._dtype)
