"""Padded batch -> packed tokens: the pass that finds out what can be packed, and rewrites the graph.

Read `StripPadding.rewrite` top to bottom: attentions and their masks (`masks`), layouts (`layout`), who sees what
(`demand`), then the packed graph (`emit`) and, for the run time, how to feed it and read it (`program`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import sympy
import torch
from torch import fx

from deepytorch.passes import demand as seeing
from deepytorch.passes.base import Context, Decline, Pass, Rewrite, Role
from deepytorch.passes.demand import Demand, Seen, admitted_rule, demands, is_float, random_nodes
from deepytorch.passes.emit import Emitter
from deepytorch.passes.layout import (
    ROWS,
    Layout,
    Positions,
    Symbols,
    is_token,
    layouts,
    packed_sizes,
    plain_size,
    positions_of,
    token_dims,
    vanishes,
)
from deepytorch.passes.masks import Attention, Meaning, Prober, TokenSource, Undecided, bind, find_attentions
from deepytorch.passes.program import (
    Assumption,
    IndexInput,
    IndexSet,
    LossFacts,
    Output,
    OutputMeta,
    PickFacts,
    Program,
    SpaceFacts,
    Tail,
)
from deepytorch.passes.rules import Linear, broadcasts, rule_for, tensor_inputs
from deepytorch.passes.slicing import Slicer

aten = torch.ops.aten

_LOSSES = frozenset({aten.cross_entropy_loss.default, aten.nll_loss_nd.default, aten.nll_loss.default})


@dataclass(frozen=True)
class StripPadding(Pass):
    """Rewrites a padded region into one on packed tokens. Exact: pads are seen by nobody, or checked at run time.

    `loss_rows`: entries whose label is ignored run neither head nor loss. `defer_outputs`: token outputs beside a
    loss are computed at their first use.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"packed"})
    loss_rows: bool = True
    defer_outputs: bool = True

    def rewrite(self, module: fx.GraphModule, context: Context) -> Rewrite:
        """Pack what can be packed; `context.artifacts["program"]` tells the run time how to feed the new graph."""
        rewrite = Rewrite()
        try:
            region = _analyse(module, context, self)
            program = _write(module, region, self)
        except Declined as declined:
            rewrite.declined.append(Decline(declined.where, str(declined)))
            return rewrite
        context.artifacts["program"] = program
        rewrite.changes.extend(program.sites)
        rewrite.declined.extend(region.declined)
        return rewrite


class Declined(Exception):
    """The region stays as it is."""

    def __init__(self, reason: str, where: str = "region") -> None:
        super().__init__(reason)
        self.where = where


@dataclass
class Space:
    """One token space while its region is analysed."""

    number: int
    symbol: sympy.Symbol
    name: str
    size: tuple[fx.Node, int, int]
    attentions: list[tuple[Attention, Meaning]] = field(default_factory=list)
    source: TokenSource | None = None
    trimmed_by: tuple[int, ...] = ()

    @property
    def strips(self) -> bool:
        """Whether some positions of this space may be left out."""
        return self.source is not None or bool(self.trimmed_by)


@dataclass
class Region:
    """Everything that the analyses found out about one graph."""

    graph: fx.Graph
    slicer: Slicer
    symbols: Symbols
    layouts: dict[fx.Node, Layout]
    spaces: dict[sympy.Symbol, Space]
    meanings: dict[fx.Node, Meaning]
    seen: Seen
    demand: dict[fx.Node, Demand]
    outputs: list[Any]
    losses: list[fx.Node]
    picks: list[fx.Node]
    zeroing: dict[fx.Node, fx.Node]  # value that is zero at pads -> the batch-only factor that makes it so
    entries: dict[fx.Node, IndexSet]
    declined: list[Decline]
    packs: bool
    twins: set[fx.Node] = field(default_factory=set)  # outputs that only the padded step computes, if they are used

    def space(self, node: fx.Node) -> Space:
        """The token space of a token value."""
        return self.spaces[positions_of(self.layouts[node])[0].symbol]


# --------------------------------------------------------------------------------------------- finding out


