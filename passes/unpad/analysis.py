"""Analysis of a graph: its attentions and their masks, its losses, and which positions are tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import sympy
import torch
from torch import fx

from deepytorch.passes.base import Context, Decline
from deepytorch.passes.graphs import arguments_of
from deepytorch.passes.slicing import Slicer
from deepytorch.passes.unpad.attentions import Attention, find_attentions
from deepytorch.passes.unpad.demand import Seen, is_float
from deepytorch.passes.unpad.infinities import may_be_infinite
from deepytorch.passes.unpad.layout import (
    ROWS,
    VIEWS,
    Dim,
    Layout,
    Positions,
    Symbols,
    is_token,
    layouts,
    leads_with_tokens,
    packed_sizes,
    plain_size,
    positions_of,
    sorted_of,
    token_dims,
    vanishes,
)
from deepytorch.passes.unpad.masks import Meaning, Prober, TokenSource, Undecided
from deepytorch.passes.unpad.origins import are_one_sequence, origins
from deepytorch.passes.unpad.region import Declined, Region
from deepytorch.passes.unpad.routing import Router
from deepytorch.passes.unpad.rules import broadcasts
from deepytorch.passes.unpad.sizes import seed, spaces_of, unify_labels, unify_masks

aten = torch.ops.aten

_LOSSES = frozenset({aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default})


def analyse(module: fx.GraphModule, context: Context, *, loss_rows: bool, defer_outputs: bool) -> Region:
    """Return all findings about a graph that do not depend on which values are seen.

    Raises:
        Declined: nothing can be packed.
    """
    graph = module.graph
    slicer = Slicer(graph)
    attentions = find_attentions(graph)
    if not attentions:
        raise Declined("no attention was found (scaled_dot_product_attention, or matmul - softmax - matmul)")
    reason = slicer.cannot_pack()
    if reason is not None:
        raise Declined(reason)
    losses = [node for node in graph.nodes if node.target in _LOSSES]
    rows, positions = seed(attentions, context)
    unify_masks(graph, slicer, attentions, rows, context)
    rows, positions = seed(attentions, context)
    unify_labels(graph, slicer, losses, rows, positions, context)
    rows, positions = seed(attentions, context)
    symbols = Symbols(rows, frozenset(positions), context.shape_env)
    router = Router(symbols)
    known = layouts(graph, symbols, slicer.from_batch, router.layout)
    from_batch = {node: slicer.from_batch(node) for node in graph.nodes}
    _forget_sorted(graph, known, from_batch, router)
    written = slicer.written_values()
    if routed := written & router.order_of.keys():
        raise Declined(f"{next(iter(routed)).name} is sorted, and written into in place")
    region = Region(
        graph,
        slicer,
        symbols,
        known,
        spaces_of(graph, symbols, positions),
        losses=[node for node in losses if _is_token_loss(node, known, slicer) and node not in written],
        outputs=list(next(iter(reversed(graph.nodes))).args[0]),
        defers=defer_outputs and not context.ends_in_break,
    )
    _read_masks(region, attentions)
    _keep_sequences_apart(region, attentions)
    _token_sources(region)
    decided = region.attentions  # without the attentions that disagreed
    region.packs = any(space.strips for space in region.spaces.values()) and bool(decided)
    if not region.packs and not (region.losses and loss_rows):
        raise Declined(why_not(region.declined))
    region.meanings = {attention.output: meaning for attention, meaning in decided}
    if region.packs:
        region.picks = _picks(region)
        region.zeroing = _zeroing(region, attentions)
        region.sums = _sums(region)
    region.seen = Seen(
        layouts=known,
        from_batch=from_batch,
        attentions={attention.output: attention for attention, _ in decided} if region.packs else {},
        losses={node: number for number, node in enumerate(region.losses)},
        loss_rows=loss_rows,
        token_outputs=_token_outputs(region),
        biases={output: meaning.bias for output, meaning in region.meanings.items()},
        unreduced=frozenset(node for node in region.losses if is_token(known.get(node))),
        picks={node: number for number, node in enumerate(region.picks)},
        zero_at_pads=frozenset(region.zeroing),
        sums=frozenset(region.sums),
        deferred=frozenset(),
        routed=router.rules,
        order_of=router.order_of,
        written=written,
    )
    return region


def _token_outputs(region: Region) -> frozenset[fx.Node]:
    """Return the outputs that may leave the region packed."""
    if not region.defers:
        return frozenset()
    nodes = (node for node in region.outputs if isinstance(node, fx.Node) and not region.slicer.from_batch(node))
    return frozenset(node for node in nodes if leads_with_tokens(region.layouts.get(node)))


def why_not(declined: list[Decline]) -> str:
    """Return the reason why nothing is packed, in one line."""
    if declined:
        return "; ".join(dict.fromkeys(decline.reason for decline in declined))
    return "no attention has a mask that says which keys are tokens, so there is no padding to see"


def _forget_sorted(
    graph: fx.Graph, known: dict[fx.Node, Layout], from_batch: Mapping[fx.Node, bool], router: Router
) -> None:
    """Drop the layouts of what a sort moved, if anything but a move reads the sort, and of all computed from that.

    Results of other operators that have no rule keep theirs, although `x.flip(1)` has other tokens at its positions
    than `x`: a layout only says which dimension counts rows and which positions. What such an operator reads is
    demanded whole, so its result is the padded graph's own, pads included; who reads it by token finds the same there.
    """
    moved = router.close(graph, known, from_batch)
    for node in graph.nodes:
        sources = [source for source in node.all_input_nodes if not from_batch[source]]
        if node in moved or (node.op == "call_function" and not from_batch[node] and moved.intersection(sources)):
            moved.add(node)
            known.pop(node, None)


def _read_masks(region: Region, attentions: list[Attention]) -> None:
    """Give each attention, with the meaning of its mask, to the token space of its keys.

    An attention whose mask is not understood is declined, with the reason; where pads may be NaN, all of the region is.

    Raises:
        Declined: see there.
    """
    prober = Prober(region.graph, region.symbols, region.slicer)
    cache: dict[Any, Meaning] = {}
    for attention in attentions:
        by_token = False
        try:
            _check_writes(attention, region.slicer)
            queries, keys = _check_operands(attention, region.layouts)
            by_token = True
            asked = (attention.terms, attention.causal, attention.empty_is_nan, queries, keys)
            if asked not in cache:
                cache[asked] = prober.meaning(attention, queries, keys)
            region.space(attention.key).attentions.append((attention, cache[asked]))
        except Undecided as undecided:
            if by_token and attention.empty_is_nan and any(term.infinite for term in attention.terms):
                # its pads may be NaN, which no packed part behind it would carry on into the gradients
                raise Declined(f"attention: {undecided}") from undecided
            region.declined.append(Decline(attention.output.name, f"attention: {undecided}"))


def _check_writes(attention: Attention, slicer: Slicer) -> None:
    """Check that no value of an attention is written into, which a packed one would read later or never.

    Raises:
        Undecided: one is.
    """
    read = (*attention.inner, attention.query, attention.key, attention.value, attention.sinks)
    terms = (term.node for term in attention.terms if not slicer.from_batch(term.node))
    for node in filter(None, (*read, *terms)):
        if slicer.is_written(node):
            raise Undecided(f"its {node.name} is written into in place")


def _check_operands(attention: Attention, known: Mapping[fx.Node, Layout]) -> tuple[sympy.Symbol, sympy.Symbol]:
    """Return the token spaces of queries and keys.

    Raises:
        Undecided: an operand lacks the dimensions of a packed attention.
    """
    names = ("query", "key", "value", "output")
    found = [known.get(getattr(attention, name)) for name in names]
    for name, layout in zip(names, found, strict=True):
        if not is_token(layout):
            raise Undecided(f"its {name} does not have one entry a row and position")
        assert layout is not None
        last = layout[-2] if name == "key" and attention.key_is_transposed else layout[-1]
        if not all(isinstance(atom, int) for atom in last) or not positions_of(layout)[0].whole:
            raise Undecided(f"its {name} has positions in an unexpected dimension")
    _check_sinks(attention, known)
    if any(term.ndim == 3 for term in attention.terms) and (not found[0] or found[0][0][:1] != (ROWS,)):
        raise Undecided("its rows are not the first of its dimensions")  # terms are taken to have rows before heads
    _check_heads(attention, [layout for layout in found if layout is not None])
    query, key, value, output = (positions_of(layout)[0].symbol for layout in found if layout is not None)
    if query != output or key != value:
        raise Undecided("queries and outputs, or keys and values, stand in different token spaces")
    return query, key


def _check_sinks(attention: Attention, known: Mapping[fx.Node, Layout]) -> None:
    """Check that sinks are those of heads, or of heads and queries."""
    if attention.sinks is None:
        return
    layout, shape = known.get(attention.sinks), attention.sinks.meta["val"].shape
    if is_token(layout):
        assert layout is not None
        by_query = len(layout) == 4 and layout[0] == (ROWS,) and layout[2] == tuple(positions_of(layout))
        if by_query and positions_of(layout) == positions_of(known[attention.query]):
            return
    elif layout is not None and not token_dims(layout) and shape[0] == 1 and all(size == 1 for size in shape[2:]):
        return
    raise Undecided("its sinks are neither those of heads nor those of queries")


def _check_heads(attention: Attention, found: list[Layout]) -> None:
    """Check that attention runs along the positions, and that heads pair up as in the packed operator."""
    for index, layout in enumerate(found):
        place = -1 if index == 1 and attention.key_is_transposed else -2
        if len(layout[place]) != 1 or not isinstance(layout[place][0], Positions):
            raise Undecided("it looks along a dimension that is not the positions")
    query, key, value = ([plain_size(dim) for dim in layout[:-2] if not vanishes(dim)] for layout in found[:3])
    if key != value:
        raise Undecided("keys and values differ in their heads")
    if query == key or (len(query) == len(key) == 1 and not attention.key_is_transposed):
        return
    if len(query) != len(key):
        raise Undecided("queries and keys differ in their dimensions of heads")
    shared = next(i for i, (q, k) in enumerate(zip(query, key, strict=True)) if q != k)
    if any(size != 1 for size in key[shared:]):
        raise Undecided("keys are shared by groups of queries that do not stand together")


def _is_token_loss(node: fx.Node, known: Mapping[fx.Node, Layout], slicer: Slicer) -> bool:
    """Return whether a loss compares one row of logits per token with one label per token.

    Labels must follow from the batch.
    """
    logits, target = node.args[0], node.args[1]
    if not isinstance(target, fx.Node) or not isinstance(logits, fx.Node) or not slicer.from_batch(target):
        return False
    logits_layout, target_layout = known.get(logits), known.get(target)
    if target.meta["val"].is_floating_point() or not is_token(logits_layout) or not is_token(target_layout):
        return False
    assert logits_layout is not None
    assert target_layout is not None
    if packed_sizes(target_layout):  # several labels per token
        return False
    grid, labels = positions_of(logits_layout)[0], positions_of(target_layout)[0]
    classes = 1 if len(logits_layout) > 1 else 0
    expected = logits_layout[:classes] + logits_layout[classes + 1 :]
    same_order = [_kinds(dim) for dim in expected] == [_kinds(dim) for dim in target_layout]
    arguments = arguments_of(node)
    weight = arguments["weight"]
    if not isinstance(arguments["ignore_index"], int):
        return False
    if isinstance(weight, fx.Node) and (weight not in known or token_dims(known[weight])):
        return False
    plain_classes = all(isinstance(atom, int) for atom in logits_layout[classes])
    return same_order and plain_classes and (grid.symbol, grid.cut) == (labels.symbol, labels.cut)


def _kinds(dim: tuple[Any, ...]) -> list[str]:
    return ["rows" if atom is ROWS else "positions" if isinstance(atom, Positions) else str(atom) for atom in dim]


def _keep_sequences_apart(region: Region, attentions: list[Attention]) -> None:
    """Leave a space padded if it holds two different sequences.

    The model then requires both to have the same number of positions.
    """
    found = origins(region.graph, region.layouts, attentions, region.slicer)
    seen = [node for attention, _ in region.attentions for node in (attention.query, attention.key)]
    seen += [attention.sinks for attention, _ in region.attentions if attention.sinks is not None]
    seen += [loss.args[0] for loss in region.losses]  # type: ignore[misc]
    seen += [node for node in region.output_nodes if not region.slicer.from_batch(node)]
    for space in region.spaces.values():
        if not are_one_sequence(found[node] for node in seen if region.stands_in(node, space)):
            region.declined.append(
                Decline(space.name, "two sequences share their positions, each with tokens of its own")
            )
            space.attentions.clear()


def _token_sources(region: Region) -> None:
    """Determine for every space which of its positions are tokens.

    Attentions that disagree about the tokens of a space are removed from the space's list.
    """
    # Positions past the last label are real positions. Code that reads them gets them from a padded replay of the step,
    # so running the step again must be harmless.
    may_trim = region.defers and not region.slicer.writes_inputs
    for space in region.spaces.values():
        shown = [node for node in region.output_nodes if region.stands_in(node, space)]
        can_wait = all(is_float(node) or region.slicer.from_batch(node) for node in shown)  # only floats are deferred
        sources = list(dict.fromkeys(m.tokens for _, m in space.attentions if m.tokens is not None))
        bare = [(a, m) for a, m in space.attentions if m.tokens is None]
        sees_pads = [a for a, m in bare if not (m.window_right == 0 and region.stands_in(a.query, space))]
        if sources and (sees_pads or not _agree(sources, region)):
            region.declined.append(
                Decline(space.name, "attentions over the same keys disagree on which of them are tokens")
            )
            space.attentions.clear()
        elif sources:
            space.source = sources[0]
        elif bare and not sees_pads and may_trim and can_wait:
            space.trimmed_by = tuple(
                number for number, loss in enumerate(region.losses) if region.stands_in(loss.args[0], space)
            )


def _agree(sources: list[TokenSource], region: Region) -> bool:
    """Return whether several token masks are equal, found by evaluating them on the same probes."""
    if len(sources) == 1:
        return True
    prober = Prober(region.graph, region.symbols, region.slicer)
    for masks in prober.probe_together([source.node for source in sources]):
        read = [source.read(mask).flatten() for source, mask in zip(sources, masks, strict=True)]
        if not all(torch.equal(read[0], other) for other in read[1:]):
            return False
    return True


def _picks(region: Region) -> list[fx.Node]:
    """Return the nodes that take one position of each row: `x[:, 0]`, `x[rows, last]`."""
    found = []
    for node in region.graph.nodes:
        x = node.args[0] if node.args else None
        layout = region.layouts.get(x) if isinstance(x, fx.Node) else None
        if layout is None or not is_token(layout) or region.slicer.from_batch(x):  # type: ignore[arg-type]
            continue
        if region.slicer.is_written(node):
            continue
        if node.target is aten.select.int:
            index = node.args[1] % len(layout)
            dim, rest = layout[index], (*layout[:index], *layout[index + 1 :])
            if _is_whole(dim) and rest[0] == (ROWS,) and isinstance(node.args[2], int):
                found.append(node)
        elif node.target is aten.index.Tensor and _picks_by_index(node, layout, region):
            found.append(node)
    return found


def _is_whole(dim: Dim) -> bool:
    """Return whether a dimension is all positions of a token space, and nothing else."""
    return len(dim) == 1 and isinstance(dim[0], Positions) and dim[0].whole


def _picks_by_index(node: fx.Node, layout: Layout, region: Region) -> bool:
    indices = node.args[1]
    if len(indices) != 2 or layout[0] != (ROWS,) or not _is_whole(layout[1]):  # type: ignore[arg-type]
        return False
    return all(
        isinstance(index, fx.Node)
        and region.slicer.from_batch(index)
        and index.meta["val"].dtype is torch.int64
        and region.layouts.get(index) == ((ROWS,),)
        for index in indices  # type: ignore[union-attr]
    )


def _zeroing(region: Region, attentions: Sequence[Attention]) -> dict[fx.Node, fx.Node]:
    """Return the values that are zero wherever a batch-only factor is zero, each with its factor.

    Such values are `x * mask`, `x.masked_fill(~mask, 0)` and `where(mask, x, 0)`. A product counts only if its other
    factor is finite: zero times infinity is NaN.
    """
    found: dict[fx.Node, fx.Node] = {}
    known, slicer = region.layouts, region.slicer
    infinite = may_be_infinite(region.graph, slicer, attentions)
    for node in region.graph.nodes:
        out = known.get(node)
        if out is None or not is_token(out) or slicer.from_batch(node) or slicer.is_written(node):
            continue
        if node.target is aten.mul.Tensor:
            factors = [arg for arg in node.args[:2] if isinstance(arg, fx.Node)]
            if any(factor in infinite for factor in factors):
                continue
        elif node.target is aten.masked_fill.Scalar and node.args[2] == 0:
            factors = [node.args[1]]  # type: ignore[list-item]
        elif node.target is aten.where.ScalarOther and node.args[2] == 0:
            factors = [node.args[0]]  # type: ignore[list-item]
        else:
            continue
        for factor in factors:
            if not slicer.from_batch(factor) or not broadcasts(known.get(factor), out, from_batch=True):
                continue
            bare = _bare_factor(factor, known)
            if bare is not None:
                found[node] = bare
    return found


def _sums(region: Region) -> dict[fx.Node, fx.Node]:
    """Return the sums by index to which pads add zeros, each with the batch-only factor that makes them zeros.

    Such is the count of the tokens of each expert, `zeros.scatter_add(0, experts, mask)`: wherever a pad's index points
    to, nothing is added there.
    """
    found: dict[fx.Node, fx.Node] = {}
    known, slicer = region.layouts, region.slicer
    for node in region.graph.nodes:
        if node.target is not aten.scatter_add.default or node.args[1] != 0 or slicer.is_written(node):
            continue
        index, source = node.args[2:4]
        layout = known.get(index)
        if layout is None or len(layout) != 1 or not is_token(layout) or sorted_of(layout) is not None:
            continue
        if slicer.from_batch(index) or not isinstance(source, fx.Node) or not slicer.from_batch(source):
            continue
        bare = _bare_factor(source, known) if broadcasts(known.get(source), layout, from_batch=True) else None
        if bare is not None:
            found[node] = bare
    return found


_KEEPS_ZEROS = frozenset({
    *VIEWS, aten.unsqueeze.default, aten.repeat_interleave.self_int,
    aten.expand.default, aten.expand_as.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device,
    aten._to_copy.default, aten.type_as.default, aten.clone.default, aten.contiguous.default,
})  # fmt: skip


def _bare_factor(factor: fx.Node, known: Mapping[fx.Node, Layout]) -> fx.Node | None:
    """Return the factor before its repetition along plain dimensions, one number per token; None if there is none."""
    node: Any = factor
    while isinstance(node, fx.Node) and is_token(known.get(node)):
        layout = known[node]
        if all(len(dim) <= 1 and not any(isinstance(atom, int) for atom in dim) for dim in layout):
            return node
        if node.target not in _KEEPS_ZEROS:
            return None
        node = node.args[0]
    return None
