"""Masks that are written for one query and one key, and mapped over all by `torch.vmap`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from deepytorch.compiler.dynamo.vmapped import without_vmaps
from deepytorch.torch_internals import FakeTensorMode
from tests.compiler.parity import (
    Pair,
    batches,
    declined,
    expect_not_packed,
    expect_packed,
    masked_lm_batch,
    padded_because,
)
from tests.compiler.plain_models import SIZES, Plain, attended


def mapped(see: Any, *ranges: int) -> torch.Tensor:
    """What `see` says of all combinations of numbers below `ranges`: a dimension each, as transformers 4 does it."""
    for mapped_over in reversed(range(len(ranges))):
        see = torch.vmap(see, in_dims=tuple(0 if at == mapped_over else None for at in range(len(ranges))))
    found: torch.Tensor = see(*(torch.arange(each) for each in ranges))
    return found


def before_and_a_token(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    tokens = mask.bool()

    def see(row: Any, query: Any, key: Any) -> torch.Tensor:
        return (key <= query) & torch.ops.aten.index.Tensor(tokens, [row, key])

    seen = mapped(see, q.shape[0], q.shape[2], k.shape[2])[:, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=seen | torch.eye(q.shape[2], dtype=torch.bool))


def near_and_a_token(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    tokens = mask.bool()

    def see(row: Any, query: Any, key: Any) -> torch.Tensor:
        return ((query - key).abs() <= 2) & torch.ops.aten.index.Tensor(tokens, [row, key])

    return attended(q, k, v, mapped(see, q.shape[0], q.shape[2], k.shape[2])[:, None])


def as_far_as_the_row_is_long(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    """The window of a row depends on its own length: no meaning that is known."""
    lengths = mask.sum(1)

    def see(row: Any, query: Any, key: Any) -> torch.Tensor:
        return (query - key).abs() * 2 <= torch.ops.aten.index.Tensor(lengths, [row])

    return attended(q, k, v, mapped(see, q.shape[0], q.shape[2], k.shape[2])[:, None])


def test_a_mapped_mask_is_packed() -> None:
    report = Pair(Plain(near_and_a_token).train()).train(batches(masked_lm_batch, *SIZES))
    expect_packed(report, steps=3, padded=1)
    assert list(padded_because(report)) == ["holes between the tokens of a row under a sliding window"]
    assert not declined(report)


def test_a_mapped_mask_with_causality_trains_as_in_eager() -> None:
    Pair(Plain(before_and_a_token).train()).train(batches(masked_lm_batch, *SIZES))


def test_a_mapped_mask_of_another_meaning_keeps_its_attention_padded() -> None:
    report = Pair(Plain(as_far_as_the_row_is_long).train()).train(batches(masked_lm_batch, *SIZES))
    assert "the mask matches no known meaning" in declined(report)


class ScalesRows(nn.Module):
    """A map over numbers with gradients, beside an attention with a mask."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Plain(near_and_a_token)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> Any:
        loss = self.inner(input_ids, attention_mask, labels)
        return loss + torch.vmap(lambda row: row * row.abs().clamp(max=1))(self.inner.places.weight).mean()


def test_a_map_over_numbers_with_gradients_is_left_to_stock() -> None:
    expect_not_packed(Pair(ScalesRows().train()).train(batches(masked_lm_batch, *SIZES)))


def test_a_part_that_cannot_be_traced_stays_and_leaves_no_level_open() -> None:
    """`tolist` of a mapped value fails in a trace as it does in a run."""
    predispatch = torch._functorch.predispatch
    graph = fx.Graph()
    given = graph.placeholder("given")
    graph.call_function(predispatch._vmap_increment_nesting, (3, "error"))
    row = graph.call_function(predispatch._add_batch_dim, (given, 0, 1))
    listed = graph.call_method("tolist", (row,))
    graph.call_function(predispatch._vmap_decrement_nesting)
    graph.output(listed)
    module = fx.GraphModule(nn.Module(), graph)
    with FakeTensorMode() as mode:
        given.meta["example_value"] = torch.arange(3)
        row.meta["example_value"] = torch.tensor(0)

    assert without_vmaps(module, mode) is module
    assert torch._C._functorch.peek_interpreter_stack() is None