def _analyse(module: fx.GraphModule, context: Context, config: StripPadding) -> Region:
    graph = module.graph
    slicer = Slicer(graph)
    attentions = find_attentions(graph)
    if not attentions:
        raise Declined("no attention was found (scaled_dot_product_attention, or matmul - softmax - matmul)")
    reason = slicer.cannot_pack()
    if reason is not None:
        raise Declined(reason)
    rows, positions = _seed(attentions, context)
    losses = [node for node in graph.nodes if node.target in _LOSSES]
    _unify_masks(graph, slicer, attentions, rows, context)
    rows, positions = _seed(attentions, context)
    _unify_labels(graph, slicer, losses, rows, positions, context)
    rows, positions = _seed(attentions, context)
    symbols = Symbols(rows, frozenset(positions), context.shape_env)
    known = layouts(graph, symbols, slicer.from_batch)
    _forget_foreign(graph, known, attentions, slicer)
    spaces = _spaces(graph, symbols, positions)
    declined: list[Decline] = []
    decided = _meanings(graph, attentions, known, symbols, slicer, declined)
    losses = [node for node in losses if _is_token_loss(node, known, slicer)]
    for attention, meaning in decided:
        spaces[positions_of(known[attention.key])[0].symbol].attentions.append((attention, meaning))
    outputs = list(next(iter(reversed(graph.nodes))).args[0])
    _token_sources(graph, spaces, known, losses, symbols, slicer, config, declined, context.ends_in_break)
    packs = any(space.strips for space in spaces.values()) and bool(decided)
    if not packs and not (losses and config.loss_rows):
        raise Declined(_why_not(declined))
    picks = _picks(graph, known, slicer) if packs else []
    zeroing = _zeroing(graph, known, slicer) if packs else {}
    seen = Seen(
        layouts=known,
        from_batch={node: slicer.from_batch(node) for node in graph.nodes},
        attentions={attention.output: attention for attention, _ in decided} if packs else {},
        losses={node: number for number, node in enumerate(losses)},
        loss_rows=config.loss_rows,
        exact_outputs=context.ends_in_break,
        biases={attention.output: meaning.bias for attention, meaning in decided},
        unreduced=frozenset(node for node in losses if is_token(known.get(node))),
        picks={node: number for number, node in enumerate(picks)},
        zero_at_pads=frozenset(zeroing),
        deferred=frozenset(),
    )
    region = Region(
        graph=graph, slicer=slicer, symbols=symbols, layouts=known, spaces=spaces,
        meanings={attention.output: meaning for attention, meaning in decided}, seen=seen, demand={}, outputs=outputs,
        losses=losses, picks=picks, zeroing=zeroing, entries={}, declined=declined, packs=packs,
    )  # fmt: skip
    _decide(region, config)
    return region


def _why_not(declined: list[Decline]) -> str:
    if declined:
        return "; ".join(dict.fromkeys(decline.reason for decline in declined))
    return "no attention has a mask that says which keys are tokens, so there is no padding to see"


def _seed(attentions: list[Attention], context: Context) -> tuple[sympy.Symbol, list[sympy.Symbol]]:
    """The symbols of rows and of positions, as the attentions' operands show them."""
    env = context.shape_env
    rows: list[sympy.Symbol] = []
    positions: list[sympy.Symbol] = []
    for attention in attentions:
        query, key = attention.query.meta["val"], attention.key.meta["val"]
        q_dim, k_dim = -2, -1 if attention.key_is_transposed else -2
        if query.dim() < 3 or key.dim() < 3:
            continue
        first = _expr(query.shape[0], env)
        symbols = list(first.free_symbols)
        if len(symbols) == 1 and (first / symbols[0]).is_Integer:
            rows.append(symbols[0])
        for size in (_expr(query.shape[q_dim], env), _expr(key.shape[k_dim], env)):
            if size.is_Symbol and size not in positions:
                positions.append(size)
    if not rows or not positions:
        raise Declined("rows or positions have fixed sizes in this graph (a batch of one row, or dynamic=False)")
    return rows[0], [symbol for symbol in positions if symbol != rows[0]]


def _expr(size: Any, env: Any) -> sympy.Expr:
    return sympy.expand(env.replace(size.node.expr)) if isinstance(size, torch.SymInt) else sympy.Integer(size)


def _unify_masks(
    graph: fx.Graph, slicer: Slicer, attentions: list[Attention], rows: sympy.Symbol, context: Context
) -> None:
    """Let sizes that must agree agree: a mask has the rows and the positions of the keys that it masks.

    Dynamo gives every input symbols of its own. Comparing two of them here adds a guard, so that a later batch where
    they differ is compiled anew instead of being misread.
    """
    env = context.shape_env
    sizes = _input_sizes(graph, env)
    for attention in attentions:
        key = attention.key.meta["val"].shape[-1 if attention.key_is_transposed else -2]
        columns = [_expr(key, env), _expr(attention.query.meta["val"].shape[-2], env)]
        for term in attention.terms:
            for leaf in slicer.leaves(term.node):
                _match_sizes(leaf, sizes, rows, columns, env)


def _unify_labels(
    graph: fx.Graph,
    slicer: Slicer,
    losses: list[fx.Node],
    rows: sympy.Symbol,
    positions: list[sympy.Symbol],
    context: Context,
) -> None:
    """The same for labels, which have the rows and the positions of the logits."""
    env = context.shape_env
    sizes = _input_sizes(graph, env)
    for loss in losses:
        free: set[Any] = set()
        for size in loss.args[0].meta["val"].shape:
            free |= _expr(size, env).free_symbols
        if isinstance(loss.args[1], fx.Node) and slicer.from_batch(loss.args[1]):
            for leaf in slicer.leaves(loss.args[1]):
                _match_sizes(leaf, sizes, rows, [symbol for symbol in positions if symbol in free], env)


def _input_sizes(graph: fx.Graph, env: Any) -> dict[sympy.Expr, torch.SymInt]:
    """A symbolic integer for every symbol that is the size of some input."""
    sizes: dict[sympy.Expr, torch.SymInt] = {}
    for node in graph.nodes:
        if node.op == "placeholder" and isinstance(node.meta["val"], torch.Tensor):
            for size in node.meta["val"].shape:
                if isinstance(size, torch.SymInt):
                    sizes.setdefault(_expr(size, env), size)
    return sizes


