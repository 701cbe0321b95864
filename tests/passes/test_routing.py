"""Routing of a mixture of experts: entries are packed if each follows from its own token, and stay padded otherwise.

Each case changes one thing of a right routing, so that some token's result follows from other tokens, or from how many
there are.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

pytest.importorskip("transformers.integrations.moe", reason="whose grouped product runs on any dtype")

from deepytorch.passes.unpad.region import Declined
from tests.passes.padded_graph import Packed, PaddedGraph, assert_tokens_as_eager, batches

aten = torch.ops.aten
EXPERTS, PER_TOKEN, DIM = 3, 2, 4


class Routing:
    """One mixture of experts as transformers writes it, node by node; a case overrides one step."""

    def __init__(self) -> None:
        self.g = PaddedGraph()
        g = self.g
        self.x = g.merged(g.x("r", "p", DIM))
        self.scores = g.merged(g.x("r", "p", EXPERTS))
        self.beside: list[fx.Node] = []  # further outputs

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        return self.g.call(target, *args, **kwargs)

    def item(self, node: fx.Node, place: int) -> fx.Node:
        return self.call(operator.getitem, node, place)

    @property
    def entries(self) -> fx.Node:
        g = self.g
        return g.call(operator.mul, g.call(operator.mul, g.size("r"), g.size("p")), PER_TOKEN)

    def keys(self) -> fx.Node:
        found = self.item(self.call(aten.topk.default, self.scores, PER_TOKEN), 1)
        return self.call(aten.reshape.default, found, [-1])

    def sort(self, keys: fx.Node) -> tuple[fx.Node, fx.Node]:
        both = self.call(aten.sort.default, keys)
        return self.item(both, 0), self.item(both, 1)

    def tokens(self, order: fx.Node) -> fx.Node:
        return self.call(aten.floor_divide.default, order, PER_TOKEN)

    def counts(self, keys: fx.Node) -> fx.Node:
        floats = self.call(aten.to.dtype, keys, torch.float32)
        return self.call(aten.histc.default, floats, EXPERTS, 0, EXPERTS - 1)

    def ends(self, counts: fx.Node) -> fx.Node:
        return self.call(aten.cumsum.default, counts, 0, dtype=torch.int32)

    def product(self, x: fx.Node, keys: fx.Node, ends: fx.Node) -> fx.Node:
        return self.call(torch.ops.transformers.grouped_mm_fallback.default, x, self.g.weight(EXPERTS, DIM, DIM), ends)

    def between(self, x: fx.Node) -> fx.Node:
        return self.call(aten.gelu.default, x)

    def inverse(self, order: fx.Node) -> fx.Node:
        places = self.call(aten.arange.default, self.entries)
        return self.call(aten.index_put.default, self.call(aten.empty_like.default, order), [order], places)

    def back(self, x: fx.Node, order: fx.Node) -> fx.Node:
        return self.call(aten.index.Tensor, x, [self.inverse(order)])

    def added(self, x: fx.Node) -> fx.Node:
        split = self.call(aten.reshape.default, x, [-1, PER_TOKEN, DIM])
        return self.call(aten.sum.dim_IntList, split, [1])

    def write(self) -> Packed:
        keys, order = self.sort(self.keys())
        x = self.call(aten.index.Tensor, self.x, [self.tokens(order)])
        x = self.product(x, keys, self.ends(self.counts(keys)))
        x = self.added(self.back(self.between(x), order))
        self.g.output(x, *self.beside)
        return Packed.of(self.g)


class OnePerToken(Routing):
    """Top-1 routing, where an entry is a token."""

    @property
    def entries(self) -> fx.Node:
        return self.g.call(operator.mul, self.g.size("r"), self.g.size("p"))

    def keys(self) -> fx.Node:
        return self.call(aten.argmax.default, self.scores, -1)

    def tokens(self, order: fx.Node) -> fx.Node:
        return order

    def added(self, x: fx.Node) -> fx.Node:
        return x


class OneExpert(Routing):
    """All entries are those of one expert: `histc` has one bin, which reaches from 0 to 0."""

    @property
    def entries(self) -> fx.Node:
        return self.g.call(operator.mul, self.g.size("r"), self.g.size("p"))

    def keys(self) -> fx.Node:
        best = self.call(aten.topk.default, self.call(aten.slice.Tensor, self.scores, 1, 0, 1), 1)
        return self.call(aten.reshape.default, self.item(best, 1), [-1])

    def tokens(self, order: fx.Node) -> fx.Node:
        return self.call(aten.floor_divide.default, order, 1)

    def counts(self, keys: fx.Node) -> fx.Node:
        return self.call(aten.histc.default, self.call(aten.to.dtype, keys, torch.float32), 1)

    def product(self, x: fx.Node, keys: fx.Node, ends: fx.Node) -> fx.Node:
        return self.call(torch.ops.transformers.grouped_mm_fallback.default, x, self.g.weight(1, DIM, DIM), ends)

    def added(self, x: fx.Node) -> fx.Node:
        return self.call(aten.sum.dim_IntList, self.call(aten.reshape.default, x, [-1, 1, DIM]), [1])


class InverseBySorting(Routing):
    def inverse(self, order: fx.Node) -> fx.Node:
        return self.call(aten.argsort.default, order)


class StableSort(Routing):
    """Entries of one expert stay in the order of the batch."""

    def sort(self, keys: fx.Node) -> tuple[fx.Node, fx.Node]:
        both = self.call(aten.sort.stable, keys, stable=True)
        return self.item(both, 0), self.item(both, 1)


class AddedToTokens(Routing):
    """`index_add` in place of the inverse."""

    def back(self, x: fx.Node, order: fx.Node) -> fx.Node:
        zeros = self.call(aten.zeros_like.default, self.x)
        return self.call(aten.index_add.default, zeros, 0, self.tokens(order), x)

    def added(self, x: fx.Node) -> fx.Node:
        return x


class WeightsAndBias(Routing):
    """A bias by sorted key, and the weights of the router in the sorted order."""

    def write(self) -> Packed:
        keys, order = self.sort(self.keys())
        x = self.call(aten.index.Tensor, self.x, [self.tokens(order)])
        x = self.product(x, keys, self.ends(self.counts(keys)))
        x = self.call(aten.add.Tensor, x, self.call(aten.index.Tensor, self.g.weight(EXPERTS, DIM), [keys]))
        best = self.call(aten.reshape.default, self.item(self.call(aten.topk.default, self.scores, PER_TOKEN), 0), [-1])
        weights = self.call(aten.unsqueeze.default, self.call(aten.index.Tensor, best, [order]), -1)
        x = self.added(self.back(self.call(aten.mul.Tensor, x, weights), order))
        self.g.output(x)
        return Packed.of(self.g)


class TwoHalves(Routing):
    """Several results between: `chunk`, and one half gated by the other."""

    def between(self, x: fx.Node) -> fx.Node:
        halves = self.call(aten.chunk.default, x, 2, -1)
        gated = self.call(aten.mul.Tensor, self.item(halves, 0), self.item(halves, 1))
        return self.call(aten.cat.default, [gated, gated], -1)


@pytest.mark.parametrize(
    "routing", [Routing, OnePerToken, OneExpert, InverseBySorting, StableSort, AddedToTokens, WeightsAndBias, TwoHalves]
)
def test_entries_of_tokens_are_packed_and_follow_from_no_other_token(routing: type[Routing]) -> None:
    packed = routing().write()
    moved = [node for node in packed.written.graph.nodes if node in packed.region.seen.order_of]
    assert len(moved) >= 8
    assert all(node in packed.region.entries for node in moved)
    assert_tokens_as_eager(packed)


def test_nothing_padded_is_left_of_a_packed_routing() -> None:
    packed = Routing().write()
    sizes = {node.target for node in packed.packed.graph.nodes if node.op == "call_function"}
    assert torch.ops.deepytorch.unpack_rows.default not in sizes
    [product] = [node for node in packed.packed.graph.nodes if "grouped_mm" in str(node.target)]
    values = packed.written.values(batches()["right"], torch.Generator().manual_seed(0), {})
    seen = {}

    class Watch(fx.Interpreter):
        def run_node(self, n: fx.Node) -> Any:
            seen[n.name] = super().run_node(n)
            return seen[n.name]

    packed.packed = Watch(packed.packed).run  # type: ignore[assignment]
    packed.run(batches()["right"], values)
    tokens = int(batches()["right"].sum())
    assert seen[product.name].shape == (PER_TOKEN * tokens, DIM)


# ------------------------------------------------------------------------------------------------ what is declined


class OrderAsNumbers(Routing):
    """The place of an entry among all of the batch is used as a feature."""

    def between(self, x: fx.Node) -> fx.Node:
        return self.call(aten.mul.Tensor, x, self.call(aten.unsqueeze.default, self.order, -1))

    def tokens(self, order: fx.Node) -> fx.Node:
        self.order = order
        return super().tokens(order)


class Neighbours(Routing):
    """Sorted entries are summed up along the order."""

    def between(self, x: fx.Node) -> fx.Node:
        return self.call(aten.cumsum.default, x, 0)


class Shifted(Routing):
    """The order is rolled by one."""

    def between(self, x: fx.Node) -> fx.Node:
        return self.call(aten.roll.default, x, [1], [0])


class AllEntries(Routing):
    """Each entry loses the mean of all."""

    def between(self, x: fx.Node) -> fx.Node:
        return self.call(aten.sub.Tensor, x, self.call(aten.mean.dim, x, [0], True))


class SplitEntries(Routing):
    """Entries that stand together in the order are taken for those of one token."""

    def back(self, x: fx.Node, order: fx.Node) -> fx.Node:
        return x


class CountsSeen(Routing):
    """How many entries each expert has is an output, such as a load."""

    def counts(self, keys: fx.Node) -> fx.Node:
        self.beside.append(super().counts(keys))
        return self.beside[0]


class CountsAsWeights(Routing):
    """Entries are divided by how many there are of the batch."""

    def ends(self, counts: fx.Node) -> fx.Node:
        self.total = self.call(aten.sum.dim_IntList, counts, [0], True)
        return super().ends(counts)

    def between(self, x: fx.Node) -> fx.Node:
        return self.call(aten.div.Tensor, x, self.total)


class Capacity(Routing):
    """Each expert takes at most two entries of the batch."""

    def ends(self, counts: fx.Node) -> fx.Node:
        return super().ends(self.call(aten.clamp.default, counts, None, 2))


class OtherBins(Routing):
    """Two keys share a bin."""

    def counts(self, keys: fx.Node) -> fx.Node:
        floats = self.call(aten.to.dtype, keys, torch.float32)
        return self.call(aten.histc.default, floats, EXPERTS, 0, 2 * EXPERTS)


class KeysOfAnyNumber(Routing):
    """Keys that no `topk` has found may be negative, and move the ends of all groups."""

    def keys(self) -> fx.Node:
        return self.call(aten.reshape.default, self.g.merged(self.g.x("r", "p", PER_TOKEN, dtype=torch.int64)), [-1])


class KeysOfMoreExperts(Routing):
    """Keys of four experts, of which the product has three."""

    def __init__(self) -> None:
        super().__init__()
        self.scores = self.g.merged(self.g.x("r", "p", EXPERTS + 1))


class Descending(Routing):
    """Groups stand in the opposite order of their counts."""

    def sort(self, keys: fx.Node) -> tuple[fx.Node, fx.Node]:
        both = self.call(aten.sort.default, keys, -1, True)
        return self.item(both, 0), self.item(both, 1)


class OtherInverse(Routing):
    """Entries are put back by the inverse of another sort."""

    def inverse(self, order: fx.Node) -> fx.Node:
        other = self.item(self.call(aten.sort.default, self.keys()), 1)
        return super().inverse(other)


class InverseFromOne(Routing):
    """The inverse counts from one."""

    def inverse(self, order: fx.Node) -> fx.Node:
        places = self.call(aten.arange.start, 1, self.call(operator.add, self.entries, 1))
        return self.call(aten.index_put.default, self.call(aten.empty_like.default, order), [order], places)


class OtherTokens(Routing):
    """Entries are numbered by twice as many as a token has."""

    def tokens(self, order: fx.Node) -> fx.Node:
        return self.call(aten.floor_divide.default, order, 2 * PER_TOKEN)


class SeenInOrder(Routing):
    """The sorted entries are an output."""

    def between(self, x: fx.Node) -> fx.Node:
        self.beside.append(x)
        return super().between(x)


class TwoWaysBack(Routing):
    """Entries are put back twice."""

    def back(self, x: fx.Node, order: fx.Node) -> fx.Node:
        self.beside.append(super().back(self.call(aten.neg.default, x), order))
        return super().back(x, order)


class EndsOfAnotherSort(Routing):
    """The ends of the groups are those of other keys, whose own entries are put back as they should be."""

    def counts(self, keys: fx.Node) -> fx.Node:
        found = self.item(self.call(aten.topk.default, self.g.merged(self.g.x("r", "p", EXPERTS)), PER_TOKEN), 1)
        others, order = self.sort(self.call(aten.reshape.default, found, [-1]))
        moved = self.call(aten.index.Tensor, self.x, [self.tokens(order)])
        self.beside.append(self.added(self.back(moved, order)))
        return super().counts(others)


class MaskInOrder(Routing):
    """A mask in the order of the batch meets entries in the order of the sort."""

    def between(self, x: fx.Node) -> fx.Node:
        mask = self.call(aten.reshape.default, self.g.mask, [-1])
        mask = self.call(aten.repeat_interleave.self_int, mask, PER_TOKEN)
        return self.call(aten.mul.Tensor, x, self.call(aten.unsqueeze.default, mask, -1))


DECLINED: list[Callable[[], Routing]] = [
    OrderAsNumbers, Neighbours, Shifted, AllEntries, SplitEntries, CountsSeen, CountsAsWeights, Capacity, OtherBins,
    KeysOfAnyNumber, KeysOfMoreExperts, Descending, OtherInverse, InverseFromOne, OtherTokens, SeenInOrder, TwoWaysBack,
    EndsOfAnotherSort, MaskInOrder,
]  # fmt: skip


@pytest.mark.parametrize("routing", DECLINED)
def test_a_sort_of_which_more_is_read_stays_padded(routing: Callable[[], Routing]) -> None:
    try:
        packed = routing().write()
    except Declined:
        return  # nothing is left that could be packed
    [product] = [node for node in packed.padded.graph.nodes if "grouped_mm" in str(node.target)]
    assert product not in packed.region.entries
    assert product not in packed.region.seen.order_of
    for name in ("right", "left", "drawn"):
        mask = batches()[name]
        values = packed.written.values(mask, torch.Generator().manual_seed(0), {})
        if routing is KeysOfAnyNumber:
            continue  # a product of keys out of range reads what is not there
        for ours, theirs in zip(packed.run(mask, values), packed.padded(*values), strict=True):
            torch.testing.assert_close(ours[: len(theirs)], theirs)
