"""Torch's counter of floating-point operations knows our operators, by which partitioners and reports go."""

from __future__ import annotations

import torch
from torch.utils.flop_counter import FlopCounterMode

from deepytorch.passes.ops.linear_cross_entropy import linear_cross_entropy
from deepytorch.passes.ops.varlen_attention import varlen_attention


def test_attention_counts_as_the_padded_one_of_its_longest_row() -> None:
    lengths, heads, dim = (3, 5, 4), 2, 8
    offsets = torch.tensor([0, 3, 8, 12], dtype=torch.int32)
    q, k, v = (torch.randn(sum(lengths), heads, dim, requires_grad=True) for _ in range(3))
    with FlopCounterMode(display=False) as counter:
        output = varlen_attention(q, k, v, offsets, offsets, max(lengths), max(lengths))
    products = 2 * 2 * sum(lengths) * max(lengths) * heads * dim
    assert counter.get_total_flops() == products
    with FlopCounterMode(display=False) as counter:
        output.sum().backward()
    assert counter.get_total_flops() == products * 5 // 2


def test_a_loss_counts_its_logits_and_gradients() -> None:
    tokens, width, classes = 6, 8, 10
    hidden, weight = (torch.randn(size, width, requires_grad=True) for size in (tokens, classes))
    with FlopCounterMode(display=False) as counter:
        linear_cross_entropy(hidden, weight, torch.randint(classes, (tokens,))).backward()
    assert counter.get_total_flops() == 3 * 2 * tokens * width * classes