def _match_sizes(
    leaf: fx.Node, sizes: Mapping[sympy.Expr, torch.SymInt], rows: sympy.Symbol, columns: Iterable[sympy.Expr], env: Any
) -> None:
    value = leaf.meta["val"]
    if leaf.meta["input"].role is not Role.BATCH or not isinstance(value, torch.Tensor) or value.dim() < 2:
        return
    for index, size in enumerate(value.shape):
        for known in [rows] if index == 0 else columns:
            other = sizes.get(known)
            if not isinstance(size, torch.SymInt) or other is None or _expr(size, env) in (rows, *columns):
                break
            if size.node.hint == other.node.hint:
                bool(size == other)  # the comparison is the guard
                break


def _spaces(graph: fx.Graph, symbols: Symbols, positions: list[sympy.Symbol]) -> dict[sympy.Symbol, Space]:
    """Number the token spaces, and find an input that each one's sizes can be read from."""
    spaces: dict[sympy.Symbol, Space] = {}
    for symbol in positions:
        for node in graph.nodes:
            value = node.meta.get("val")
            if node.op != "placeholder" or not isinstance(value, torch.Tensor):
                continue
            sizes = [symbols.expr(size) for size in value.shape]
            if symbols.rows in sizes and symbol in sizes:
                place = (node, sizes.index(symbols.rows), sizes.index(symbol))
                spaces[symbol] = Space(len(spaces), symbol, node.meta["input"].name, place)
                break
        else:
            raise Declined(f"no input has both rows and the positions {symbol}")
    return spaces


def _forget_foreign(graph: fx.Graph, known: dict[fx.Node, Layout], attentions: list[Attention], slicer: Slicer) -> None:
    """Drop the layouts of what an operator without a rule made of token values, and of all that follows from it.

    Sizes say that it has positions, but not that they are still the same ones: `x.flip(1)`, `x[:, order]`.
    """
    trusted = {node for attention in attentions for node in attention.inner}
    from_batch = {node: slicer.from_batch(node) for node in graph.nodes}
    foreign: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op != "call_function" or from_batch[node]:
            continue
        sources = [source for source in node.all_input_nodes if not from_batch[source]]
        tokens = [source for source in sources if is_token(known.get(source))]
        kept = node in trusted or node.target in _LOSSES
        if not kept and tokens and is_token(known.get(node)):
            rule = rule_for(node)
            kept = rule is not None and rule.admits(node, known, from_batch)
        elif not tokens:
            kept = True
        if foreign.intersection(sources) or (not kept and (is_token(known.get(node)) or node not in known)):
            if isinstance(node.meta.get("val"), (list, tuple)) and not foreign.intersection(sources):
                continue  # judged by its items
            foreign.add(node)
            known.pop(node, None)


def _meanings(
    graph: fx.Graph,
    attentions: list[Attention],
    known: Mapping[fx.Node, Layout],
    symbols: Symbols,
    slicer: Slicer,
    declined: list[Decline],
) -> list[tuple[Attention, Meaning]]:
    """What each attention's mask says; those that cannot be told are declined, with the reason."""
    prober = Prober(graph, symbols, slicer)
    cache: dict[Any, Meaning] = {}
    decided = []
    for attention in attentions:
        try:
            queries, keys = _check_operands(attention, known)
            asked = (attention.terms, attention.causal, queries, keys)
            if asked not in cache:
                cache[asked] = prober.meaning(attention, symbols.rows, queries, keys)
            decided.append((attention, cache[asked]))
        except Undecided as undecided:
            declined.append(Decline(attention.output.name, f"attention: {undecided}"))
    return decided


def _check_operands(attention: Attention, known: Mapping[fx.Node, Layout]) -> tuple[sympy.Symbol, sympy.Symbol]:
    """The token spaces of queries and keys, once every operand has the dimensions of a packed attention."""
    names = ("query", "key", "value", "output")
    found = [known.get(getattr(attention, name)) for name in names]
    for name, layout in zip(names, found, strict=True):
        if not is_token(layout):
            raise Undecided(f"its {name} does not have one entry a row and position")
        assert layout is not None
        last = layout[-2] if name == "key" and attention.key_is_transposed else layout[-1]
        if not all(isinstance(atom, int) for atom in last) or not positions_of(layout)[0].whole:
            raise Undecided(f"its {name} has positions in an unexpected dimension")
    _check_heads(attention, [layout for layout in found if layout is not None])
    query, key, value, output = (positions_of(layout)[0].symbol for layout in found if layout is not None)
    if query != output or key != value:
        raise Undecided("queries and outputs, or keys and values, stand in different token spaces")
    return query, key


