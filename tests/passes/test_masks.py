"""What masks say, told from their values: known meanings with their limits, and what must not be taken for one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from deepytorch.passes.slicing import Slicer
from deepytorch.passes.unpad import probes
from deepytorch.passes.unpad.attentions import MASKED, Attention, Term, find_attentions
from deepytorch.passes.unpad.masks import READINGS, Meaning, Prober, Undecided, _window
from tests.passes.padded_graph import PaddedGraph, key_mask

aten = torch.ops.aten
Write = Callable[[PaddedGraph], fx.Node]


def meaning(write: Write, causal: bool = False, keys: str = "p") -> tuple[PaddedGraph, Meaning]:
    """What the mask of an attention of (rows, 2, positions, 4) says."""
    g = PaddedGraph()
    q, k, v = g.x("r", 2, "p", 4), g.x("r", 2, keys, 4), g.x("r", 2, keys, 4)
    written = g.call(aten.scaled_dot_product_attention.default, q, k, v, write(g), 0.0, False)
    written.args = (*written.args[:-1], causal)  # torch 2.14 would refuse to run both, of which older graphs may be
    g.output(written)
    [attention] = find_attentions(g.graph)
    prober = Prober(g.graph, g.symbols, Slicer(g.graph))
    return g, prober.meaning(attention, g.symbol("p"), g.symbol(keys))


def places(g: PaddedGraph, dim: str = "p") -> fx.Node:
    return g.call(aten.arange.default, g.size(dim), dtype=torch.int64, device="cpu")


def grid(g: PaddedGraph, compare: Callable[[PaddedGraph, fx.Node, fx.Node], fx.Node], keys: str = "p") -> fx.Node:
    """A comparison of queries (positions, 1) with keys (1, positions)."""
    i, j = g.call(aten.unsqueeze.default, places(g), 1), g.call(aten.unsqueeze.default, places(g, keys), 0)
    return compare(g, i, j)


def band(left: int | None, right: int | None) -> Write:
    """i - left <= j <= i + right."""

    def compare(g: PaddedGraph, i: fx.Node, j: fx.Node) -> fx.Node:
        offset = g.call(aten.sub.Tensor, j, i)
        parts = [] if left is None else [g.call(aten.ge.Scalar, offset, -left)]
        parts += [] if right is None else [g.call(aten.le.Scalar, offset, right)]
        return parts[0] if len(parts) == 1 else g.call(aten.logical_and.default, *parts)

    return lambda g: grid(g, compare)


def both(*writes: Write) -> Write:
    def write(g: PaddedGraph) -> fx.Node:
        first, *others = (each(g) for each in writes)
        for other in others:
            first = g.call(aten.logical_and.default, first, other)
        return first

    return write


def either(one: Write, other: Write) -> Write:
    return lambda g: g.call(aten.logical_or.default, one(g), other(g))


def per_key(g: PaddedGraph, value: fx.Node) -> fx.Node:
    """(rows, positions) as (rows, 1, 1, positions)."""
    return g.call(aten.unsqueeze.default, g.call(aten.unsqueeze.default, value, 1), 1)


def per_query(g: PaddedGraph, value: fx.Node) -> fx.Node:
    """(rows, positions) as (rows, 1, positions, 1)."""
    return g.call(aten.unsqueeze.default, g.call(aten.unsqueeze.default, value, 1), -1)


def pads(g: PaddedGraph) -> fx.Node:
    """A mask that is 1 at pads, as visible keys."""
    return per_key(g, g.call(aten.eq.Scalar, g.batch("r", "p", name="pads"), 0))


def added(value: float, like: Write = key_mask) -> Write:
    """0 where seen, `value` elsewhere."""

    def write(g: PaddedGraph) -> fx.Node:
        mask = like(g)
        zeros = g.call(aten.zeros_like.default, mask, dtype=torch.float64)
        return g.call(aten.masked_fill.Scalar, zeros, g.call(aten.logical_not.default, mask), value)

    return write


def one_minus(value: float, dtype: torch.dtype = torch.int64) -> Write:
    """(1 - mask) * value."""

    def write(g: PaddedGraph) -> fx.Node:
        mask = g.batch("r", "p", dtype=dtype, name="weights")
        return per_key(
            g, g.call(aten.mul.Scalar, g.call(aten.rsub.Scalar, g.call(aten.to.dtype, mask, torch.float64), 1.0), value)
        )

    return write


def ranks(compare: Any) -> Write:
    """Compares how many tokens there are up to a query and up to a key."""

    def write(g: PaddedGraph) -> fx.Node:
        rank = g.call(aten.cumsum.default, g.mask, 1)
        return compare(g, per_query(g, rank), per_key(g, rank))

    return write


def ids_are(number: int, pad: bool = True) -> Write:
    def write(g: PaddedGraph) -> fx.Node:
        return per_key(g, g.call(aten.ne.Scalar if pad else aten.eq.Scalar, g.batch("r", "p", name="ids"), number))

    return write


def triangle(size: int) -> Write:
    """The first positions of a lower triangle that the model keeps as a buffer."""

    def write(g: PaddedGraph) -> fx.Node:
        buffer = g.buffer(torch.ones(size, size, dtype=torch.bool).tril())
        for dim in (0, 1):
            buffer = g.call(aten.slice.Tensor, buffer, dim, 0, g.size("p"))
        return buffer

    return write


def tokens_of(g: PaddedGraph, found: Meaning, given: dict[str, torch.Tensor]) -> list[list[bool]]:
    """What the meaning takes for tokens of a batch whose inputs are these."""
    assert found.tokens is not None
    values: dict[fx.Node, Any] = {}
    for node in Slicer(g.graph).slice([found.tokens.node]):
        if node.op == "placeholder":
            values[node] = given[node.name]
        else:
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = node.target(*args, **kwargs)
    return found.tokens.read(values[found.tokens.node]).reshape(2, 4).tolist()


def token_mask(g: PaddedGraph) -> fx.Node:
    return per_query(g, g.call(aten.ne.Scalar, g.mask, 0))


MASK = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]])
OTHER = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1]])
IDS = torch.tensor([[7, 6, 8, 7], [1, 7, 0, 2]])
ONE = MASK == 1
# (left, right), the batch, and which keys are tokens in it (None: nothing tells)
KNOWN: dict[str, tuple[Write, tuple[int, int], dict[str, torch.Tensor], torch.Tensor | None]] = {
    "key padding": (key_mask, (-1, -1), {"mask": MASK}, ONE),
    "one at pads": (pads, (-1, -1), {"pads": 1 - MASK}, ONE),
    "a pad id": (ids_are(7), (-1, -1), {"ids": IDS}, ONE),
    "two masks": (both(key_mask, lambda g: key_mask(g, g.batch("r", "p", name="other"))), (-1, -1),
                  {"mask": MASK, "other": OTHER}, ONE & (OTHER == 1)),
    "either of two": (either(key_mask, lambda g: key_mask(g, g.batch("r", "p", name="other"))), (-1, -1),
                      {"mask": MASK, "other": OTHER}, ONE | (OTHER == 1)),
    "the next key's mask": (
        lambda g: per_key(g, g.call(aten.roll.default, g.call(aten.ne.Scalar, g.mask, 0), [1], [1])), (-1, -1),
        {"mask": MASK}, ONE.roll(1, 1)),
    "low numbers": (added(-1e9), (-1, -1), {"mask": MASK}, ONE),
    "as low as it must be": (added(MASKED), (-1, -1), {"mask": MASK}, ONE),
    "infinite": (added(-torch.inf), (-1, -1), {"mask": MASK}, ONE),
    "lowest": (added(torch.finfo(torch.float32).min), (-1, -1), {"mask": MASK}, ONE),
    "one minus the mask": (one_minus(-1e9), (-1, -1), {"weights": MASK}, ONE),
    "added causal": (added(-torch.inf, both(key_mask, band(None, 0))), (-1, 0), {"mask": MASK}, ONE),
    "causal": (both(key_mask, band(None, 0)), (-1, 0), {"mask": MASK}, ONE),
    "causal, without pads": (band(None, 0), (-1, 0), {}, None),
    "anticausal": (both(key_mask, band(0, None)), (0, -1), {"mask": MASK}, ONE),
    "one ahead": (both(key_mask, band(None, 1)), (-1, 1), {"mask": MASK}, ONE),
    "only itself": (both(key_mask, band(0, 0)), (0, 0), {"mask": MASK}, ONE),
    "window of 3": (both(key_mask, band(2, 0)), (2, 0), {"mask": MASK}, ONE),
    "window of 4": (both(key_mask, band(3, 0)), (3, 0), {"mask": MASK}, ONE),
    "window on both sides": (both(key_mask, band(2, 3)), (2, 3), {"mask": MASK}, ONE),
    "wide window": (both(key_mask, band(99, 0)), (99, 0), {"mask": MASK}, ONE),
    "pads look at all": (
        either(key_mask, lambda g: per_query(g, g.call(aten.eq.Scalar, g.mask, 0))), (-1, -1), {"mask": MASK}, ONE),
    "pads look at nothing": (both(key_mask, token_mask), (-1, -1), {"mask": MASK}, ONE),
    "causal by rank": (
        both(key_mask, ranks(lambda g, i, j: g.call(aten.le.Tensor, j, i))), (-1, 0), {"mask": MASK}, ONE),
}  # fmt: skip


@pytest.mark.parametrize("name", KNOWN)
def test_known_meanings(name: str) -> None:
    write, (left, right), batch, tokens = KNOWN[name]
    g, found = meaning(write)
    assert (found.window_left, found.window_right) == (left, right)
    if tokens is None:
        assert found.tokens is None
    else:
        assert tokens_of(g, found, batch) == tokens.tolist()
    assert found.bias == ()
    assert found.max_positions is None
    assert found.windowed is (left > 0 or right > 0)


NO_KNOWN_MEANING: dict[str, Write] = {
    "strictly before": band(None, -1),
    "strictly before, with pads": both(key_mask, band(None, -1)),
    "chunks": both(key_mask, lambda g: grid(g, lambda g, i, j: g.call(
        aten.eq.Tensor, *(g.call(aten.div.Scalar_mode, each, 4, rounding_mode="floor") for each in (i, j))))),
    "every other": both(key_mask, lambda g: grid(g, lambda g, i, j: g.call(
        aten.eq.Scalar, g.call(aten.remainder.Scalar, g.call(aten.sub.Tensor, i, j), 2), 0))),
    "a prefix": both(key_mask, lambda g: grid(g, lambda g, i, j: g.call(
        aten.logical_or.default, g.call(aten.le.Tensor, j, i), g.call(aten.lt.Scalar, j, 3)))),
    "a first position that all see": both(key_mask, lambda g: grid(g, lambda g, i, j: g.call(
        aten.logical_or.default, g.call(aten.le.Scalar, g.call(aten.abs.default, g.call(aten.sub.Tensor, i, j)), 2),
        g.call(aten.eq.Scalar, j, 0)))),
    "a window of ranks": both(key_mask, ranks(lambda g, i, j: g.call(aten.logical_and.default, g.call(
        aten.le.Tensor, j, i), g.call(aten.lt.Scalar, g.call(aten.sub.Tensor, i, j), 3)))),
    "segments and tokens": both(key_mask, lambda g: (
        lambda ids: g.call(aten.eq.Tensor, per_query(g, ids), per_key(g, ids)))(g.batch("r", "p", name="segment"))),
    "queries instead of keys": lambda g: per_query(g, g.call(aten.ne.Scalar, g.mask, 0)),
    "pads weakened": added(-5.0),
    "queries of another mask": both(key_mask, lambda g: per_query(
        g, g.call(aten.ne.Scalar, g.batch("r", "p", name="other"), 0))),
    "lowered, and seen": added(-9e3),
    "another for each head": both(key_mask, lambda g: g.call(aten.unsqueeze.default, g.call(aten.stack.default, [
        band(None, 0)(g), band(None, 1)(g)], 0), 0)),
}  # fmt: skip


@pytest.mark.parametrize("name", NO_KNOWN_MEANING)
def test_what_has_no_known_meaning(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "MAX_PROBE_POSITIONS", 64)  # enough for what is written here, and sooner done
    with pytest.raises(Undecided, match=r"no known meaning|differs between heads"):
        meaning(NO_KNOWN_MEANING[name])


def test_no_mask_and_the_flag() -> None:
    def bare(causal: bool) -> Meaning:
        g = PaddedGraph()
        q = g.x("r", 2, "p", 4)
        g.output(g.call(aten.scaled_dot_product_attention.default, q, q, q, None, 0.0, causal))
        [attention] = find_attentions(g.graph)
        return Prober(g.graph, g.symbols, Slicer(g.graph)).meaning(attention, g.symbol("p"), g.symbol("p"))

    assert bare(False) == Meaning(-1, -1)
    assert bare(True) == Meaning(-1, 0)


def test_the_flag_beside_a_mask() -> None:
    assert meaning(key_mask, causal=True)[1].window_right == 0


def test_causal_between_two_sequences_is_none() -> None:
    def write(g: PaddedGraph) -> fx.Node:
        return key_mask(g, g.batch("r", "q", name="source"))

    _, found = meaning(write, keys="q")
    assert found.tokens is not None
    assert (found.window_left, found.window_right, found.tokens.node.all_input_nodes[0].name) == (-1, -1, "source")
    with pytest.raises(Undecided, match="causal attention between two token spaces"):
        meaning(write, causal=True, keys="q")
    with pytest.raises(Undecided, match="no known meaning"):
        meaning(
            lambda g: g.call(
                aten.logical_and.default, write(g), grid(g, lambda g, i, j: g.call(aten.le.Tensor, j, i), "q")
            ),
            keys="q",
        )


def test_a_mask_of_parameters() -> None:
    with pytest.raises(Undecided, match="depends on parameters"):
        meaning(lambda g: g.call(aten.gt.Scalar, g.x("r", 1, 1, "p"), 0))


def test_a_learned_bias_stands_beside_the_mask() -> None:
    def write(g: PaddedGraph) -> fx.Node:
        return g.call(aten.add.Tensor, g.x(2, "p", "p"), added(-torch.inf)(g))

    g, found = meaning(write)
    assert tokens_of(g, found, {"mask": MASK}) == ONE.tolist()
    [bias] = found.bias
    assert bias.op == "placeholder"


def test_a_bias_of_the_batch_is_kept_beside_the_mask(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "MAX_PROBE_POSITIONS", 64)

    def write(g: PaddedGraph) -> fx.Node:
        distance = grid(g, lambda g, i, j: g.call(aten.sub.Tensor, j, i))
        slope = g.call(aten.mul.Scalar, g.call(aten.to.dtype, distance, torch.float64), -0.25)
        return g.call(aten.add.Tensor, g.call(aten.unsqueeze.default, slope, 0), added(-torch.inf)(g))

    g, found = meaning(write)
    assert tokens_of(g, found, {"mask": MASK}) == ONE.tolist()
    assert found.bias  # what is added is handed on whole


@pytest.mark.parametrize(
    ("write", "assumed"),
    [
        (key_mask, ()),
        (one_minus(-1e9), (("weights", "binary"),)),  # a 2 would be worth +1e9
        (one_minus(-1e9, torch.float64), (("weights", "binary"),)),
        (lambda g: g.batch("r", 1, 1, "p", dtype=torch.float64, name="weights"), (("weights", "additive"),)),
    ],
    ids=["any number", "whole", "floating", "additive"],
)  # fmt: skip
def test_what_a_step_has_to_check_of_the_mask(write: Write, assumed: Any) -> None:
    _, found = meaning(write)
    assert tuple((node.name, domain) for node, domain in found.assumed) == assumed


def test_a_buffer_proves_no_more_positions_than_it_has() -> None:
    _, found = meaning(both(key_mask, triangle(40)))
    assert (found.window_left, found.window_right, found.max_positions) == (-1, 0, 40)
    assert [node.meta["input"].value.shape for node in found.buffers] == [(40, 40)]


def test_a_mask_that_changes_beyond_the_probes_is_proved_up_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(probes, "MAX_PROBE_POSITIONS", 64)
    _, far = meaning(both(key_mask, band(192, 0)))
    assert (far.window_left, far.max_positions) == (-1, 64)
    _, chunked = meaning(both(key_mask, lambda g: grid(g, lambda g, i, j: g.call(aten.eq.Tensor, *(
        g.call(aten.div.Scalar_mode, each, 5000, rounding_mode="floor") for each in (i, j))))))  # fmt: skip
    assert chunked.max_positions == 64


def test_a_mask_that_divides_positions_is_proved_up_to_the_longest_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """By 20 and by 20 again: chunks of 400, of which the sum of its numbers, 80, tells nothing."""
    monkeypatch.setattr(probes, "MAX_PROBE_POSITIONS", 128)

    def chunk(g: PaddedGraph, each: fx.Node) -> fx.Node:
        once = g.call(aten.div.Scalar_mode, each, 20, rounding_mode="floor")
        return g.call(aten.div.Scalar_mode, once, 20, rounding_mode="floor")

    _, found = meaning(both(key_mask, lambda g: grid(g, lambda g, *pair: g.call(
        aten.eq.Tensor, *(chunk(g, each) for each in pair)))))  # fmt: skip
    assert (found.window_left, found.window_right, found.max_positions) == (-1, -1, 128)


def test_pad_ids_are_told_from_their_neighbours() -> None:
    def write(g: PaddedGraph) -> fx.Node:
        ids = g.batch("r", "p", name="ids")
        known = g.call(aten.logical_and.default, g.call(aten.ne.Scalar, ids, 11), g.call(aten.ne.Scalar, ids, 12))
        return g.call(aten.logical_and.default, per_key(g, known), ids_are_of(g, ids))

    def ids_are_of(g: PaddedGraph, ids: fx.Node) -> fx.Node:
        return per_key(g, g.call(aten.ne.Scalar, ids, 11))

    _, found = meaning(write)
    assert found.tokens is not None
    assert found.tokens.node.target is aten.logical_and.default  # of both numbers, not of the one that came last


def test_readings() -> None:
    value = torch.tensor([-1, 0, 1, 2])
    assert READINGS["nonzero"](value).tolist() == [True, False, True, True]
    assert READINGS["zero"](value).tolist() == [False, True, False, False]
    assert READINGS["not negative"](value).tolist() == [False, True, True, True]
    assert READINGS["not negative"](torch.tensor([0.0, -torch.inf, MASKED])).tolist() == [True, False, False]


# ------------------------------------------------------------------------------------------------ windows of values

NODE = fx.Graph().placeholder("tokens")


def window(seen: Callable[[Any, Any], Any], tokens: list[int], same_space: bool = True) -> tuple[int, int] | None:
    """The window of one mask over one row with these tokens."""
    values = torch.tensor([tokens])
    i, j = torch.arange(len(tokens))[:, None], torch.arange(len(tokens))[None, :]
    mask = (seen(i, j) & (values[0] != 0))[None]
    return _window([(mask, {NODE: values}, False)], (NODE, "nonzero"), same_space)


def test_windows_are_read_from_pairs_of_tokens() -> None:
    ones = [1] * 8
    assert window(lambda i, j: j <= i, [*ones, 0]) == (-1, 0)
    assert window(lambda i, j: (j <= i) & (i - j <= 2), [*ones, 0]) == (2, 0)
    assert window(lambda i, j: abs(i - j) <= 2, [0, *ones]) == (2, 2)
    assert window(lambda i, j: j < i, [*ones, 0]) is None  # no token sees itself
    assert window(lambda i, j: j <= i, ones) is None  # without a pad nothing tells what the mask reads
    assert window(lambda i, j: (i - j) % 2 == 0, [*ones, 0]) is None
    assert window(lambda i, j: i + j >= 0, [*ones, 0], same_space=False) == (-1, -1)
    assert window(lambda i, j: j <= i, [*ones, 0], same_space=False) is None


def test_a_mask_under_which_a_token_sees_a_pad() -> None:
    values = torch.tensor([[1, 1, 0]])
    mask = torch.ones(1, 3, 3, dtype=torch.bool)
    assert _window([(mask, {NODE: values}, False)], (NODE, "nonzero"), True) is None
    mask[0, :2, 2] = False  # only the pad does
    assert _window([(mask, {NODE: values}, False)], (NODE, "nonzero"), True) == (-1, -1)
    assert _window([(mask, {NODE: values}, False)], (NODE, "nonzero"), False) is None  # queries of a space of their own


# ------------------------------------------------------------------------------------------------ terms


def spelled_out(write: Callable[[PaddedGraph, fx.Node], fx.Node]) -> tuple[PaddedGraph, list[Attention]]:
    g = PaddedGraph()
    q, k, v = g.x("r", 2, "p", 4), g.x("r", 2, 4, "p"), g.x("r", 2, "p", 4)
    scores = write(g, g.call(aten.matmul.default, q, k))
    g.output(g.call(aten.matmul.default, g.call(aten.softmax.int, scores, -1), v))
    return g, find_attentions(g.graph)


def test_terms_of_an_attention_spelled_out() -> None:
    def kinds(write: Callable[[PaddedGraph, fx.Node], fx.Node]) -> list[Any]:
        _, found = spelled_out(write)
        return [[(term.kind, term.ndim) for term in attention.terms] + [attention.scale] for attention in found]

    def hidden(g: PaddedGraph, scores: fx.Node, fill: float = -torch.inf) -> fx.Node:
        return g.call(aten.masked_fill.Scalar, scores, g.call(aten.logical_not.default, key_mask(g)), fill)

    assert kinds(hidden) == [[("hidden", 4), 1.0]]
    assert kinds(lambda g, s: hidden(g, s, MASKED)) == [[("hidden", 4), 1.0]]
    assert kinds(lambda g, s: hidden(g, s, -9e3)) == []  # lowered, and seen all the same
    assert kinds(lambda g, s: g.call(aten.where.ScalarOther, key_mask(g), s, -1e9)) == [[("visible", 4), 1.0]]
    assert kinds(lambda g, s: g.call(aten.where.ScalarOther, key_mask(g), s, 0.0)) == []
    halved = kinds(lambda g, s: g.call(aten.add.Tensor, g.call(aten.div.Tensor, s, 2.0), added(-1e9)(g)))
    assert halved == [[("added", 4), ("hidden", 4), 0.5]]
    assert kinds(lambda g, s: g.call(aten.mul.Tensor, g.call(aten.add.Tensor, s, added(-1e9)(g)), 2.0)) == []
    assert kinds(lambda g, s: g.call(aten.relu.default, s)) == []


def test_a_softmax_along_queries_is_no_attention() -> None:
    g = PaddedGraph()
    q, k, v = g.x("r", 2, "p", 4), g.x("r", 2, 4, "p"), g.x("r", 2, "p", 4)
    weights = g.call(aten.softmax.int, g.call(aten.matmul.default, q, k), -2)
    g.output(g.call(aten.matmul.default, weights, v))
    assert find_attentions(g.graph) == []


def test_weights_that_somebody_looks_at_are_no_inner_values() -> None:
    g = PaddedGraph()
    q, k, v = g.x("r", 2, "p", 4), g.x("r", 2, 4, "p"), g.x("r", 2, "p", 4)
    weights = g.call(aten.softmax.int, g.call(aten.matmul.default, q, k), -1)
    g.output(g.call(aten.matmul.default, weights, v), weights)
    assert find_attentions(g.graph) == []


def test_scores_that_somebody_looks_at_are_no_inner_values() -> None:
    g = PaddedGraph()
    q, k, v = g.x("r", 2, "p", 4), g.x("r", 2, 4, "p"), g.x("r", 2, "p", 4)
    product = g.call(aten.matmul.default, q, k)
    scores = g.call(aten.mul.Tensor, product, 0.5)
    y = g.call(aten.matmul.default, g.call(aten.softmax.int, scores, -1), v)
    for shown in (product, scores):
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        graph.graph_copy(g.graph, copies)
        graph.output((copies[y], copies[shown]))
        assert find_attentions(graph) == []
    g.output(y)
    assert len(find_attentions(g.graph)) == 1


def test_a_term_says_what_it_is() -> None:
    g = PaddedGraph()
    q = g.x("r", 2, "p", 4)
    mask = key_mask(g)
    g.output(g.call(aten.scaled_dot_product_attention.default, q, q, q, mask))
    [attention] = find_attentions(g.graph)
    assert attention.terms == (Term(mask, "visible"),)
    assert attention.scale == 0.5


def times(factor: Write, hide: Write | None) -> Callable[[PaddedGraph, fx.Node], fx.Node]:
    """`scores * factor`, then a low number where `hide` says so."""

    def write(g: PaddedGraph, scores: fx.Node) -> fx.Node:
        scores = g.call(aten.mul.Tensor, scores, factor(g))
        return scores if hide is None else g.call(aten.add.Tensor, scores, hide(g))

    return write


def as_numbers(write: Write, scale: float = 1.0) -> Write:
    """`scale` where a mask says so, 0 elsewhere."""

    def numbers(g: PaddedGraph) -> fx.Node:
        return g.call(aten.mul.Tensor, g.call(aten.to.dtype, write(g), torch.float64), scale)

    return numbers


def hides(write: Write, low: float = -1e4) -> Write:
    """0 where a mask says so, a low number elsewhere."""

    def term(g: PaddedGraph) -> fx.Node:
        return g.call(aten.mul.Tensor, g.call(aten.rsub.Scalar, as_numbers(write)(g), 1.0), low)

    return term


CAUSAL = both(key_mask, band(None, 0))


def read(write: Callable[[PaddedGraph, fx.Node], fx.Node]) -> Meaning:
    g, [attention] = spelled_out(write)
    return Prober(g.graph, g.symbols, Slicer(g.graph)).meaning(attention, g.symbol("p"), g.symbol("p"))


@pytest.mark.parametrize("low", [-1e4, -1e9])
def test_scores_times_a_mask_whose_hidden_places_a_term_lowers(low: float) -> None:
    found = read(times(as_numbers(CAUSAL), hides(CAUSAL, low)))
    assert (found.window_left, found.window_right, found.bias) == (-1, 0, ())
    assert found.tokens is not None
    # a factor that leaves a score where the term hides it changes nothing
    assert read(times(as_numbers(key_mask), hides(CAUSAL, low))).window_right == 0


@pytest.mark.parametrize(
    ("factor", "hide", "why"),
    [
        (as_numbers(CAUSAL), None, "changes scores that are seen"),
        (as_numbers(CAUSAL), hides(key_mask), "changes scores that are seen"),
        (as_numbers(CAUSAL, 2.0), hides(CAUSAL), "neither 0 nor 1"),
        (as_numbers(CAUSAL, torch.inf), hides(CAUSAL), "neither 0 nor 1"),
        (as_numbers(CAUSAL), hides(CAUSAL, -9e3), "changes scores that are seen|no known meaning"),
        (lambda g: g.weight(1), hides(CAUSAL), "depends on parameters"),
    ],
    ids=["nothing hides", "pads alone are hidden", "doubles", "infinite", "lowered, and seen", "learned"],
)
def test_scores_times_what_changes_those_that_are_seen(factor: Write, hide: Write | None, why: str) -> None:
    with pytest.raises(Undecided, match=why):
        read(times(factor, hide))


def test_a_term_before_a_factor_is_none_of_the_scores() -> None:
    def write(g: PaddedGraph, scores: fx.Node) -> fx.Node:
        return g.call(aten.mul.Tensor, g.call(aten.add.Tensor, scores, hides(CAUSAL)(g)), as_numbers(CAUSAL)(g))

    assert spelled_out(write)[1] == []


def infinite(*writes: Write, fill: float = -torch.inf) -> tuple[PaddedGraph, Meaning]:
    """The meaning of masks whose scores are filled with minus infinity before a softmax that is written out."""

    def fills(g: PaddedGraph, scores: fx.Node) -> fx.Node:
        for write in writes:
            scores = g.call(aten.masked_fill.Scalar, scores, g.call(aten.logical_not.default, write(g)), fill)
        return scores

    g, [attention] = spelled_out(fills)
    return g, Prober(g.graph, g.symbols, Slicer(g.graph)).meaning(attention, g.symbol("p"), g.symbol("p"))


def test_pads_that_see_no_key_have_to_stand_behind_a_token_where_they_become_nan() -> None:
    causal = band(None, 0)
    assert not infinite(key_mask)[1].begins  # each row has a token
    assert infinite(causal, key_mask)[1].begins
    assert infinite(both(causal, key_mask))[1].begins
    assert not infinite(causal, key_mask, fill=-1e9)[1].begins
    assert not meaning(both(causal, key_mask))[1].begins  # SDPA gives such a query zeros
    with pytest.raises(Undecided, match="see no key"):
        infinite(band(2, 0), key_mask)  # pads far behind the last token
    with pytest.raises(Undecided, match="see no key"):
        infinite(key_mask, lambda g: per_query(g, g.call(aten.ne.Scalar, g.mask, 0)))


def test_additive_masks_of_the_caller_may_hold_minus_infinity() -> None:
    def add(g: PaddedGraph, scores: fx.Node) -> fx.Node:
        given = per_key(g, g.batch("r", "p", dtype=torch.float64, name="bias"))
        hidden = g.call(aten.masked_fill.Scalar, scores, g.call(aten.logical_not.default, band(None, 0)(g)), -1e9)
        return g.call(aten.add.Tensor, hidden, given)

    g, [attention] = spelled_out(add)
    assert not Prober(g.graph, g.symbols, Slicer(g.graph)).meaning(attention, g.symbol("p"), g.symbol("p")).begins
