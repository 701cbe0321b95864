"""What a value is computed from, in-place writes included, and what follows from the batch alone."""

from __future__ import annotations

import operator

import torch

from deepytorch.passes.base import Role
from deepytorch.passes.slicing import Slicer
from tests.passes.padded_graph import PaddedGraph

aten = torch.ops.aten


def test_what_follows_from_the_batch_alone() -> None:
    g = PaddedGraph()
    weight, x = g.weight(4), g.x("r", "p", 4)
    buffer = g.buffer(torch.zeros(4))
    of_batch = g.call(aten.add.Scalar, g.mask, 1)
    of_buffer = g.call(aten.add.Tensor, buffer, 1)
    of_size = g.call(operator.add, g.size("p"), 1)
    of_weight = g.call(aten.mul.Tensor, of_batch, g.call(aten.sum.default, weight))
    drawn = g.call(aten.rand_like.default, buffer)
    kept = g.call(aten.dropout.default, buffer, 0.5, False)
    dropped = g.call(aten.dropout.default, buffer, 0.5, True)
    g.output(of_batch)
    slicer = Slicer(g.graph)
    assert all(slicer.from_batch(node) for node in (g.mask, buffer, of_batch, of_buffer, of_size, kept))
    assert not any(slicer.from_batch(node) for node in (weight, x, of_weight, drawn, dropped))


def test_a_size_is_not_a_value_that_is_read() -> None:
    g = PaddedGraph()
    other = g.batch("r", "q")
    places = g.call(aten.arange.default, g.size("q"), dtype=torch.int64, device="cpu")
    both = g.call(aten.add.Tensor, places, g.call(aten.sum.default, g.mask))
    g.output(both)
    slicer = Slicer(g.graph)
    assert slicer.inputs_read([places]) == []
    assert slicer.inputs_read([both]) == [g.mask]
    assert other in slicer.slice([both])


def test_a_write_through_a_view_belongs_to_the_value() -> None:
    g = PaddedGraph()
    labels = g.call(aten.clone.default, g.batch("r", "p"))
    view = g.call(aten.slice.Tensor, labels, 1, 1, 3)
    write = g.call(aten.mul_.Tensor, view, g.weight(1))
    g.output(labels)
    slicer = Slicer(g.graph)
    assert {view, write} <= {*slicer.slice([labels])}
    assert slicer.is_written(labels)
    assert not slicer.from_batch(labels)  # a parameter was written into it
    assert slicer.written_values() >= {labels, view, write}  # so they stay as they are


def test_writes_into_the_batch_are_named() -> None:
    g = PaddedGraph()
    g.output(g.call(aten.add_.Tensor, g.call(aten.view.default, g.mask, [-1]), 1))
    slicer = Slicer(g.graph)
    assert slicer.writes_inputs
    assert slicer.written_inputs() == [g.mask]
    assert slicer.cannot_pack() == "aten.add_.Tensor writes into the batch (mask)"


def test_a_walk_ends_where_it_is_told_to() -> None:
    g = PaddedGraph()
    a = g.call(aten.relu.default, g.x("r", "p", 4))
    b = g.call(aten.tanh.default, a)
    c = g.call(aten.add.Tensor, a, b)
    g.output(c)
    slicer = Slicer(g.graph)
    assert slicer.slice([c]) == [a.args[0], a, b, c]
    assert slicer.slice([c], frozenset({a})) == [b, c]
    assert slicer.slice([c], frozenset({c})) == []


def test_training_statistics_are_written() -> None:
    g = PaddedGraph()
    buffers = [g.buffer(torch.zeros(4)) for _ in range(2)]
    x = g.call(aten.transpose.int, g.x("r", "p", 4), 1, 2)
    g.output(g.call(aten.batch_norm.default, x, None, None, *buffers, True, 0.1, 1e-5, False))
    assert all(node.meta["input"].role is Role.BUFFER for node in buffers)
    assert Slicer(g.graph).written_inputs() == buffers
