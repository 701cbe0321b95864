"""Who sees what stands at a pad, on graphs of a few nodes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx

from deepytorch.passes.slicing import Slicer
from deepytorch.passes.unpad.attentions import find_attentions
from deepytorch.passes.unpad.demand import EVERYTHING, NOTHING, TOKENS, Demand, by_token, demands, labelled
from deepytorch.passes.unpad.region import Declined
from deepytorch.passes.unpad.strip_padding import decide
from tests.passes.padded_graph import PaddedGraph

aten = torch.ops.aten
END = torch.iinfo(torch.int64).max


def test_demands_add_up() -> None:
    ordered = [NOTHING, labelled(0), TOKENS, EVERYTHING]
    for low, one in enumerate(ordered):
        for high, other in enumerate(ordered):
            assert one | other == ordered[max(low, high)]
    assert labelled(0) | labelled(0) == labelled(0)
    assert labelled(0) | labelled(1) == TOKENS  # neither loss's entries are those of the other
    assert [each.packable for each in ordered] == [True, True, True, False]


def found(g: PaddedGraph, *nodes: fx.Node, **seen: Any) -> list[Demand]:
    demand = demands(g.graph, g.seen(**seen))
    return [demand[node] for node in nodes]


def test_outputs() -> None:
    g = PaddedGraph()
    x = g.call(aten.relu.default, g.x("r", "p", 4))
    y = g.call(aten.tanh.default, x)
    g.output(y)
    assert found(g, x, y) == [EVERYTHING, EVERYTHING]
    assert found(g, x, y, token_outputs=frozenset({y})) == [TOKENS, TOKENS]
    assert found(g, x, y, deferred=frozenset({y})) == [NOTHING, NOTHING]
    assert found(g, x, y, deferred=frozenset({y}), token_outputs=frozenset({y})) == [NOTHING, NOTHING]


def test_one_use_outside_is_enough() -> None:
    g = PaddedGraph()
    x = g.call(aten.relu.default, g.x("r", "p", 4))
    y = g.call(aten.tanh.default, x)
    g.output(y, x)
    assert found(g, x, y, token_outputs=frozenset({y})) == [EVERYTHING, TOKENS]
    assert found(g, x, y, token_outputs=frozenset({x})) == [EVERYTHING, EVERYTHING]


@pytest.mark.parametrize(
    ("target", "args"),
    [
        (aten.mean.dim, ([1],)),
        (aten.softmax.int, (1,)),
        (aten.cumsum.default, (1,)),
        (aten.flip.default, ([1],)),
        (aten.select.int, (1, 0)),
        (aten.cumprod.default, (-1,)),
    ],
    ids=str,
)
def test_what_looks_across_sees_everything_and_is_named(target: Any, args: tuple[Any, ...]) -> None:
    g = PaddedGraph()
    x = g.call(aten.relu.default, g.x("r", "p", 4))
    y = g.call(target, x, *args)
    g.output(y)
    seen = g.seen(token_outputs=frozenset({y}))
    assert demands(g.graph, seen)[x] == EVERYTHING
    assert seen.refused == {y: str(target)}


def test_nobody_refuses_what_nobody_asks_for() -> None:
    g = PaddedGraph()
    x = g.call(aten.relu.default, g.x("r", "p", 4))
    y = g.call(aten.mean.dim, x, [1])
    g.output(x, y)
    seen = g.seen(token_outputs=frozenset({x}), deferred=frozenset({y}))
    assert demands(g.graph, seen)[x] == TOKENS
    assert not seen.refused


def test_what_is_no_token_value_is_seen_whole() -> None:
    g = PaddedGraph()
    table = g.call(aten.relu.default, g.x("p", 4))
    x = g.x("r", "p", 4)
    y = g.call(aten.mul.Tensor, x, table)
    g.output(y)
    assert found(g, x, table, y, token_outputs=frozenset({y})) == [TOKENS, EVERYTHING, TOKENS]


def test_a_zero_at_pads_ends_the_question() -> None:
    g = PaddedGraph()
    x = g.call(aten.relu.default, g.x("r", "p", 4))
    factor = g.call(aten.unsqueeze.default, g.mask, -1)
    zeroed = g.call(aten.mul.Tensor, x, factor)
    g.output(g.call(aten.sum.dim_IntList, zeroed, [1]))
    assert found(g, x, zeroed) == [EVERYTHING, EVERYTHING]
    assert found(g, x, zeroed, zero_at_pads=frozenset({zeroed})) == [TOKENS, EVERYTHING]


def test_a_zero_at_pads_does_not_raise_what_a_loss_asks_for() -> None:
    g, x, loss = with_loss()
    assert found(g, x, losses={loss: 0}, zero_at_pads=frozenset({x})) == [labelled(0)]


def with_loss(reduction: int = 1) -> tuple[PaddedGraph, fx.Node, fx.Node]:
    g = PaddedGraph()
    x = g.call(aten.relu.default, g.x("r", "p", 4))
    labels = g.call(aten.view.default, g.batch("r", "p"), [-1])
    loss = g.call(aten.cross_entropy_loss.default, g.merged(x), labels, None, reduction)
    g.output(loss)
    return g, x, loss


def test_a_loss_asks_for_the_entries_that_have_a_label() -> None:
    g, x, loss = with_loss()
    assert found(g, x, losses={loss: 3}) == [labelled(3)]
    assert found(g, x, loss.args[1], losses={loss: 3}) == [labelled(3), EVERYTHING]
    assert found(g, x, losses={loss: 3}, loss_rows=False) == [TOKENS]
    assert found(g, x) == [EVERYTHING]  # a loss that is none of ours


def test_entries_that_must_be_kept() -> None:
    g, x, loss = with_loss()
    assert found(g, x, x.args[0], losses={loss: 0}, keep_tokens=frozenset({x})) == [labelled(0), TOKENS]


def test_two_losses_over_the_same_value() -> None:
    g = PaddedGraph()
    x = g.call(aten.relu.default, g.x("r", "p", 4))
    labels = [g.call(aten.view.default, g.batch("r", "p"), [-1]) for _ in range(2)]
    logits = [g.merged(g.call(aten.mul.Scalar, x, number)) for number in (2, 3)]
    losses = [g.call(aten.cross_entropy_loss.default, *pair) for pair in zip(logits, labels, strict=True)]
    g.output(*losses)
    numbers = {loss: number for number, loss in enumerate(losses)}
    assert found(g, x, *logits, losses=numbers) == [TOKENS, labelled(0), labelled(1)]


def test_an_unreduced_loss_runs_on_tokens_unless_somebody_sees_it_at_pads() -> None:
    g, _, loss = with_loss(reduction=0)
    seen = g.seen(losses={loss: 0}, unreduced=frozenset({loss}), attentions={loss: None})
    assert by_token(loss, TOKENS, seen)
    assert not by_token(loss, EVERYTHING, seen)
    seen.attentions = {}
    assert not by_token(loss, TOKENS, seen)
    seen = g.seen(losses={loss: 0}, attentions={loss: None})
    assert not by_token(loss, TOKENS, seen)


def test_a_pick_sees_tokens() -> None:
    g = PaddedGraph()
    x = g.call(aten.relu.default, g.x("r", "p", 4))
    pick = g.call(aten.select.int, x, 1, 0)
    g.output(pick)
    assert found(g, x, picks={pick: 0}) == [TOKENS]
    assert found(g, x) == [EVERYTHING]


def test_an_attention_sees_tokens_and_its_bias_whole() -> None:
    g = PaddedGraph()
    q, k, v = (g.call(aten.relu.default, g.x("r", 2, "p", 4)) for _ in range(3))
    bias = g.call(aten.relu.default, g.x(2, "p", "p"))
    y = g.call(aten.scaled_dot_product_attention.default, q, k, v, bias)
    g.output(y)
    [attention] = find_attentions(g.graph)
    known = {"attentions": {y: attention}, "biases": {y: (bias,)}}
    assert found(g, q, k, v, bias, token_outputs=frozenset({y}), **known) == [TOKENS, TOKENS, TOKENS, EVERYTHING]
    assert found(g, q, k, v, bias, **known) == [EVERYTHING] * 4  # its output at pads follows from keys at pads too
    assert found(g, q, k, v, token_outputs=frozenset({y})) == [EVERYTHING] * 3  # a mask that is not known


def test_inner_values_of_a_packed_attention_are_asked_for_by_nobody() -> None:
    g = PaddedGraph()
    q, k, v = g.x("r", 2, "p", 4), g.x("r", 2, 4, "p"), g.x("r", 2, "p", 4)
    scores = g.call(aten.matmul.default, q, k)
    weights = g.call(aten.softmax.int, scores, -1)
    y = g.call(aten.matmul.default, weights, v)
    g.output(y)
    [attention] = find_attentions(g.graph)
    known = {"attentions": {y: attention}, "biases": {y: ()}}
    assert found(g, scores, weights, q, **{**known, "token_outputs": frozenset({y})}) == [NOTHING, NOTHING, TOKENS]
    assert found(g, scores, weights, q, **known) == [EVERYTHING] * 3


# ------------------------------------------------------------------------------------------------ what is packed


def entries(g: PaddedGraph, *nodes: fx.Node) -> list[Any]:
    region = g.region()
    decide(region)
    return [node in region.entries for node in nodes]


def test_what_is_seen_at_pads_is_not_packed() -> None:
    g = PaddedGraph()
    x = g.call(aten.relu.default, g.x("r", "p", 4))
    y = g.call(aten.tanh.default, x)
    mean = g.call(aten.mean.dim, x, [1])
    g.output(y, mean)
    assert entries(g, x, y, mean) == [False, True, False]


def test_outputs_that_the_rest_of_a_frame_sees_are_not_packed() -> None:
    g = PaddedGraph()
    g.output(g.call(aten.relu.default, g.x("r", "p", 4)))
    region = g.region()
    region.seen.token_outputs = frozenset()
    with pytest.raises(Declined):
        decide(region)


def test_what_is_of_the_batch_alone_is_not_packed() -> None:
    g = PaddedGraph()
    shifted = g.call(aten.add.Scalar, g.batch("r", "p"), 1)
    x = g.call(aten.mul.Tensor, g.x("r", "p"), shifted)
    g.output(x)
    assert entries(g, shifted, x) == [False, True]


def test_a_slice_is_packed_over_its_own_positions() -> None:
    g = PaddedGraph()
    x = g.call(aten.relu.default, g.x("r", "p", 4))
    y = g.call(aten.slice.Tensor, x, 1, 1, END)
    g.output(y)
    region = g.region()
    decide(region)
    assert (region.entries[y].offset, region.entries[y].cut) == (1, 1)
    assert region.entries[x].is_tokens
    assert Slicer(g.graph).slice([y]) == [x.args[0], x, y]