def _check_heads(attention: Attention, found: list[Layout]) -> None:
    """Positions stand where attention looks along them, and heads pair up as the packed operator pairs them."""
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
    """Whether a loss compares one row of logits a token with one label a token that follows from the batch."""
    logits, target = node.args[0], node.args[1]
    if not isinstance(target, fx.Node) or not isinstance(logits, fx.Node) or not slicer.from_batch(target):
        return False
    logits_layout, target_layout = known.get(logits), known.get(target)
    if target.meta["val"].is_floating_point() or not is_token(logits_layout) or not is_token(target_layout):
        return False
    assert logits_layout is not None
    assert target_layout is not None
    if packed_sizes(target_layout):  # several labels a token
        return False
    grid, labels = positions_of(logits_layout)[0], positions_of(target_layout)[0]
    classes = 1 if len(logits_layout) > 1 else 0
    expected = logits_layout[:classes] + logits_layout[classes + 1 :]
    same_order = [_kinds(dim) for dim in expected] == [_kinds(dim) for dim in target_layout]
    weight = bind(node)["weight"]
    if isinstance(weight, fx.Node) and (weight not in known or token_dims(known[weight])):
        return False
    plain_classes = all(isinstance(atom, int) for atom in logits_layout[classes])
    return same_order and plain_classes and (grid.symbol, grid.cut) == (labels.symbol, labels.cut)


def _kinds(dim: tuple[Any, ...]) -> list[str]:
    return ["rows" if atom is ROWS else "positions" if isinstance(atom, Positions) else str(atom) for atom in dim]


def _token_sources(
    graph: fx.Graph,
    spaces: dict[sympy.Symbol, Space],
    known: Mapping[fx.Node, Layout],
    losses: list[fx.Node],
    symbols: Symbols,
    slicer: Slicer,
    config: StripPadding,
    declined: list[Decline],
    exact_outputs: bool,
) -> None:
    """Say for every space which of its positions are tokens."""
    outputs = [node for node in next(iter(reversed(graph.nodes))).all_input_nodes if is_token(known.get(node))]
    for space in spaces.values():
        # Positions past the last label are real ones: whoever looks at them gets them from the padded step, which must
        # then be free to run again, and able to: only what is differentiated is deferred.
        shown = [node for node in outputs if positions_of(known[node])[0].symbol == space.symbol]
        may_trim = (
            not slicer.writes_inputs
            and not exact_outputs
            and all(is_float(node) or slicer.from_batch(node) for node in shown)
        )
        sources = list(dict.fromkeys(m.tokens for _, m in space.attentions if m.tokens is not None))
        bare = [(a, m) for a, m in space.attentions if m.tokens is None]
        sees_pads = [a for a, m in bare if not _is_causal_self(a, m, known)]
        if sources and (sees_pads or not _agree(sources, graph, symbols, slicer)):
            declined.append(Decline(space.name, "attentions over the same keys disagree on which of them are tokens"))
            space.attentions.clear()
            continue
        if sources:
            space.source = sources[0]
        elif bare and not sees_pads and config.defer_outputs and may_trim:
            space.trimmed_by = tuple(
                number
                for number, loss in enumerate(losses)
                if positions_of(known[loss.args[0]])[0].symbol == space.symbol  # type: ignore[index]
            )


def _is_causal_self(attention: Attention, meaning: Meaning, known: Mapping[fx.Node, Layout]) -> bool:
    same = positions_of(known[attention.query])[0].symbol == positions_of(known[attention.key])[0].symbol
    return same and meaning.window_right == 0


def _agree(sources: list[TokenSource], graph: fx.Graph, symbols: Symbols, slicer: Slicer) -> bool:
    """Whether several token masks are one: told by evaluating them on the same probes."""
    if len(sources) == 1:
        return True
    prober = Prober(graph, symbols, slicer)
    nodes = [source.node for source in sources]
    for masks in prober.probe_together(nodes):
        read = [source.read(mask).flatten() for source, mask in zip(sources, masks, strict=True)]
        if not all(torch.equal(read[0], other) for other in read[1:]):
            return False
    return True


def _picks(graph: fx.Graph, known: Mapping[fx.Node, Layout], slicer: Slicer) -> list[fx.Node]:
    """Nodes that take one position of each row: `x[:, 0]`, `x[rows, last]`."""
    found = []
    for node in graph.nodes:
        x = node.args[0] if node.args else None
        layout = known.get(x) if isinstance(x, fx.Node) else None  # type: ignore[arg-type]
        if not is_token(layout) or slicer.from_batch(x):  # type: ignore[arg-type]
            continue
        assert layout is not None
        if node.target is aten.select.int:
            index = node.args[1] % len(layout)
            dim, rest = layout[index], (*layout[:index], *layout[index + 1 :])
            whole = len(dim) == 1 and isinstance(dim[0], Positions) and dim[0].whole
            if whole and rest[0] == (ROWS,) and isinstance(node.args[2], int):
                found.append(node)
        elif node.target is aten.index.Tensor and _picks_by_index(node, layout, known, slicer):
            found.append(node)
    return found


def _picks_by_index(node: fx.Node, layout: Layout, known: Mapping[fx.Node, Layout], slicer: Slicer) -> bool:
    indices = node.args[1]
    if len(indices) != 2 or layout[0] != (ROWS,) or len(layout[1]) != 1 or not isinstance(layout[1][0], Positions):  # type: ignore[arg-type]
        return False
    if not layout[1][0].whole:
        return False
    return all(
        isinstance(index, fx.Node)
        and slicer.from_batch(index)
        and index.meta["val"].dtype is torch.int64
        and known.get(index) == ((ROWS,),)
        for index in indices  # type: ignore[union-attr]
    )


