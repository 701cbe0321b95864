"""Packed graphs of a few nodes against their padded ones, batch by batch: attention, losses, picks, pooling."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from deepytorch.compiler.step.batch_facts import Indices, read_facts
from deepytorch.passes.unpad.emit import _contains
from deepytorch.passes.unpad.program import IndexSet
from tests.passes.padded_graph import PaddedGraph, Step, attend, batches, key_mask, project

aten = torch.ops.aten
ops = torch.ops.deepytorch
END = torch.iinfo(torch.int64).max
IGNORE = -100


def cross_entropy(g: PaddedGraph, logits: fx.Node, labels: fx.Node, reduction: int = 1) -> fx.Node:
    """The loss of (rows, positions, classes), flattened as models do."""
    flat = g.call(aten.reshape.default, logits, [-1, int(logits.meta["val"].shape[-1])])
    return g.call(aten.cross_entropy_loss.default, flat, g.call(aten.reshape.default, labels, [-1]), None, reduction)


def cut(g: PaddedGraph, x: fx.Node, start: int, end: int = END) -> fx.Node:
    return g.call(aten.slice.Tensor, x, 1, start, end)


def head(g: PaddedGraph, x: fx.Node) -> fx.Node:
    return g.call(aten.linear.default, x, g.weight(5, 6), g.weight(5))


def labels_of(mask: torch.Tensor, *, pads: bool = False, some: bool = False) -> torch.Tensor:
    """A class for every token, -100 for pads; `some`: every other token has none."""
    labels = torch.arange(mask.numel()).view(mask.shape) % 5
    if some:
        labels = labels.masked_fill(labels % 2 == 0, IGNORE)
    return labels if pads else labels.masked_fill(~mask, IGNORE)


BATCHES = [name for name in batches() if name != "one token"]  # which a step runs padded: no row is longer than one


def compare(step: Step, g: PaddedGraph, mask: torch.Tensor, given: dict[fx.Node, Any]) -> None:
    """Every output and every gradient of the packed graph is that of the padded one."""
    values = g.values(mask, torch.Generator().manual_seed(1), given)
    wanted = [v.requires_grad_() for n, v in zip(g.inputs, values, strict=True) if n.meta["val"].requires_grad]
    found = []
    ours = step.run(values)
    assert not isinstance(ours, str), ours
    theirs = step.padded(*values)
    for outputs in (ours, theirs):
        total = torch.zeros((), dtype=torch.float64)
        for output in outputs:
            chosen = output[mask] if output.dim() == 3 else output
            total = total + (chosen * torch.arange(1.0, chosen.numel() + 1).view_as(chosen)).sum()
            if output.dim() == 3 and outputs is ours:
                assert not output[~mask].any(), "zeros at pads"
        found.append((total, *torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True)))
    torch.testing.assert_close(*found)


# ------------------------------------------------------------------------------------------------ attention

ATTENTIONS: dict[str, Callable[[PaddedGraph, fx.Node], fx.Node]] = {
    "full": lambda g, x: attend(g, x, key_mask(g)),
    "causal": lambda g, x: attend(g, x, g.call(aten.logical_and.default, key_mask(g), band(g, None, 0))),
    "sees one ahead": lambda g, x: attend(g, x, g.call(aten.logical_and.default, key_mask(g), band(g, None, 1))),
    "one head": lambda g, x: attend(g, x, key_mask(g), heads=1),
    "grouped": lambda g, x: grouped(g, x),
    "bias": lambda g, x: attend(g, x, biased(g)),
    "bias of merged rows and heads": lambda g, x: merged(g, x),
    "spelled out": lambda g, x: spelled_out(g, x),
    "sinks of queries": lambda g, x: spelled_out(g, x, project(g, x, 2)),
    "two layers": lambda g, x: attend(g, attend(g, x, key_mask(g)), key_mask(g)),
}


def band(g: PaddedGraph, left: int | None, right: int) -> fx.Node:
    """i - left <= j <= i + right as (positions, positions)."""
    places = g.call(aten.arange.default, g.size("p"), dtype=torch.int64, device="cpu")
    offset = g.call(
        aten.sub.Tensor, g.call(aten.unsqueeze.default, places, 0), g.call(aten.unsqueeze.default, places, 1)
    )
    seen = g.call(aten.le.Scalar, offset, right)
    return seen if left is None else g.call(aten.logical_and.default, seen, g.call(aten.ge.Scalar, offset, -left))


def low(g: PaddedGraph, mask: fx.Node) -> fx.Node:
    """0 where seen, -inf elsewhere."""
    zeros = g.call(aten.zeros_like.default, mask, dtype=torch.float64)
    return g.call(aten.masked_fill.Scalar, zeros, g.call(aten.logical_not.default, mask), -torch.inf)


def biased(g: PaddedGraph) -> fx.Node:
    """A learned bias by distance, beside the mask."""
    places = g.call(aten.arange.default, g.size("p"), dtype=torch.int64, device="cpu")
    offset = g.call(
        aten.sub.Tensor, g.call(aten.unsqueeze.default, places, 0), g.call(aten.unsqueeze.default, places, 1)
    )
    bucket = g.call(aten.clamp.default, offset, -2, 2)
    table = g.call(aten.embedding.default, g.weight(5, 2), g.call(aten.add.Scalar, bucket, 2))
    bias = g.call(aten.unsqueeze.default, g.call(aten.permute.default, table, [2, 0, 1]), 0)
    return g.call(aten.add.Tensor, bias, low(g, key_mask(g)))


def merged(g: PaddedGraph, x: fx.Node) -> fx.Node:
    """Rows and heads in one dimension, and a bias that each row and head has its own numbers of (ALiBi)."""
    q, k, v = (g.call(aten.reshape.default, project(g, x, 2), [-1, g.size("p"), 4]) for _ in range(3))
    places = g.call(aten.mul.Tensor, g.call(aten.cumsum.default, g.mask, -1), g.mask)
    slopes = g.call(aten.unsqueeze.default, g.weight(2), -1)
    alibi = g.call(aten.mul.Tensor, slopes, g.call(aten.unsqueeze.default, places, 1))
    alibi = g.call(aten.unsqueeze.default, g.call(aten.reshape.default, alibi, [-1, g.size("p")]), 1)
    scores = g.call(aten.baddbmm.default, alibi, q, g.call(aten.transpose.int, k, -1, -2), alpha=0.3)
    scores = g.call(aten.view.default, scores, [g.size("r"), 2, g.size("p"), g.size("p")])
    weights = g.call(aten.softmax.int, g.call(aten.add.Tensor, scores, low(g, key_mask(g))), -1)
    y = g.call(aten.bmm.default, g.call(aten.view.default, weights, [-1, g.size("p"), g.size("p")]), v)
    y = g.call(aten.transpose.int, g.call(aten.view.default, y, [g.size("r"), 2, g.size("p"), 4]), 1, 2)
    return g.call(aten.linear.default, g.call(aten.reshape.default, y, [g.size("r"), g.size("p"), 8]), g.weight(6, 8))


def grouped(g: PaddedGraph, x: fx.Node) -> fx.Node:
    """Four heads of queries over two of keys, each repeated in place."""
    q, k, v = project(g, x, 4), *(project(g, x, 2) for _ in range(2))
    sizes = [g.size("r"), 2, 2, g.size("p"), 4]
    k, v = (g.call(aten.expand.default, g.call(aten.unsqueeze.default, each, 2), sizes) for each in (k, v))
    k, v = (g.call(aten.reshape.default, each, [sizes[0], 4, sizes[3], 4]) for each in (k, v))
    y = g.call(aten.scaled_dot_product_attention.default, q, k, v, key_mask(g))
    y = g.call(aten.reshape.default, g.call(aten.transpose.int, y, 1, 2), [sizes[0], sizes[3], 16])
    return g.call(aten.linear.default, y, g.weight(6, 16))


def spelled_out(g: PaddedGraph, x: fx.Node, beside: fx.Node | None = None) -> fx.Node:
    """Attention of two heads; beside: (rows, heads, positions, width), whose first column is that of sinks."""
    q, k, v = (project(g, x, 2) for _ in range(3))
    scores = g.call(aten.matmul.default, q, g.call(aten.transpose.int, k, -1, -2))
    scores = g.call(aten.add.Tensor, g.call(aten.mul.Tensor, scores, 0.3), low(g, key_mask(g)))
    if beside is not None:
        scores = g.call(aten.cat.default, [scores, g.call(aten.slice.Tensor, beside, 3, 0, 1)], -1)
    weights = g.call(aten.softmax.int, scores, -1)
    if beside is not None:
        weights = g.call(aten.slice.Tensor, weights, 3, 0, -1)
    y = g.call(aten.matmul.default, weights, v)
    y = g.call(aten.reshape.default, g.call(aten.transpose.int, y, 1, 2), [g.size("r"), g.size("p"), 8])
    return g.call(aten.linear.default, y, g.weight(6, 8))


@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention_over_packed_rows(name: str) -> None:
    g = PaddedGraph()
    g.output(ATTENTIONS[name](g, g.x("r", "p", 6)))
    step = Step(g)
    assert ops.varlen_attention.default in step.targets()
    assert aten.scaled_dot_product_attention.default not in step.targets()
    for batch in BATCHES:
        if name != "sees one ahead" or batch not in ("holes", "drawn", "mixed"):
            compare(step, g, batches()[batch], {})


def test_keys_are_read_once_for_a_group_of_queries() -> None:
    g = PaddedGraph()
    g.output(grouped(g, g.x("r", "p", 6)))
    step = Step(g)
    assert aten.expand.default not in step.targets()


def test_a_window_refuses_holes_and_no_other_batch() -> None:
    g = PaddedGraph()
    mask = g.call(aten.logical_and.default, key_mask(g), band(g, 1, 0))
    g.output(attend(g, g.x("r", "p", 6), mask))
    step = Step(g)
    for name in ("right", "left", "mixed", "real", "one row"):
        compare(step, g, batches()[name], {})
    one_hole = torch.tensor([[True, False, True, False], [True, True, True, True]])
    for mask in (batches()["holes"], one_hole, ~one_hole | torch.tensor([False, False, False, True])):
        values = g.values(mask, torch.Generator().manual_seed(0), {})
        assert step.run(values) == "holes between the tokens of a row under a sliding window"


def test_two_sequences_each_with_its_own_tokens() -> None:
    g = PaddedGraph()
    source_mask = g.batch("r", "q", name="source_mask")
    x, source = g.x("r", "p", 6), g.x("r", "q", 6)
    x = attend(g, x, key_mask(g))
    q, k, v = project(g, x, 2), project(g, source, 2, "q"), project(g, source, 2, "q")
    y = g.call(aten.scaled_dot_product_attention.default, q, k, v, key_mask(g, source_mask))
    y = g.call(aten.reshape.default, g.call(aten.transpose.int, y, 1, 2), [g.size("r"), g.size("p"), 8])
    g.output(g.call(aten.linear.default, y, g.weight(6, 8)))
    step = Step(g)
    assert step.targets().count(ops.varlen_attention.default) == 2
    for name in BATCHES:
        mask = batches()[name]
        other = torch.rand(mask.shape[0], mask.shape[1] + 2, generator=torch.Generator().manual_seed(5)) < 0.5
        other[:, 1:3] = True
        compare(step, g, mask, {source_mask: other.long()})


def test_a_causal_attention_without_a_key_mask_wants_tokens_first() -> None:
    g = PaddedGraph()
    x = attend(g, g.x("r", "p", 6), key_mask(g))
    g.output(attend(g, x, None, causal=True))
    step = Step(g)
    compare(step, g, batches()["right"], {})
    values = g.values(batches()["left"], torch.Generator().manual_seed(0), {})
    assert step.run(values) == "tokens after pads under a causal attention without a key mask"


def test_full_attention_without_a_mask_sees_pads_and_stays_padded() -> None:
    g = PaddedGraph()
    x = attend(g, g.x("r", "p", 6), key_mask(g))
    g.output(attend(g, x, None))
    step = Step(g)
    assert step.rewrite.program is None
    assert "attentions over the same keys disagree on which of them are tokens" in step.reasons[0]


def test_index_inputs_are_what_they_are_said_to_be() -> None:
    g = PaddedGraph()
    g.output(attend(g, g.x("r", "p", 6), key_mask(g)))
    step = Step(g)
    mask = batches()["left"]
    indices = Indices(read_facts(step.program, g.values(mask, torch.Generator(), {})))
    found = {index.kind: indices.get(index) for index in step.program.indices}
    assert found["flat"].tolist() == [2, 3, 4, 5, 6, 7, 8, 9, 14]
    assert found["cu_seqlens"].tolist() == [0, 3, 8, 9]
    assert found["cu_seqlens"].dtype == torch.int32
    assert found["longest"].shape == (5, 0)


# ------------------------------------------------------------------------------------------------ losses


def language_model(shift: bool, reduction: int = 1, **kwargs: Any) -> tuple[PaddedGraph, fx.Node, Step]:
    g = PaddedGraph()
    labels = g.batch("r", "p", name="labels")
    causal = g.call(aten.logical_and.default, key_mask(g), band(g, None, 0))
    logits = head(g, attend(g, g.x("r", "p", 6), causal))
    wanted = labels
    if shift:
        logits, wanted = cut(g, logits, 0, -1), cut(g, labels, 1)
    g.output(cross_entropy(g, logits, wanted, reduction))
    return g, labels, Step(g, **kwargs)


@pytest.mark.parametrize("loss_rows", [True, False])
@pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
@pytest.mark.parametrize("shift", [False, True])
def test_losses_over_tokens(shift: bool, reduction: int, loss_rows: bool) -> None:
    g, labels, step = language_model(shift, reduction, loss_rows=loss_rows)
    for name in BATCHES:
        if name == "one row" and shift:
            continue  # its last token has no label, and two are wanted
        mask = batches()[name]
        for some in (False, True):
            target = labels_of(mask, some=some)
            if shift:  # the last pad before the first token predicts it
                target[:, 1:][~mask[:, :-1]] = IGNORE
            counted = (target[:, 1:] if shift else target) != IGNORE
            if reduction == 0:
                values = g.values(mask, torch.Generator().manual_seed(1), {labels: target})
                ours, [theirs] = step.run(values), step.padded(*values)
                if isinstance(ours, str):
                    assert ours == "fewer than two tokens or labels"
                else:
                    torch.testing.assert_close(ours[0], theirs)
            elif counted.sum() >= 2:
                compare(step, g, mask, {labels: target})


def test_a_loss_whose_positions_start_late() -> None:
    for end in (END, -1):
        g = PaddedGraph()
        labels = g.batch("r", "p", name="labels")
        logits = cut(g, head(g, attend(g, g.x("r", "p", 6), key_mask(g))), 1, end)
        g.output(cross_entropy(g, logits, cut(g, labels, 1, end)))
        step = Step(g)
        for name in ("right", "left", "mixed", "holes", "drawn"):
            mask = batches()[name]
            compare(step, g, mask, {labels: labels_of(mask)})


def test_a_label_at_a_pad_runs_padded() -> None:
    g, labels, step = language_model(False)
    mask = batches()["right"]
    values = g.values(mask, torch.Generator().manual_seed(0), {labels: labels_of(mask, pads=True)})
    assert step.run(values) == "a label at a padded position is not ignored"


def test_the_last_pad_that_predicts_the_first_token_runs_padded() -> None:
    g, labels, step = language_model(True)
    mask = batches()["left"]
    values = g.values(mask, torch.Generator().manual_seed(0), {labels: labels_of(mask)})
    assert step.run(values) == "a label at a padded position is not ignored"


def test_head_and_loss_run_on_labelled_tokens_alone() -> None:
    g, labels, step = language_model(True)
    mask = batches()["right"]
    values = g.values(mask, torch.Generator().manual_seed(0), {labels: labels_of(mask, some=True)})
    facts = read_facts(step.program, values)
    indices = Indices(facts)
    [rank] = [index for index in step.program.indices if index.kind == "rank"]
    counted = labels_of(mask, some=True)[:, 1:] != IGNORE
    assert len(indices.get(rank)) == facts.labels[0] == counted.sum()
    tokens = mask.flatten().nonzero().squeeze(1)[indices.get(rank)]
    rows, places = counted.nonzero().unbind(1)
    assert tokens.tolist() == (rows * mask.shape[1] + places).tolist()


# ------------------------------------------------------------------------------------------------ picks and pooling


def test_pooling_with_the_mask_is_a_sum_over_tokens() -> None:
    g = PaddedGraph()
    x = attend(g, g.x("r", "p", 6), key_mask(g))
    factor = g.call(aten.to.dtype, g.call(aten.unsqueeze.default, g.mask, -1), torch.float64)
    pooled = g.call(aten.sum.dim_IntList, g.call(aten.mul.Tensor, x, factor), [1])
    g.output(g.call(aten.div.Tensor, pooled, g.call(aten.sum.dim_IntList, factor, [1])))
    step = Step(g)
    assert ops.varlen_attention.default in step.targets()
    for name in BATCHES:
        compare(step, g, batches()[name], {})


def test_pooling_by_a_mask_that_keeps_pads_runs_padded() -> None:
    g = PaddedGraph()
    other = g.batch("r", "p", dtype=torch.float64, name="other")
    x = attend(g, g.x("r", "p", 6), key_mask(g))
    g.output(g.call(aten.sum.dim_IntList, g.call(aten.mul.Tensor, x, g.call(aten.unsqueeze.default, other, -1)), [1]))
    step = Step(g)
    mask = batches()["mixed"]
    compare(step, g, mask, {other: mask.double() * 0.5})
    kept = mask.double()
    kept[0, 0] = 1e-3  # a pad
    values = g.values(mask, torch.Generator().manual_seed(0), {other: kept})
    assert step.run(values) == "a factor is not zero at padded positions"


def test_tokens_counted_by_a_mask_stay_packed() -> None:
    """Wherever the index of a pad points to, it adds a zero there; the counts are those of eager."""
    g = PaddedGraph()
    other = g.batch("r", "p", dtype=torch.float64, name="other")
    x = attend(g, g.x("r", "p", 6), key_mask(g))
    best = g.call(operator.getitem, g.call(aten.topk.default, g.merged(x), 2), 1)
    weights = g.call(aten.repeat_interleave.self_int, g.call(aten.reshape.default, other, [-1]), 2)
    zeros = g.call(aten.zeros.default, [6], dtype=torch.float64)
    index = g.call(aten.reshape.default, best, [-1])
    g.output(g.call(aten.scatter_add.default, zeros, 0, index, weights), x)
    step = Step(g)
    assert ops.varlen_attention.default in step.targets()
    for name in BATCHES:
        compare(step, g, batches()[name], {other: batches()[name].double() * 0.5})
    mask = batches()["mixed"]
    kept = mask.double()
    kept[0, 0] = 1e-3  # a pad
    values = g.values(mask, torch.Generator().manual_seed(0), {other: kept})
    assert step.run(values) == "a factor is not zero at padded positions"


def test_one_of_several_results_that_is_seen_at_pads_keeps_the_others_correct() -> None:
    g = PaddedGraph()
    x = g.x("r", "p", 6)
    halves = g.call(aten.chunk.default, g.call(aten.sin.default, x), 2, -1)
    first, second = (g.call(operator.getitem, halves, place) for place in (0, 1))
    g.output(g.call(aten.mean.dim, first, [1]), attend(g, g.call(aten.cat.default, [second, second], -1), key_mask(g)))
    step = Step(g)
    assert ops.varlen_attention.default in step.targets()
    for name in BATCHES:
        compare(step, g, batches()[name], {})


def test_hidden_entries_are_zeros_where_the_fill_says_so() -> None:
    g = PaddedGraph()
    hidden = g.batch("r", "p", dtype=torch.bool, name="hidden")
    x = attend(g, g.x("r", "p", 6), key_mask(g))
    filled = g.call(aten.masked_fill.Scalar, x, g.call(aten.unsqueeze.default, hidden, -1), 0)
    g.output(g.call(aten.sum.dim_IntList, filled, [1]))
    step = Step(g)
    mask = batches()["mixed"]
    compare(step, g, mask, {hidden: ~mask})
    values = g.values(mask, torch.Generator().manual_seed(0), {hidden: mask})
    assert step.run(values) == "a factor is not zero at padded positions"


def test_hidden_entries_that_are_not_zeros_are_seen_at_pads() -> None:
    g = PaddedGraph()
    hidden = g.call(aten.unsqueeze.default, g.call(aten.eq.Scalar, g.mask, 0), -1)
    x = attend(g, g.x("r", "p", 6), key_mask(g))
    g.output(g.call(aten.sum.dim_IntList, g.call(aten.masked_fill.Scalar, x, hidden, 0.5), [1]))
    assert Step(g).rewrite.program is None


def test_a_mean_over_positions_sees_pads_and_what_feeds_it_stays_padded() -> None:
    g = PaddedGraph()
    x = attend(g, g.x("r", "p", 6), key_mask(g))
    g.output(g.call(aten.mean.dim, x, [1]))
    step = Step(g)
    assert step.rewrite.program is None
    assert "aten.mean.dim may look across positions" in step.reasons[0]


@pytest.mark.parametrize("position", [0, -1, 1])
def test_a_position_read_from_every_row(position: int) -> None:
    g = PaddedGraph()
    x = attend(g, g.x("r", "p", 6), key_mask(g))
    g.output(g.call(aten.select.int, x, 1, position))
    step = Step(g)
    for name in BATCHES:
        mask = batches()[name]
        if mask[:, position].all():
            compare(step, g, mask, {})
        else:
            values = g.values(mask, torch.Generator().manual_seed(0), {})
            assert step.run(values) == "a position that is read from every row is a pad in one"


def test_the_last_token_of_every_row() -> None:
    g = PaddedGraph()
    last = g.batch("r", name="last")
    x = attend(g, g.x("r", "p", 6), key_mask(g))
    rows = g.call(aten.arange.default, g.size("r"), dtype=torch.int64, device="cpu")
    g.output(g.call(aten.index.Tensor, x, [rows, last]))
    step = Step(g)
    for name in BATCHES:
        mask = batches()[name]
        at = (mask * torch.arange(1, mask.shape[1] + 1)).argmax(1)
        compare(step, g, mask, {last: at})
        compare(step, g, mask, {last: at - mask.shape[1]})  # counted from the end


# ------------------------------------------------------------------------------------------------ packed and padded


@pytest.mark.parametrize(
    ("home", "entries", "contained"),
    [
        (IndexSet(0), IndexSet(0), True),
        (IndexSet(0), IndexSet(0, offset=1, cut=1), True),
        (IndexSet(0, offset=1, cut=1), IndexSet(0), False),
        (IndexSet(0, offset=1, cut=1), IndexSet(0, offset=0, cut=1), False),
        (IndexSet(0, offset=0, cut=1), IndexSet(0, offset=1, cut=1), False),
        (IndexSet(0, offset=1, cut=2), IndexSet(0, offset=1, cut=2), True),
        (IndexSet(0, offset=1, cut=1), IndexSet(0, offset=1, cut=2), True),
        (IndexSet(0, offset=1, cut=2), IndexSet(0, offset=1, cut=1), False),
        (IndexSet(1), IndexSet(0), False),
        (IndexSet(0), IndexSet(0, loss=0), True),
        (IndexSet(0, loss=0), IndexSet(0, loss=0), True),
        (IndexSet(0, loss=1), IndexSet(0, loss=0), False),
        (IndexSet(0, loss=0), IndexSet(0), False),
    ],
)
def test_entries_within_entries(home: IndexSet, entries: IndexSet, contained: bool) -> None:
    assert _contains(home, entries) is contained


def test_a_packed_value_that_is_read_padded_is_zeros_at_pads() -> None:
    g = PaddedGraph()
    x = attend(g, g.x("r", "p", 6), key_mask(g))
    g.output(x, g.call(aten.relu.default, cut(g, x, 1, -1)))
    step = Step(g)
    for name in ("right", "left", "holes", "drawn"):
        mask = batches()[name]
        values = g.values(mask, torch.Generator().manual_seed(1), {})
        (whole, middle), (padded, padded_middle) = step.run(values), step.padded(*values)
        torch.testing.assert_close(whole, padded * mask[..., None])
        torch.testing.assert_close(middle, padded_middle * mask[:, 1:-1, None])


def test_an_output_before_a_graph_break_is_exact_at_pads() -> None:
    g = PaddedGraph()
    g.output(attend(g, g.x("r", "p", 6), key_mask(g)))
    assert Step(g, ends_in_break=True).rewrite.program is None


def test_heads_before_rows_in_one_dimension_are_left_padded() -> None:
    """What is added to such scores is taken to have the rows first."""
    g = PaddedGraph()
    q, k, v = (
        g.call(
            aten.reshape.default,
            g.call(aten.transpose.int, project(g, g.x("r", "p", 6), 2), 0, 1),
            [-1, g.size("p"), 4],
        )
        for _ in range(3)
    )
    hidden = g.call(aten.logical_not.default, g.call(aten.ne.Scalar, g.call(aten.unsqueeze.default, g.mask, 1), 0))
    hidden = g.call(aten.cat.default, [hidden, hidden], 0)
    scores = g.call(
        aten.masked_fill.Scalar, g.call(aten.bmm.default, q, g.call(aten.transpose.int, k, -1, -2)), hidden, -1e9
    )
    g.output(g.call(aten.bmm.default, g.call(aten.softmax.int, scores, -1), v))
    step = Step(g)
    assert step.rewrite.program is None
    assert any("its rows are not the first of its dimensions" in reason for reason in step.reasons)


# ------------------------------------------------------------------------------------------------ across positions


def zeroed(g: PaddedGraph, x: fx.Node) -> fx.Node:
    return g.call(aten.mul.Tensor, x, g.call(aten.unsqueeze.default, g.mask, -1))


def shifted(g: PaddedGraph, x: fx.Node) -> fx.Node:
    """Every position gets the one before it, by writes in place, and is read after each of them."""
    held = g.call(aten.zeros_like.default, x)
    g.call(aten.copy_.default, cut(g, held, 1), cut(g, x, 0, -1))
    early = g.call(aten.tanh.default, held)
    g.call(aten.mul_.Tensor, cut(g, held, 0, 2), 3.0)
    return g.call(aten.add.Tensor, early, g.call(aten.sin.default, held))


def rescaled(g: PaddedGraph, x: fx.Node) -> fx.Node:
    """Some features of each token by themselves change in place, between two reads."""
    held = g.call(aten.clone.default, g.call(aten.sin.default, x))
    early = g.call(aten.tanh.default, held)
    g.call(aten.mul_.Tensor, g.call(aten.slice.Tensor, held, 2, 0, 2), 3.0)
    return g.call(aten.add.Tensor, early, g.call(aten.sin.default, held))


def convolved(g: PaddedGraph, x: fx.Node) -> fx.Node:
    """A causal convolution, each channel by itself."""
    turned = g.call(aten.transpose.int, x, 1, 2)
    y = g.call(aten.conv1d.default, turned, g.weight(6, 1, 3), None, [1], [2], [1], 6)
    y = g.call(aten.slice.Tensor, y, 2, 0, g.size("p"))
    return g.call(aten.transpose.int, y, 1, 2)


ACROSS: dict[str, Callable[[PaddedGraph, fx.Node], fx.Node]] = {
    "convolution": convolved,
    "flip": lambda g, x: g.call(aten.flip.default, x, [1]),
    "roll of rows": lambda g, x: g.call(aten.roll.default, x, [1], [0]),
    "running sum": lambda g, x: g.call(aten.cumsum.default, x, 1),
    "writes in place": shifted,
    "writes into features": rescaled,
}


@pytest.mark.parametrize("name", ACROSS)
@pytest.mark.parametrize("is_zeroed", [True, False], ids=["zeroed", "pads seen"])
def test_what_looks_across_positions_is_padded_and_what_stands_around_it_packed(name: str, is_zeroed: bool) -> None:
    g = PaddedGraph()
    x = attend(g, g.x("r", "p", 6), key_mask(g))
    y = ACROSS[name](g, zeroed(g, x) if is_zeroed else x)
    g.output(attend(g, g.call(aten.add.Tensor, x, y), key_mask(g)))
    step = Step(g)
    assert step.targets().count(ops.varlen_attention.default) == 1 + is_zeroed  # what it reads at pads is exact
    for batch in BATCHES:
        compare(step, g, batches()[batch], {})


def test_a_value_by_position_that_is_written_into_is_read_behind_the_write() -> None:
    g = PaddedGraph()
    x = attend(g, g.x("r", "p", 6), key_mask(g))
    places = g.call(aten.arange.default, g.size("p"), dtype=torch.float64, device="cpu")
    places = g.call(aten.unsqueeze.default, g.call(aten.mul.Tensor, places, 1.0), -1)
    early = g.call(aten.add.Tensor, x, places)
    g.call(aten.mul_.Tensor, cut_first(g, places), 3.0)
    g.output(early, g.call(aten.add.Tensor, x, places))
    step = Step(g)
    for batch in BATCHES:
        compare(step, g, batches()[batch], {})


def cut_first(g: PaddedGraph, x: fx.Node) -> fx.Node:
    return g.call(aten.slice.Tensor, x, 0, 0, 2)


def test_an_attention_whose_operands_are_written_into_stays_padded() -> None:
    g = PaddedGraph()
    x = g.x("r", "p", 6)
    q, k, v = (project(g, x, 2) for _ in range(3))
    q = g.call(aten.clone.default, q)
    g.call(aten.mul_.Tensor, g.call(aten.slice.Tensor, q, 2, 0, 2), 2.0)
    y = g.call(aten.scaled_dot_product_attention.default, q, k, v, key_mask(g))
    y = g.call(aten.reshape.default, g.call(aten.transpose.int, y, 1, 2), [g.size("r"), g.size("p"), 8])
    g.output(g.call(aten.linear.default, y, g.weight(6, 8)))
    step = Step(g)
    assert step.rewrite.program is None
    assert any("is written into in place" in reason for reason in step.reasons)


def test_items_that_two_losses_demand_at_their_own_labels() -> None:
    g = PaddedGraph()
    x = attend(g, g.x("r", "p", 6), key_mask(g))
    halves = g.call(aten.split.Tensor, x, 3, -1)
    given = [g.batch("r", "p", name=f"labels_{number}") for number in range(2)]
    losses = []
    for number, labels in enumerate(given):
        half = g.call(operator.getitem, halves, number)
        losses.append(cross_entropy(g, g.call(aten.linear.default, half, g.weight(5, 3)), labels))
    g.output(*losses)
    step = Step(g)
    assert ops.pack_rows.default in step.targets()  # the halves are one operator's, for all tokens
    for batch in BATCHES:
        mask = batches()[batch]
        compare(step, g, mask, {given[0]: labels_of(mask, some=True), given[1]: labels_of(mask)})
