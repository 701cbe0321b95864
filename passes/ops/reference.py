"""Reference implementations of the operators in plain torch: slow, and differentiable any number of times.

The references serve second derivatives, tests, and readers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from deepytorch.passes.ops.attention_tile import Rule, dropout_factor
from deepytorch.passes.ops.linear_cross_entropy_chunked import LossRule
from deepytorch.passes.ops.pack_facts import Packing


def varlen_attention_reference(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    *,
    bias: Tensor | None = None,
    positions_q: Tensor | None = None,
    positions_k: Tensor | None = None,
    seed: Tensor | None = None,
    sinks: Tensor | None = None,
    rule: Rule,
) -> Tensor:
    """Compute attention row by row, differentiated by autograd; arguments and result as those of `varlen_attention`."""
    group = query.size(1) // key.size(1)
    starts_q, starts_k = cu_seqlens_q.tolist(), cu_seqlens_k.tolist()
    output = query.new_zeros(query.size(0), query.size(1), value.size(2))
    for row in range(len(starts_q) - 1):
        queries, keys = slice(starts_q[row], starts_q[row + 1]), slice(starts_k[row], starts_k[row + 1])
        num_q, num_k = queries.stop - queries.start, keys.stop - keys.start
        if num_q == 0 or num_k == 0:
            continue
        q = query[queries].transpose(0, 1)
        k, v = (x[keys].transpose(0, 1).repeat_interleave(group, dim=0) for x in (key, value))
        scores = (q @ k.transpose(1, 2)) * rule.scale
        if rule.softcap > 0:
            scores = rule.softcap * torch.tanh(scores / rule.softcap)
        if bias is not None:
            at_q = positions_q[queries] if positions_q is not None else torch.arange(num_q, device=query.device)
            at_k = positions_k[keys] if positions_k is not None else torch.arange(num_k, device=query.device)
            picked = bias[row if bias.size(0) > 1 else 0]
            picked = picked[:, at_q] if picked.size(1) > 1 else picked
            picked = picked[:, :, at_k] if picked.size(2) > 1 else picked
            scores = scores + picked
        distance = torch.arange(num_k, device=query.device) - torch.arange(num_q, device=query.device).unsqueeze(1)
        if rule.window_left >= 0:
            scores = scores.masked_fill(distance < -rule.window_left, float("-inf"))
        if rule.window_right >= 0:
            scores = scores.masked_fill(distance > rule.window_right, float("-inf"))
        empty = (scores == float("-inf")).all(-1, keepdim=True)
        scores = scores.masked_fill(empty, 0.0)
        if sinks is not None:
            column = sinks[queries].t() if sinks.dim() == 2 else sinks.unsqueeze(1).expand(-1, num_q)
            scores = torch.cat([scores, column.to(scores.dtype).unsqueeze(-1)], dim=-1)
        probabilities = torch.softmax(scores, dim=-1)[..., :num_k].masked_fill(empty, 0.0)
        if rule.dropout_p > 0:
            assert seed is not None
            indexes = (
                torch.arange(num_q, device=query.device).unsqueeze(0),
                torch.arange(num_k, device=query.device).unsqueeze(0),
            )
            factor = dropout_factor(
                seed, torch.tensor([row], device=query.device), q.size(0), *indexes, rule.dropout_p, scores.dtype
            )
            probabilities = probabilities * factor.squeeze(0)
        output[queries] = (probabilities.to(v.dtype) @ v).transpose(0, 1).to(output.dtype)
    return output


def linear_cross_entropy_reference(
    hidden: Tensor, weight: Tensor, bias: Tensor | None, target: Tensor, class_weight: Tensor | None, rule: LossRule
) -> Tensor:
    """Compute the loss with all logits in memory; arguments and result as those of `linear_cross_entropy`."""
    logits = torch.nn.functional.linear(hidden, weight, bias)
    if rule.softcap > 0:
        logits = rule.softcap * torch.tanh(logits / rule.softcap)
    logits = logits.float() if rule.upcast and logits.dtype != torch.float64 else logits
    loss = torch.nn.functional.cross_entropy(
        logits,
        target,
        class_weight,
        ignore_index=rule.ignore_index,
        reduction=("none", "mean", "sum")[rule.reduction],
        label_smoothing=rule.label_smoothing,
    )
    if rule.z_loss == 0:
        return loss
    counted = target != rule.ignore_index
    squares = (rule.z_loss * torch.logsumexp(logits, -1).square()).masked_fill(~counted, 0.0)
    return loss + (squares, squares.sum() / counted.sum(), squares.sum())[rule.reduction]


def pack_facts_reference(mask: Tensor, labelled: Tensor | None, values: Tensor | None = None) -> Packing:
    """Return the result of `pack_facts`, at its exact length, from flags (rows, positions) bool.

    values: those of the mask.
    """
    values = mask if values is None else values
    odd = ((values != 0) & (values != 1)).sum(1)
    counted = torch.zeros_like(mask) if labelled is None else labelled
    ahead = torch.cat([mask.new_zeros(len(mask), 1), mask[:, :-1]], 1)
    begins = mask & ~ahead
    holes = (begins.sum(1) - 1).clamp(min=0)
    counts = torch.stack([mask.sum(1), counted.sum(1), (counted & ~mask).sum(1), holes, begins[:, 1:].sum(1), odd])
    ranks = mask.flatten().cumsum(0) - 1
    flat, labelled_flat = (each.flatten().nonzero().squeeze(1) for each in (mask, counted))
    cu_seqlens = torch.cat([mask.new_zeros(1, dtype=torch.int64), mask.sum(1).cumsum(0)]).int()
    return Packing(mask, labelled, counts.int(), flat, ranks, labelled_flat, ranks[labelled_flat], cu_seqlens)


def second_derivatives(
    meaning: Callable[..., Tensor],
    grad_output: Tensor,
    inputs: Sequence[Tensor | None],
    wants: Sequence[bool],
    gradients: Sequence[Tensor | None],
) -> list[Tensor | None]:
    """Differentiate an operator's backward once more.

    Args:
        meaning: the operator in plain torch, a function of `inputs`.
        grad_output: the gradient of its output, which the backward was given.
        inputs: the operator's differentiable inputs.
        wants: the inputs that the backward made a gradient of.
        gradients: the gradients of these gradients.

    Returns:
        The gradients of `grad_output` and of each of `inputs`, None where there is none.
    """
    creates_graph = torch.is_grad_enabled()
    with torch.enable_grad(), torch.autocast(grad_output.device.type, enabled=False):
        given = [None if each is None else each.view_as(each) for each in (grad_output, *inputs)]
        if not creates_graph:
            given = [None if each is None else each.detach().requires_grad_() for each in given]
        grad, *leaves = given
        output = meaning(*leaves)
        if not output.requires_grad:  # it does not depend on the inputs, such as attention where no row has a key
            return [None] * len(given)
        differentiated = [
            (leaf, gradient)
            for leaf, wanted, gradient in zip(leaves, wants, gradients, strict=True)
            if leaf is not None and wanted and leaf.requires_grad
        ]
        first = torch.autograd.grad(
            output, [leaf for leaf, _ in differentiated], grad, create_graph=True, materialize_grads=True
        )
        asked = [
            (made, torch.zeros_like(made) if gradient is None else gradient)
            for made, (_, gradient) in zip(first, differentiated, strict=True)
            if made.requires_grad
        ]
        places = [place for place, each in enumerate(given) if each is not None and each.requires_grad]
        second = torch.autograd.grad(
            [made for made, _ in asked],
            [each for each in given if each is not None and each.requires_grad],
            [gradient for _, gradient in asked],
            create_graph=creates_graph,
            allow_unused=True,
        )
    found = dict(zip(places, second, strict=True))
    return [found.get(place) for place in range(len(given))]