def _zeroing(graph: fx.Graph, known: Mapping[fx.Node, Layout], slicer: Slicer) -> dict[fx.Node, fx.Node]:
    """Values that are zero wherever a batch-only factor is: `x * mask`, `x.masked_fill(~mask, 0)`, `where(mask, x,
    0)`.
    """
    found: dict[fx.Node, fx.Node] = {}
    for node in graph.nodes:
        out = known.get(node)
        if not is_token(out) or slicer.from_batch(node):
            continue
        assert out is not None
        if node.target is aten.mul.Tensor:
            factors = [arg for arg in node.args[:2] if isinstance(arg, fx.Node)]
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


_KEEPS_ZEROS = frozenset({
    aten.expand.default, aten.expand_as.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device,
    aten._to_copy.default, aten.type_as.default, aten.clone.default, aten.contiguous.default,
})  # fmt: skip


def _bare_factor(factor: fx.Node, known: Mapping[fx.Node, Layout]) -> fx.Node | None:
    """The factor before it was repeated along plain dimensions: one number a token; None if there is none such."""
    node: Any = factor
    while isinstance(node, fx.Node) and is_token(known.get(node)):
        layout = known[node]
        if all(len(dim) <= 1 and not any(isinstance(atom, int) for atom in dim) for dim in layout):
            return node
        if node.target not in _KEEPS_ZEROS:
            return None
        node = node.args[0]
    return None


# --------------------------------------------------------------------------------------------- deciding


def _decide(region: Region, config: StripPadding) -> None:
    """Compute demand, and from it which values are packed over what; settle which outputs can wait."""
    may_wait = config.defer_outputs and bool(region.losses) and not region.seen.exact_outputs
    modes = _modes(region.graph)
    deferred = {node for node in region.outputs if may_wait and _is_token_output(node, region)}
    keep: set[fx.Node] = set()
    for _ in range(2 * len(region.outputs) + 4):
        region.seen.deferred = frozenset(deferred | region.twins)
        region.seen.keep_tokens = frozenset(keep)
        region.seen.refused.clear()
        region.demand = demands(region.graph, region.seen)
        region.entries = _entries(region)
        before = (len(deferred), len(region.twins), len(keep))
        region.twins |= {node for node in deferred if region.space(node).trimmed_by}
        if may_wait and not region.slicer.writes_inputs:
            region.twins |= _outputs_in_the_way(region)
        for node in list(deferred - region.twins):
            late = _tail_nodes(region, node)
            keep |= set(random_nodes(late))
            inside = [other for other in late if not region.seen.from_batch[other] and other.op == "call_function"]
            if any(other in region.seen.attentions or other in region.losses or modes[other] for other in inside):
                deferred.discard(node)
        if before == (len(deferred), len(region.twins), len(keep)):
            break
    for node, target in region.seen.refused.items():
        if all(source in region.entries or region.seen.from_batch[source] for source in tensor_inputs(node)):
            continue  # what it sees at pads is zero in the padded graph as well
        region.declined.append(Decline(node.name, f"{target} may look across positions: what feeds it stays padded"))
    if not region.entries:
        raise Declined(_why_not(region.declined))


def _modes(graph: fx.Graph) -> dict[fx.Node, tuple[Any, ...]]:
    """The autocast and grad modes that the graph itself switched on around each node; empty at its top level."""
    modes: dict[fx.Node, tuple[Any, ...]] = {}
    autocasts: list[fx.Node] = []
    grad: tuple[Any, ...] = ()
    for node in graph.nodes:
        name = getattr(node.target, "__name__", "")
        if "enter_autocast" in name:
            autocasts.append(node)
        elif "exit_autocast" in name and autocasts:
            autocasts.pop()
        elif "set_grad_enabled" in name:
            grad = () if node.args[0] else ("no_grad",)
        modes[node] = (*autocasts, *grad)
    return modes


def _outputs_in_the_way(region: Region) -> set[fx.Node]:
    """Outputs beside the loss, such as the last part of a key-value cache, that alone keep token values padded."""
    loss_needs = set(region.slicer.slice(region.losses))
    refused = [node for node in region.seen.refused if node not in loss_needs]
    found = set()
    for node in region.outputs:
        value = node.meta.get("val") if isinstance(node, fx.Node) and node.op == "call_function" else None
        if (
            node in region.seen.deferred
            or not isinstance(value, torch.Tensor)
            or value.dim() == 0
            or not is_float(node)
        ):
            continue
        free = {symbol for size in value.shape for symbol in region.symbols.expr(size).free_symbols}
        if free <= {region.symbols.rows, *region.symbols.positions} and set(refused) & set(region.slicer.slice([node])):
            found.add(node)
    return found


def _is_token_output(node: Any, region: Region) -> bool:
    if not isinstance(node, fx.Node) or node.op == "placeholder":
        return False
    return is_token(region.layouts.get(node)) and not region.seen.from_batch[node] and is_float(node)


def _entries(region: Region) -> dict[fx.Node, IndexSet]:
    """Which nodes get a packed form, and over which entries of their space."""
    entries: dict[fx.Node, IndexSet] = {}
    for node in region.graph.nodes:
        found = _entry(region, node)
        if found is not None:
            entries[node] = found
    return entries


