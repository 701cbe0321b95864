"""Queries that see no key, whose softmax is NaN where it is written out and scores are filled with minus infinity.

They stand at pads, but NaN reaches every gradient: what a pad's query computes is multiplied by a gradient of zero.
Packed, a batch with such pads would train where eager does not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import fx

from deepytorch.passes.unpad.attentions import Term


def infinite_scores(terms: Sequence[Term], values: Mapping[fx.Node, Any], sizes: tuple[int, int, int]) -> torch.Tensor:
    """Return the scores (rows, queries, keys), bool, that become minus infinity in some head of a probe.

    sizes: rows, queries and keys.
    """
    rows, queries, keys = sizes
    infinite = torch.zeros(rows, 1, queries, keys, dtype=torch.bool)
    for term in terms:
        value = values[term.node]
        if term.kind != "added" and not term.infinite:
            continue
        hidden = (value == -math.inf) if term.kind == "added" else value.bool() == (term.kind == "hidden")
        if term.ndim == 3 and hidden.dim() == 3 and hidden.shape[0] != 1:  # rows and heads are merged
            hidden = hidden.reshape(rows, -1, *hidden.shape[1:])
        infinite = infinite | hidden
    return infinite.any(1)


def need_first_token(
    infinite: Sequence[torch.Tensor], tokens: Sequence[torch.Tensor], window: tuple[int, int]
) -> bool | None:
    """Return whether queries that see no key all stand before the first token of their row; False where there are none.

    None: they stand elsewhere, too, or may do so on a longer batch. Rows without a token do not count.

    Args:
        infinite: `infinite_scores` of each probe.
        tokens: (rows, positions) bool of each probe.
        window: how far tokens see to the left and to the right; -1: without a limit.
    """
    if window[0] >= 0 and any(bool(each.any()) for each in infinite):
        return None  # pads far behind the last token
    found = False
    for scores, mask in zip(infinite, tokens, strict=True):
        empty = scores.all(-1) & mask.any(1, keepdim=True)
        if (empty & (mask.cumsum(1) > 0)).any():
            return None
        found = found or bool(empty.any())
    return found
