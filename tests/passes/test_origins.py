"""Two sequences of one length are told apart by where their values come from."""

from __future__ import annotations

import torch
from torch import fx

from deepytorch.passes.slicing import Slicer
from deepytorch.passes.unpad.attentions import find_attentions
from deepytorch.passes.unpad.origins import Origins, are_one_sequence, origins
from tests.passes.padded_graph import PaddedGraph, Step, attend, key_mask, project

aten = torch.ops.aten


def found(g: PaddedGraph, node: fx.Node) -> set[fx.Node]:
    g.output(node)
    return set(origins(g.graph, g.layouts(), find_attentions(g.graph), Slicer(g.graph))[node])


def embedded(g: PaddedGraph, ids: fx.Node) -> fx.Node:
    return g.call(aten.embedding.default, g.weight(5, 6), ids)


def test_embeddings_follow_their_ids() -> None:
    g = PaddedGraph()
    ids, kinds = g.batch("r", "p"), g.batch("r", "p")
    assert found(g, g.call(aten.add.Tensor, embedded(g, ids), embedded(g, kinds))) == {ids, kinds}


def test_embeddings_that_were_given_and_computed_ids() -> None:
    g = PaddedGraph()
    x, ids = g.x("r", "p", 6), g.batch("r", "p")
    places = g.call(aten.mul.Scalar, g.call(aten.cumsum.default, ids, 1), 2)
    assert found(g, g.call(aten.add.Tensor, x, embedded(g, places))) == {x, ids}


def test_what_has_no_tokens_has_no_origin() -> None:
    g = PaddedGraph()
    x = g.x("r", "p", 6)
    assert found(g, g.call(aten.add.Tensor, x, g.call(aten.relu.default, g.x("r", 1, 6)))) == {x}


def test_an_attention_hands_on_the_origins_of_its_queries() -> None:
    g = PaddedGraph()
    x, y = g.x("r", "p", 6), g.x("r", "p", 6)
    q, k, v = project(g, x, 2), project(g, y, 2), project(g, y, 2)
    assert found(g, g.call(aten.scaled_dot_product_attention.default, q, k, v, key_mask(g))) == {x}


def test_groups() -> None:
    a, b, c, d = (fx.Graph().placeholder(name) for name in "abcd")

    def one(*sets: tuple[fx.Node, ...]) -> bool:
        return are_one_sequence(Origins(each) for each in sets)

    assert one()
    assert one((a,))
    assert one((a,), (a, b), (b,))
    assert not one((a,), (b,))
    assert one((a,), (b,), (a, b))  # what comes last joins them
    assert one((a, b), (c, d), (b, c))
    assert not one((a, b), (c, d))
    assert one((a,), ())  # without an origin a value belongs to any


def test_a_source_of_the_target_s_length_is_left_padded() -> None:
    g = PaddedGraph()
    other = g.batch("r", "p", name="source_mask")
    x, source = g.x("r", "p", 6), g.x("r", "p", 6)
    x = attend(g, x, key_mask(g))
    q, k, v = project(g, x, 2), project(g, source, 2), project(g, source, 2)
    y = g.call(aten.scaled_dot_product_attention.default, q, k, v, key_mask(g, other))
    y = g.call(aten.reshape.default, g.call(aten.transpose.int, y, 1, 2), [g.size("r"), g.size("p"), 8])
    g.output(y)
    step = Step(g)
    assert step.rewrite.program is None
    assert "two sequences share their positions" in step.reasons[0]


def test_two_values_of_one_sequence_are_packed() -> None:
    g = PaddedGraph()
    ids = g.batch("r", "p")
    x, y = embedded(g, ids), embedded(g, ids)
    g.output(g.call(aten.add.Tensor, attend(g, x, key_mask(g)), attend(g, y, key_mask(g))))
    assert Step(g).rewrite.program is not None