def _entry(region: Region, node: fx.Node) -> IndexSet | None:
    demand, seen = region.demand[node], region.seen
    if node.op != "call_function" or demand == seeing.NOTHING or seen.from_batch[node]:
        return None
    if node in seen.attentions:
        return IndexSet(region.space(node).number) if demand.packable else None
    if node in seen.losses:
        grid = positions_of(region.layouts[node.args[0]])[0]
        space = region.spaces[grid.symbol].number
        if seeing.by_token(node, demand, seen) or not seen.loss_rows:
            return IndexSet(space, offset=grid.offset, cut=grid.cut)
        return IndexSet(space, loss=seen.losses[node])
    if node in seen.picks or admitted_rule(node, seen) is None:
        return None
    if not demand.packable:
        if node not in seen.zero_at_pads:
            return None
        demand = seeing.TOKENS
    if node in seen.keep_tokens:
        demand = seeing.TOKENS
    carrier = node.args[0] if isinstance(node.meta.get("val"), (list, tuple)) else node
    grid = positions_of(region.layouts[carrier])[0]  # type: ignore[index]
    space = region.spaces[grid.symbol].number
    if demand.loss is not None:
        return IndexSet(space, loss=demand.loss)
    return IndexSet(space, offset=grid.offset, cut=grid.cut) if region.packs else None


def _is_boundary(region: Region, node: fx.Node) -> bool:
    """Whether a deferred output may start from this value, because the step computes it for all tokens anyway."""
    if node.op != "call_function" or region.seen.from_batch[node] or not is_float(node):
        return False
    if region.demand[node] == seeing.NOTHING:
        return False
    entries = region.entries.get(node)
    return entries is None or entries.loss is None


def _tail_nodes(region: Region, output: fx.Node) -> list[fx.Node]:
    """What has to be computed for a deferred output besides what the step computes."""
    if _is_boundary(region, output):
        return []
    stop = frozenset(node for node in region.graph.nodes if _is_boundary(region, node))
    return region.slicer.slice([output], stop)


# --------------------------------------------------------------------------------------------- writing


def _write(module: fx.GraphModule, region: Region, config: StripPadding) -> Program:
    """Replace the module's graph by its packed form and say how to run it."""
    placeholders = [node for node in region.graph.nodes if node.op == "placeholder"]
    number = {node: index for index, node in enumerate(placeholders)}
    tails, tail_of = _tails(module, region, number)
    emitter = _emitter(region, region.entries)
    for node in region.graph.nodes:
        _write_node(region, emitter, node)
    outputs: list[Output] = []
    values: list[Any] = []
    for node in region.outputs:
        if node in region.seen.deferred:
            meta = _output_meta(region, node)
            outputs.append(Output("twin", 0, meta) if node in region.twins else Output("tail", tail_of[node], meta))
        else:
            outputs.append(Output("value", len(values)))
            values.append(emitter.padded(node) if isinstance(node, fx.Node) else node)
    wired = []
    for tail, boundary in tails:
        start = len(values)
        for node in boundary:
            home = region.entries.get(node)
            values.append(emitter.padded(node) if home is None else emitter.packed(node, home))
        wired.append(Tail(tail.module, tail.inputs, tail.indices, tuple(range(start, len(values)))))
    facts, facts_inputs, found = _facts(module, region)
    graph = emitter.finish(values)
    kept = _prune(graph, len(placeholders))
    module.graph = graph
    module.recompile()
    return Program(
        facts=facts,
        facts_inputs=facts_inputs,
        spaces=found.spaces,
        losses=found.losses,
        picks=found.picks,
        assumptions=found.assumptions,
        indices=tuple(emitter.indices),
        outputs=tuple(outputs),
        tails=tuple(wired),
        sizes=tuple((number[s.size[0]], s.size[1], s.size[2]) for s in region.spaces.values()),
        buffers=_buffers(region, number),
        packed_inputs=kept,
        costs=_costs(region),
        sites=_sites(region),
    )


def _emitter(region: Region, entries: Mapping[fx.Node, IndexSet]) -> Emitter:
    emitter = Emitter(
        region.graph,
        region.layouts,
        entries,
        {symbol: space.number for symbol, space in region.spaces.items()},
        [space.size for space in region.spaces.values()],
        region.slicer,
    )
    for output, attention in region.seen.attentions.items():
        if output in entries:
            emitter.swallowed.update(node for node in attention.inner if node is not output)
    return emitter


def _write_node(region: Region, emitter: Emitter, node: fx.Node) -> None:
    """Add one node of the padded graph to the packed one, in the form that was decided."""
    seen = region.seen
    if node.op in ("placeholder", "output"):
        return
    if node.op == "get_attr":
        emitter.copy(node)
    elif region.demand[node] == seeing.NOTHING and not node.is_impure():
        return
    elif node in seen.attentions and node in region.entries:
        attention = seen.attentions[node]
        keys = IndexSet(region.space(attention.key).number)
        emitter.attention(attention, region.meanings[node], region.entries[node], keys)
    elif node in seen.losses:
        _write_loss(region, emitter, node)
    elif node in seen.picks:
        space = region.space(node.args[0])  # type: ignore[arg-type]
        rank = emitter.index(IndexInput("picked", IndexSet(space.number), pick=seen.picks[node]))
        x = emitter.packed(node.args[0], IndexSet(space.number))
        picked = emitter.call(aten.index_select.default, (x, 0, rank), {})
        emitter.provide(node, picked, None)
    elif node in region.entries:
        emitter.pack(node)
    elif node not in emitter.swallowed:
        emitter.copy(node)


