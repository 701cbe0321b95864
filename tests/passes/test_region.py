"""What a deferred output still has to compute."""

from __future__ import annotations

import torch

from deepytorch.passes.unpad.demand import NOTHING, TOKENS, labelled
from deepytorch.passes.unpad.program import IndexSet
from tests.passes.padded_graph import PaddedGraph

aten = torch.ops.aten


def test_an_epilogue_starts_from_what_the_step_computes_for_all_tokens() -> None:
    g = PaddedGraph()
    x = g.call(aten.relu.default, g.x("r", "p", 4))
    labelled_alone = g.call(aten.tanh.default, x)
    logits = g.call(aten.exp.default, labelled_alone)
    g.output(logits)
    region = g.region()
    region.demand = dict.fromkeys(g.graph.nodes, NOTHING)
    region.demand[x], region.demand[labelled_alone] = TOKENS, labelled(0)
    region.entries = {x: IndexSet(0), labelled_alone: IndexSet(0, loss=0)}
    assert region.is_boundary(x)
    assert not region.is_boundary(labelled_alone)  # it has the labelled entries alone
    assert not region.is_boundary(logits)  # nobody computes it
    assert region.epilogue_nodes(logits) == [labelled_alone, logits]
    assert region.epilogue_nodes(x) == []


def test_what_is_of_the_batch_or_whole_is_no_boundary() -> None:
    g = PaddedGraph()
    ids = g.call(aten.add.Scalar, g.mask, 1)
    numbers = g.call(aten.argmax.default, g.x("r", "p", 4), -1)
    g.output(ids, numbers)
    region = g.region()
    region.demand = dict.fromkeys(g.graph.nodes, TOKENS)
    assert not region.is_boundary(ids)
    assert not region.is_boundary(numbers)  # whole numbers have no gradient to be handed on


def test_a_space_strips_by_a_mask_or_by_labels() -> None:
    g = PaddedGraph()
    g.output(g.call(aten.relu.default, g.x("r", "p", 4)))
    region = g.region()
    [space] = region.spaces.values()
    assert space.strips
    space.source = None
    assert not space.strips
    space.trimmed_by = (0,)
    assert space.strips