def _write_loss(region: Region, emitter: Emitter, node: fx.Node) -> None:
    entries = region.entries[node]
    arguments = bind(node)
    logits = emitter.packed(node.args[0], entries)
    labels = emitter.aligned(node.args[1], _label_layout(region, node), entries)
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    arguments[names[0]], arguments[names[1]] = logits, labels
    target = aten.nll_loss_nd.default if node.target is aten.nll_loss.default else node.target
    args = [
        value if name in names[:2] else emitter.copied(value)
        for name, value in ((name, arguments[name]) for name in names)
    ]
    made = emitter.call(target, tuple(args), {})
    emitter.provide(node, made, entries if is_token(region.layouts.get(node)) else None)


def _label_layout(region: Region, node: fx.Node) -> Layout:
    """The labels' layout with the positions of the logits, which say where the labels stand in the space."""
    grid = positions_of(region.layouts[node.args[0]])[0]  # type: ignore[index]
    labels = region.layouts[node.args[1]]  # type: ignore[index]
    return tuple(tuple(grid if isinstance(atom, Positions) else atom for atom in dim) for dim in labels)


def _tails(
    module: fx.GraphModule, region: Region, number: Mapping[fx.Node, int]
) -> tuple[list[tuple[Tail, list[fx.Node]]], dict[fx.Node, int]]:
    """A small graph for every deferred output, from values that the step computes anyway."""
    tails: list[tuple[Tail, list[fx.Node]]] = []
    tail_of: dict[fx.Node, int] = {}
    for output in region.outputs:
        if output not in region.seen.deferred or output in tail_of or output in region.twins:
            continue
        nodes = _tail_nodes(region, output)
        inside = set(nodes)
        boundary = [output] if not nodes else []
        for node in nodes:
            for source in node.all_input_nodes:
                if source not in inside and source not in boundary and source.op == "call_function":
                    boundary.append(source)
        entries = _tail_entries(region, nodes, boundary)
        emitter = _emitter(region, entries)
        for index, node in enumerate(boundary):
            emitter.provide(node, emitter.input(f"value_{index}"), entries.get(node))
        values = len(boundary)
        for node in nodes:
            if node.op == "placeholder":
                continue
            if node in entries:
                emitter.pack(node)
            else:
                emitter.copy(node)
        graph = emitter.finish([emitter.padded(output)])
        kept = _prune(graph, len(number))
        del values
        tail_of[output] = len(tails)
        tails.append((Tail(fx.GraphModule(module, graph), kept, tuple(emitter.indices), ()), boundary))
    return tails, tail_of


def _tail_entries(region: Region, nodes: list[fx.Node], boundary: list[fx.Node]) -> dict[fx.Node, IndexSet]:
    entries = {node: region.entries[node] for node in boundary if node in region.entries}
    if not region.packs:
        return entries
    for node in nodes:
        if node.op != "call_function" or region.seen.from_batch[node] or admitted_rule(node, region.seen) is None:
            continue
        carrier = node.args[0] if isinstance(node.meta.get("val"), (list, tuple)) else node
        grid = positions_of(region.layouts[carrier])[0]  # type: ignore[index]
        entries[node] = IndexSet(region.spaces[grid.symbol].number, offset=grid.offset, cut=grid.cut)
    return entries


@dataclass
class _Found:
    spaces: tuple[SpaceFacts, ...]
    losses: tuple[LossFacts, ...]
    picks: tuple[PickFacts, ...]
    assumptions: tuple[Assumption, ...]


def _facts(module: fx.GraphModule, region: Region) -> tuple[fx.GraphModule, tuple[int, ...], _Found]:
    """The graph that tells, from a batch alone, what is a token, what has a label, and whether the assumptions hold."""
    emitter = _emitter(region, {})
    wanted = _facts_nodes(region)
    for node in region.slicer.slice(wanted):
        if node.op != "placeholder":
            emitter.copy(node)
    values: list[fx.Node] = []

    def output(node: fx.Node) -> int:
        values.append(node)
        return len(values) - 1

    spaces = []
    for space in region.spaces.values():
        mask = output(emitter.padded(space.source.node)) if space.source is not None else None
        spaces.append(
            SpaceFacts(
                name=space.name,
                mask=mask,
                reading=space.source.reading if space.source is not None else None,
                trimmed_by=space.trimmed_by,
                contiguous=any(m.windowed for _, m in space.attentions),
                prefix=space.source is not None and any(m.tokens is None for _, m in space.attentions),
                max_positions=min(
                    (m.max_positions for _, m in space.attentions if m.max_positions is not None), default=None
                ),
            )
        )
    losses = []
    for loss in region.losses:
        grid = positions_of(region.layouts[loss.args[0]])[0]  # type: ignore[index]
        target = output(emitter.grid(loss.args[1]))  # type: ignore[arg-type]
        losses.append(
            LossFacts(
                region.space(loss.args[0]).number,
                target,
                bind(loss)["ignore_index"],
                grid.offset,
                grid.cut,
                ignores_pads=loss in region.entries and not seeing.by_token(loss, region.demand[loss], region.seen),
            )  # type: ignore[arg-type]
        )
    picks = [_pick_facts(region, emitter, pick, output) for pick in region.picks]
    assumptions = []
    for node, factor in region.zeroing.items():
        if node in region.entries:
            grid = positions_of(region.layouts[node])[0]
            value = emitter.grid(factor)
            if node.target is aten.masked_fill.Scalar:
                value = emitter.call(aten.logical_not.default, (value,), {})
            assumptions.append(
                Assumption("zero at pads", output(value), region.spaces[grid.symbol].number, grid.offset, grid.cut)
            )
    assumed = dict.fromkeys(pair for meaning in region.meanings.values() for pair in meaning.assumed)
    for leaf, domain in assumed:
        assumptions.append(Assumption(domain, output(emitter.padded(leaf))))
    graph = emitter.finish(values)
    kept = _prune(graph, len(emitter.inputs))
    found = _Found(tuple(spaces), tuple(losses), tuple(picks), tuple(assumptions))
    return fx.GraphModule(module, graph), kept, found


def _facts_nodes(region: Region) -> list[fx.Node]:
    nodes = [space.source.node for space in region.spaces.values() if space.source is not None]
    nodes += [loss.args[1] for loss in region.losses]  # type: ignore[misc]
    nodes += [factor for node, factor in region.zeroing.items() if node in region.entries]
    for pick in region.picks:
        if pick.target is aten.index.Tensor:
            nodes += list(pick.args[1])  # type: ignore[arg-type]
    return nodes


def _pick_facts(region: Region, emitter: Emitter, pick: fx.Node, output: Any) -> PickFacts:
    space = region.space(pick.args[0])  # type: ignore[arg-type]
    if pick.target is aten.select.int:
        return PickFacts(space.number, pick.args[2], None)  # type: ignore[arg-type]
    rows, columns = (emitter.padded(index) for index in pick.args[1])  # type: ignore[union-attr]
    count, positions = emitter.sizes(space.number)
    # Negative indices count from the end, as in the padded graph.
    rows, columns = (
        emitter.call(aten.remainder.Scalar, (index, size), {}) for index, size in ((rows, count), (columns, positions))
    )
    flat = emitter.call(aten.add.Tensor, (emitter.call(aten.mul.Scalar, (rows, positions), {}), columns), {})
    return PickFacts(space.number, None, output(flat))


def _buffers(region: Region, number: Mapping[fx.Node, int]) -> tuple[tuple[int, torch.Tensor, int], ...]:
    nodes = dict.fromkeys(node for meaning in region.meanings.values() for node in meaning.buffers)
    found = []
    for node in nodes:
        value = node.meta["input"].value
        found.append((number[node], value, value._version))
    return tuple(found)


def _output_meta(region: Region, node: fx.Node) -> OutputMeta:
    symbols = [region.symbols.rows, *(space.symbol for space in region.spaces.values())]
    shape = [region.symbols.expr(size) for size in node.meta["val"].shape]
    return OutputMeta(node.name, node.meta["val"].dtype, sympy.lambdify(symbols, shape, modules="math"))


def _costs(region: Region) -> tuple[tuple[IndexSet, float], ...]:
    """Multiply-adds of the matrix products, for every entry of the set that they run on."""
    costs: dict[IndexSet, float] = {}
    for node, entries in region.entries.items():
        if isinstance(rule_for(node), Linear):
            weights = [source.meta["val"] for source in node.all_input_nodes if source.op == "placeholder"]
            sizes = [weight.numel() for weight in weights if isinstance(weight, torch.Tensor) and weight.dim() == 2]
            if sizes and isinstance(sizes[0], int):
                key = IndexSet(entries.space, entries.loss)
                costs[key] = costs.get(key, 0.0) + sizes[0]
    return tuple(costs.items())


def _prune(graph: fx.Graph, count: int) -> tuple[int, ...]:
    """Drop the region's inputs that are not read; say which stay."""
    kept = []
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(placeholders[:count]):
        if node.users:
            kept.append(index)
        else:
            graph.erase_node(node)
    return tuple(kept)


def _sites(region: Region) -> list[str]:
    """What was done, in a user's words."""
    sites = []
    packed = [node for node in region.seen.attentions if node in region.entries]
    if packed:
        windows = {(m.window_left, m.window_right) for node, m in region.meanings.items() if node in region.entries}
        kinds = ", ".join(sorted({_window_name(*window) for window in windows}))
        sites.append(f"{len(packed)} attentions over packed rows ({kinds})")
    tokens = sum(entries.loss is None for node, entries in region.entries.items())
    if tokens:
        sites.append(f"{tokens} operators on tokens only")
    for loss in region.losses:
        rows = sum(entries.loss == region.seen.losses[loss] for entries in region.entries.values())
        sites.append(f"{loss.name}: {rows} operators on labelled tokens only")
    for node in region.outputs:
        if isinstance(node, fx.Node) and node in region.seen.deferred:
            sites.append(f"output {node.name} computed when it is used")
    return sites


def _window_name(left: int, right: int) -> str:
    if (left, right) == (-1, -1):
        return "full"
    if (left, right) == (-1, 0):
        return "causal"
    return f"window {left}, {right}"


__all__ = ["Declined", "StripPadding"]
