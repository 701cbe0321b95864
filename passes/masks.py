"""What the mask of an attention means, found by evaluating it on probe batches.

First every attention of a graph is found: the SDPA operator, or matmul - softmax - matmul spelled out. Then the part
of its mask that follows from the batch alone is run on small random batches and compared with the known meanings:
every position, causal, a sliding window, each and-ed with "the key is a token". Probing is robust where matching how
a mask was written is not. What stands beside the mask (a learned bias) is handed on as an additive term.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import sympy
import torch
from torch import fx

from deepytorch.passes.base import Role
from deepytorch.passes.layout import VIEWS, Symbols
from deepytorch.passes.slicing import Slicer

aten = torch.ops.aten

# A score lowered by this much has a weight of exactly zero: exp(-1e4 + difference) underflows for any difference
# under 9,900.
MASKED = -1e4
# Probes are (rows, positions, positions); above this many positions a constant of the mask is left to a run-time check.
MAX_PROBE_POSITIONS = 2048


@dataclass(frozen=True)
class Attention:
    """One attention: `output = softmax(query @ key / ... + terms) @ value`, in padded form.

    `query` is (..., positions_q, head_dim); `key` is (..., positions_k, head_dim) for SDPA and (..., head_dim,
    positions_k) where it is spelled out; their layouts tell. `terms` are what is added to the scaled scores.
    """

    output: fx.Node
    query: fx.Node
    key: fx.Node
    value: fx.Node
    scale: float
    key_is_transposed: bool
    causal: bool = False
    dropout_p: float = 0.0
    softcap: float = 0.0
    terms: tuple[Term, ...] = ()
    inner: tuple[fx.Node, ...] = ()  # the nodes that the packed form replaces, the output among them
    mask_dtype: torch.dtype | None = None


@dataclass(frozen=True)
class Term:
    """Something added to the scores. `kind`: "visible" (true where seen), "hidden" (true where not seen), "added".

    `ndim`: the scores' number of dimensions where it is added: 3 where rows and heads are merged, else 4.
    """

    node: fx.Node
    kind: str
    ndim: int = 4


@dataclass(frozen=True)
class TokenSource:
    """Where a token mask comes from: `node`, read by `reading` ("nonzero", "zero", "not negative")."""

    node: fx.Node
    reading: str

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """The token mask as bool, in `value`'s shape."""
        return READINGS[self.reading](value)


READINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nonzero": lambda value: value != 0,
    "zero": lambda value: value == 0,
    "not negative": lambda value: value >= 0,
}


@dataclass(frozen=True)
class Meaning:
    """What an attention's mask says: key j is seen by query i iff i - left <= j <= i + right (-1: no limit) and, where
    `tokens` is given, j is a token. What a step has to check: batches no longer than `max_positions`; `buffers`
    unchanged; inputs in `assumed` hold 0 or 1 only ("binary"), or 0 and very low numbers ("additive").
    """

    window_left: int = -1
    window_right: int = -1
    tokens: TokenSource | None = None
    bias: tuple[fx.Node, ...] = ()
    max_positions: int | None = None
    buffers: tuple[fx.Node, ...] = ()
    assumed: tuple[tuple[fx.Node, str], ...] = ()

    @property
    def windowed(self) -> bool:
        """Whether a limited window looks at distances, so that tokens must be contiguous."""
        return self.window_left > 0 or self.window_right > 0


# --------------------------------------------------------------------------------------------- finding attentions


def find_attentions(graph: fx.Graph) -> list[Attention]:
    """Every attention of the graph whose inner values nobody else looks at."""
    found = []
    for node in graph.nodes:
        if node.target is aten.scaled_dot_product_attention.default:
            found.append(_fused(node))
        elif node.target in (aten.softmax.int, aten._softmax.default):
            attention = _spelled_out(node)
            if attention is not None:
                found.append(attention)
    return found


def _fused(node: fx.Node) -> Attention:
    arguments = bind(node)
    query, mask = arguments["query"], arguments["attn_mask"]
    terms: tuple[Term, ...] = ()
    if mask is not None:
        is_bool = mask.meta["val"].dtype is torch.bool
        ndim = query.meta["val"].dim()
        terms = (Term(mask, "visible", ndim),) if is_bool else tuple(split_terms(mask, ndim))
    scale = arguments["scale"]
    return Attention(
        output=node,
        query=query,
        key=arguments["key"],
        value=arguments["value"],
        scale=1.0 / math.sqrt(query.meta["val"].shape[-1]) if scale is None else scale,
        key_is_transposed=False,
        causal=bool(arguments["is_causal"]),
        dropout_p=float(arguments["dropout_p"]),
        terms=terms,
        inner=(node,),
    )


def bind(node: fx.Node) -> dict[str, Any]:
    """The arguments of an ATen call by name, defaults filled in."""
    values: dict[str, Any] = {}
    for index, argument in enumerate(node.target._schema.arguments):
        if index < len(node.args):
            values[argument.name] = node.args[index]
        else:
            values[argument.name] = node.kwargs.get(argument.name, argument.default_value)
    return values


_CASTS = frozenset({
    aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.type_as.default, aten._to_copy.default,
    aten.contiguous.default, aten.clone.default,
})  # fmt: skip
_SCALINGS = frozenset({aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar})
_PRODUCTS = frozenset({aten.matmul.default, aten.bmm.default})


def _spelled_out(softmax: fx.Node) -> Attention | None:
    value = softmax.meta.get("val")
    if not isinstance(value, torch.Tensor) or softmax.args[1] not in (-1, value.dim() - 1):
        return None
    up = _scores(softmax.args[0])
    down = _weighted_sum(softmax)
    if up is None or down is None:
        return None
    query, key, scale, softcap, terms, above = up
    dropout_p, output, below = down
    inner = [*above, softmax, *below]
    if not _closed(inner, output):
        return None
    return Attention(
        output=output,
        query=query,
        key=key,
        value=output.args[1],
        scale=scale,
        key_is_transposed=True,
        dropout_p=dropout_p,
        softcap=softcap,
        terms=tuple(terms),
        inner=tuple(inner),
    )


def _closed(inner: list[fx.Node], output: fx.Node) -> bool:
    """Whether only nodes of the pattern read the pattern's inner values."""
    members = set(inner)
    return all(user in members for node in inner if node is not output for user in node.users)


def _scores(node: fx.Node) -> tuple[fx.Node, fx.Node, float, float, list[Term], list[fx.Node]] | None:
    """Walk up from a softmax's input to the product of queries and keys: (query, key, scale, softcap, terms, nodes)."""
    scale, softcap = 1.0, 0.0
    terms: list[Term] = []
    inner: list[fx.Node] = []
    while True:
        inner.append(node)
        target, args, ndim = node.target, node.args, node.meta["val"].dim()
        if target in _PRODUCTS:
            return args[0], args[1], scale, softcap, terms, inner
        if target is aten.baddbmm.default:
            if scale != 1.0 or softcap or node.kwargs.get("beta", 1) != 1:
                return None
            terms.extend(split_terms(args[0], ndim))
            return args[1], args[2], float(node.kwargs.get("alpha", 1)), softcap, terms, inner
        if target in _CASTS or _splits_heads(node):
            node = args[0]
        elif target is aten.add.Tensor and node.kwargs.get("alpha", 1) == 1:
            # A term scaled further down would no longer be what is added to the scaled scores.
            if scale != 1.0 or softcap:
                return None
            side = _towards_product(args)
            if side is None:
                return None
            terms.extend(split_terms(args[1 - side], ndim))
            node = args[side]
        elif target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor) and _is_masking(args[2]):
            if scale != 1.0 or softcap:
                return None
            terms.append(Term(args[1], "hidden", ndim))
            node = args[0]
        elif target in (aten.where.ScalarOther, aten.where.self) and _is_masking(args[2]):
            if isinstance(args[2], fx.Node) and node.args[1] in args[2].all_input_nodes:
                inner.append(args[2])  # full_like(scores, low): looks at their shape
            if scale != 1.0 or softcap:
                return None
            terms.append(Term(args[0], "visible", ndim))
            node = args[1]
        elif target in _SCALINGS and (number := _number(args[1])) is not None:
            capped = _softcap(node)
            if capped is not None and not softcap and scale == 1.0:
                softcap, node, between = capped
                inner.extend(between)
                continue
            factor = number if target in (aten.mul.Tensor, aten.mul.Scalar) else 1.0 / number
            scale *= factor
            node = args[0]
        else:
            return None
        if not isinstance(node, fx.Node) or (softcap and scale != 1.0 and node.target is aten.tanh.default):
            return None


def _softcap(node: fx.Node) -> tuple[float, fx.Node, list[fx.Node]] | None:
    """`cap * tanh(scores / cap)`: the cap, the scores and the nodes between."""
    if node.target not in (aten.mul.Tensor, aten.mul.Scalar) or not isinstance(node.args[0], fx.Node):
        return None
    tanh, cap = node.args[0], _number(node.args[1])
    if tanh.target is not aten.tanh.default or cap is None:
        return None
    ratio = tanh.args[0]
    if ratio.target not in (aten.div.Tensor, aten.div.Scalar) or _number(ratio.args[1]) != cap:
        return None
    return float(cap), ratio.args[0], [tanh, ratio]


def _towards_product(args: tuple[Any, ...]) -> int | None:
    """Which of two operands comes from a product of two activations."""
    for side in (0, 1):
        node = args[side]
        while isinstance(node, fx.Node):
            if node.target in _PRODUCTS or node.target is aten.baddbmm.default:
                return side
            if node.target not in _CHAIN and not _splits_heads(node):
                break
            node = node.args[1] if node.target in (aten.where.ScalarOther, aten.where.self) else node.args[0]
    return None


_CHAIN = _CASTS | {
    aten.add.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.masked_fill.Scalar,
    aten.masked_fill.Tensor, aten.where.ScalarOther, aten.where.self, aten.tanh.default,
}  # fmt: skip


def _weighted_sum(softmax: fx.Node) -> tuple[float, fx.Node, list[fx.Node]] | None:
    """Walk down from a softmax through casts and dropout to the product with the values."""
    node, dropout_p = softmax, 0.0
    inner: list[fx.Node] = []
    while True:
        users = list(node.users)
        if len(users) != 1:
            return None
        user = users[0]
        if user.target in _PRODUCTS:
            if user.args[0] is not node or not isinstance(user.args[1], fx.Node):
                return None
            return dropout_p, user, [*inner, user]
        if user.target is aten.dropout.default and dropout_p == 0.0:
            dropout_p = float(user.args[1]) if user.args[2] else 0.0
        elif user.target not in _CASTS and not _splits_heads(user):
            return None
        inner.append(user)
        node = user


def split_terms(node: fx.Node, ndim: int) -> Iterator[Term]:
    """Take an additive mask apart: what is added, and where it is replaced by a very low number."""
    target, args = node.target, node.args
    if target is aten.add.Tensor and node.kwargs.get("alpha", 1) == 1 and all(isinstance(a, fx.Node) for a in args):
        yield from split_terms(args[0], ndim)
        yield from split_terms(args[1], ndim)
    elif target in (aten.contiguous.default, aten.clone.default, aten.expand.default) and _same_rank(node):
        yield from split_terms(args[0], ndim)
    elif target in (aten.where.ScalarOther, aten.where.self) and _is_masking(args[2]) and _is_tensor(args[1]):
        yield Term(args[0], "visible", ndim)
        yield from split_terms(args[1], ndim)
    elif target in (aten.masked_fill.Scalar, aten.masked_fill.Tensor) and _is_masking(args[2]):
        yield from split_terms(args[0], ndim)
        yield Term(args[1], "hidden", ndim)
    else:
        yield Term(node, "added", ndim)


def _splits_heads(node: fx.Node) -> bool:
    """A view that splits or merges rows and heads and leaves every score where it is."""
    if node.target not in VIEWS or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta["val"].shape, node.meta["val"].shape
    return (
        len(before) in (3, 4) and len(after) in (3, 4) and [str(s) for s in before[-2:]] == [str(s) for s in after[-2:]]
    )


def _is_tensor(node: Any) -> bool:
    return isinstance(node, fx.Node) and isinstance(node.meta.get("val"), torch.Tensor) and node.meta["val"].dim() > 0


def _same_rank(node: fx.Node) -> bool:
    return node.meta["val"].dim() == node.args[0].meta["val"].dim()


_FILLS = {aten.full_like.default: 1, aten.full.default: 1, aten.new_full.default: 2}


def _is_masking(value: Any) -> bool:
    if isinstance(value, fx.Node) and value.target in _FILLS:
        value = value.args[_FILLS[value.target]]
    number = _number(value)
    return number is not None and number <= MASKED


def _number(value: Any) -> float | None:
    """A Python number, or the one in a 0-d constant."""
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if isinstance(value, fx.Node):
        if value.target in (aten.lift_fresh_copy.default, aten.detach_.default, aten.to.dtype, aten._to_copy.default):
            return _number(value.args[0])
        if value.target in (aten.full.default,) and value.args[0] == []:
            return _number(value.args[1])
        if value.target is aten.scalar_tensor.default:
            return _number(value.args[0])
        if value.op == "get_attr":
            constant = getattr(value.graph.owning_module, value.target, None)
            if isinstance(constant, torch.Tensor) and constant.dim() == 0:
                return float(constant.item())
    return None


# --------------------------------------------------------------------------------------------- probing a mask


@dataclass
class Probe:
    """One small batch on which masks are evaluated: sizes by symbol, values by placeholder."""

    sizes: dict[sympy.Symbol, int]
    domain: str
    generator: torch.Generator
    constants: list[int]
    values: dict[fx.Node, Any] = field(default_factory=dict)


class Undecided(Exception):
    """The mask's meaning was not found; the message says why."""


class Prober:
    """Evaluates batch-only parts of one graph on probe batches."""

    def __init__(self, graph: fx.Graph, symbols: Symbols, slicer: Slicer) -> None:
        self._graph, self._symbols, self._slicer = graph, symbols, slicer

    def meaning(self, attention: Attention, rows: sympy.Expr, queries: sympy.Symbol, keys: sympy.Symbol) -> Meaning:
        """What the attention's mask says, or `Undecided`."""
        visible, bias = [], []
        for term in attention.terms:
            if term.kind != "added":
                if not self._slicer.from_batch(term.node):
                    raise Undecided(f"the mask {term.node.name} depends on parameters")
                visible.append(term)
            elif self._slicer.from_batch(term.node):
                visible.append(term)
            else:
                bias.append(term.node)
        if bias and any(term.ndim == 3 and term.node in bias for term in attention.terms):
            raise Undecided("a bias whose rows and heads are merged")
        window_right = 0 if attention.causal else -1
        if attention.causal and queries != keys:
            raise Undecided("causal attention between two token spaces")
        if not visible:
            return Meaning(-1, window_right, None, tuple(bias))
        meaning = self._probe_terms(visible, queries, keys)
        if attention.causal:
            meaning = replace(meaning, window_right=0)
        return replace(meaning, bias=(*bias, *meaning.bias))

    def _probe_terms(self, terms: list[Term], queries: sympy.Symbol, keys: sympy.Symbol) -> Meaning:
        nodes = [term.node for term in terms]
        subgraph = self._slicer.slice(nodes)
        constants = sorted({*_whole_numbers(subgraph), *self._small_tables(subgraph)})
        lengths, max_positions = _probe_lengths(subgraph, self._symbols)
        candidates = self._candidates(subgraph, keys)
        buffers = tuple(node for node in subgraph if _role(node) is Role.BUFFER)
        batch = tuple(node for node in subgraph if _role(node) is Role.BATCH and _is_read(node, subgraph))
        floats = any(node.meta["val"].is_floating_point() for node in batch)
        reason = ""
        with_bias: Meaning | None = None
        for domain in ("binary", "additive") if floats else ("any", "binary"):
            try:
                meaning = self._match(terms, subgraph, candidates, lengths, constants, domain, queries, keys)
            except Undecided as undecided:
                reason = reason or str(undecided)
                continue
            meaning = replace(
                meaning,
                max_positions=max_positions,
                buffers=buffers,
                assumed=() if domain == "any" else tuple((node, domain) for node in batch),
            )
            if not meaning.bias:
                return meaning
            if any(term.ndim == 3 and term.kind == "added" for term in terms):
                raise Undecided("a bias whose rows and heads are merged")
            with_bias = with_bias or meaning
        if with_bias is not None:
            return with_bias
        raise Undecided(reason)

    def _candidates(self, subgraph: list[fx.Node], keys: sympy.Symbol) -> list[fx.Node]:
        """Values with one entry a row and key: what a token mask may be read from, nearest to the inputs first."""
        found = []
        for node in subgraph:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor):
                sizes = [self._symbols.expr(size) for size in value.shape]
                if [size for size in sizes if size != 1] == [self._symbols.rows, keys]:
                    found.append(node)
        return sorted(found, key=lambda node: (node.op != "placeholder", self._slicer.order[node]))

    def _match(
        self,
        terms: list[Term],
        subgraph: list[fx.Node],
        candidates: list[fx.Node],
        lengths: list[int],
        constants: list[int],
        domain: str,
        queries: sympy.Symbol,
        keys: sympy.Symbol,
    ) -> Meaning:
        runs = []
        for length in lengths:
            for seed in range(3 if length < 64 else 1):
                sizes = {self._symbols.rows: 3, queries: length, keys: length if keys == queries else length + 2}
                probe = Probe(sizes, domain, torch.Generator().manual_seed(1000 * length + seed), constants)
                values = self.evaluate(subgraph, probe)
                mask, bias = _combine(terms, values, (sizes[self._symbols.rows], sizes[queries], sizes[keys]))
                runs.append((mask, values, bias))
        has_bias = any(bias for _, _, bias in runs)
        added = tuple(term.node for term in terms if term.kind == "added") if has_bias else ()
        readings: list[Any] = [(node, reading) for node in candidates for reading in READINGS]
        if not any(_role(node) is Role.BATCH and _is_read(node, subgraph) for node in subgraph):
            readings = [None]  # nothing of the batch is looked at, so no key can be told from another
        for choice in readings:
            window = _window(runs, choice, queries == keys, max(lengths))
            if window is not None:
                source = None if choice is None else TokenSource(*choice)
                return Meaning(window[0], window[1], source, added)
        raise Undecided(
            "the mask matches no known meaning (full, causal or sliding window, and-ed with 'the key is a token')"
        )

    def _small_tables(self, subgraph: list[fx.Node]) -> set[int]:
        """Whole numbers in constant tensors and small buffers, such as a pad id."""
        found: set[int] = set()
        for node in subgraph:
            value = None
            if node.op == "get_attr":
                value = getattr(self._graph.owning_module, str(node.target))
            elif _role(node) is Role.BUFFER:
                value = node.meta["input"].value
            if isinstance(value, torch.Tensor) and value.numel() <= 64 and not value.is_floating_point():
                found.update(int(number) for number in value.flatten().tolist())
        return found

    def probe_together(self, nodes: list[fx.Node]) -> Iterator[list[torch.Tensor]]:
        """The values of several batch-only nodes, probe by probe."""
        subgraph = self._slicer.slice(nodes)
        constants = sorted({*_whole_numbers(subgraph), *self._small_tables(subgraph)})
        for length in _probe_lengths(subgraph, self._symbols)[0]:
            for seed in range(3 if length < 64 else 1):
                sizes = {self._symbols.rows: 3, **dict.fromkeys(self._symbols.positions, length)}
                for domain in ("any", "binary"):
                    probe = Probe(sizes, domain, torch.Generator().manual_seed(1000 * length + seed), constants)
                    values = self.evaluate(subgraph, probe)
                    yield [values[node] for node in nodes]

    def evaluate(self, subgraph: list[fx.Node], probe: Probe) -> dict[fx.Node, Any]:
        """Run batch-only nodes on real CPU tensors."""
        values: dict[fx.Node, Any] = {}
        for node in subgraph:
            if node.op == "placeholder":
                values[node] = self._input(node, probe)
            elif node.op == "get_attr":
                values[node] = getattr(self._graph.owning_module, str(node.target))
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                kwargs = {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items()}
                args = tuple(torch.device("cpu") if isinstance(value, torch.device) else value for value in args)
                try:
                    values[node] = node.target(*args, **kwargs)
                except Exception as error:
                    raise Undecided(f"the mask's {node.name} cannot be evaluated on a probe: {error}") from error
        return values

    def _input(self, node: fx.Node, probe: Probe) -> Any:
        graph_input, fake = node.meta["input"], node.meta["val"]
        if graph_input.role is Role.BUFFER:
            return graph_input.value.detach().cpu()
        if not isinstance(fake, torch.Tensor):
            return self._size(fake, probe)
        shape = [self._size(size, probe) for size in fake.shape]
        return _random(shape, fake.dtype, probe)

    def _size(self, size: Any, probe: Probe) -> int:
        if isinstance(size, int):
            return size
        expr = self._symbols.expr(size)
        known = expr.subs(probe.sizes)
        return int(known) if known.is_Integer else 6


def _is_read(node: fx.Node, subgraph: list[fx.Node]) -> bool:
    """Whether a mask looks at the input's values, not only at its sizes."""
    members = set(subgraph)
    return any(user in members and user.target is not aten.sym_size.int for user in node.users)


def _role(node: fx.Node) -> Role | None:
    return node.meta["input"].role if node.op == "placeholder" else None


def _random(shape: list[int], dtype: torch.dtype, probe: Probe) -> torch.Tensor:
    """Values that a batch may hold: token masks of every kind among them."""
    choose = torch.randint(0, 2, shape, generator=probe.generator).bool()
    if len(shape) >= 2:  # one row starts with holes, one ends with them, so that left and right padding both occur
        choose[0, ..., : shape[-1] // 2] = True
        choose[-1, ..., shape[-1] // 2 :] = True
        choose[..., shape[-1] // 3] = True  # no row without a token
    if dtype is torch.bool:
        return choose
    if dtype.is_floating_point:
        if probe.domain == "additive":
            return torch.zeros(shape, dtype=dtype).masked_fill(~choose, -math.inf)
        return choose.to(dtype)
    if probe.domain == "binary":
        return choose.to(dtype)
    pool = {0, 1, 2, 7, *probe.constants, *(c + 1 for c in probe.constants), *(c - 1 for c in probe.constants)}
    limits = torch.iinfo(dtype)
    chosen = torch.tensor(
        [c for c in sorted(pool) if max(limits.min, -(2**31)) <= c <= min(limits.max, 2**31)], dtype=dtype
    )
    other = chosen[torch.randint(0, len(chosen), shape, generator=probe.generator)]
    zero_or_one = choose.to(dtype)
    mixed = torch.rand(shape, generator=probe.generator) < 0.4
    return torch.where(mixed, other, zero_or_one)


def _whole_numbers(subgraph: list[fx.Node]) -> list[int]:
    """The whole numbers that a mask is written with, one for each use: windows, pad ids.

    Open ends of slices and very low scores are none of them.
    """
    found = []
    for node in subgraph:
        if node.op != "call_function" or node.target is operator.getitem:
            continue
        flat, _ = torch.utils._pytree.tree_flatten((node.args, node.kwargs))
        for value in flat:
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if is_number and value == int(value) and MASKED < value < 2**31:
                found.append(int(value))
    return found


def _probe_lengths(subgraph: list[fx.Node], symbols: Symbols) -> tuple[list[int], int | None]:
    """How long the probes are, and up to which length they prove anything (None: any).

    Where positions are only added, subtracted and compared, a mask can change its form at sums of its whole numbers and
    nowhere else, so probes that reach past their total settle it. Where a mask does anything else with positions, or
    reads a buffer, only lengths up to the longest probe are proved.
    """
    positional, only_linear = _positional(subgraph)
    touched = [node for node in subgraph if node in positional or positional.intersection(node.all_input_nodes)]
    numbers = [abs(number) for number in _whole_numbers(touched)]
    total = sum(number for number in numbers if number > 3)
    lengths = {5, 9, *(number + 4 for number in numbers if number + 4 <= MAX_PROBE_POSITIONS)}
    tables = [node for node in subgraph if _role(node) is Role.BUFFER and node.meta["val"].numel() > 1]
    if not tables and only_linear and total + 4 <= MAX_PROBE_POSITIONS:
        return sorted({*lengths, total + 4}), None
    longest = MAX_PROBE_POSITIONS
    for table in tables:
        longest = min(longest, max(size for size in table.meta["val"].shape if isinstance(size, int)))
    return sorted({length for length in lengths if length < longest} | {longest}), longest


_POSITION_SOURCES = frozenset({
    aten.arange.default, aten.arange.start, aten.arange.start_step, aten.cumsum.default, aten.sym_size.int,
})  # fmt: skip
_COMPARISONS = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "isin"})
_LINEAR = frozenset({
    "add", "sub", "rsub", "neg", "abs", "minimum", "maximum", "min", "max", "clamp", "where", "masked_fill", "to",
    "_to_copy", "clone", "contiguous", "detach", "alias", "view", "reshape", "expand", "unsqueeze", "squeeze",
    "permute", "transpose", "t", "slice", "select", "cat", "stack", "index", "arange", "ones", "zeros", "full",
    "new_ones", "new_zeros", "new_full", "full_like", "ones_like", "zeros_like", "tril", "triu", "sym_size", "pad",
    "constant_pad_nd", "expand_as", "type_as", "lift_fresh_copy", "empty", "new_empty", "flatten", "gather",
})  # fmt: skip


def _positional(subgraph: list[fx.Node]) -> tuple[set[fx.Node], bool]:
    """The values that hold positions, and whether nothing but sums, differences and comparisons with whole numbers is
    done to them.
    """
    positional: set[fx.Node] = set()
    only_linear = True
    for node in subgraph:
        name = _operator_name(node)
        if node.target in _POSITION_SOURCES:
            positional.add(node)
            only_linear = only_linear and node.target is not aten.arange.start_step
            continue
        if not positional.intersection(node.all_input_nodes):
            continue
        flat, _ = torch.utils._pytree.tree_flatten((node.args, node.kwargs))
        fraction = any(isinstance(value, float) and math.isfinite(value) and value != int(value) for value in flat)
        only_linear = only_linear and not fraction and (name in _COMPARISONS or name in _LINEAR)
        if name not in _COMPARISONS:
            positional.add(node)
    return positional, only_linear


def _operator_name(node: fx.Node) -> str:
    if isinstance(node.target, torch._ops.OpOverload):
        return node.target._schema.name.split("::")[-1]
    return getattr(node.target, "__name__", str(node.target))


def _combine(terms: list[Term], values: dict[fx.Node, Any], sizes: tuple[int, int, int]) -> tuple[torch.Tensor, bool]:
    """All terms as one bool mask (rows, queries, keys), and whether an added term says more than seen or not seen."""
    rows, queries, keys = sizes
    visible = torch.ones(rows, 1, queries, keys, dtype=torch.bool)
    says_more = False
    for term in terms:
        value = values[term.node]
        if term.kind == "visible":
            seen = value.bool()
        elif term.kind == "hidden":
            seen = ~value.bool()
        else:
            if torch.isnan(value).any():
                raise Undecided("the mask holds NaN on a probe")
            seen = value > MASKED
            says_more = says_more or bool((value[seen] != 0).any())
        if (
            term.ndim == 3 and seen.dim() == 3 and seen.shape[0] != 1
        ):  # rows and heads merged, as nn.MultiheadAttention has them
            if seen.shape[0] % rows:
                raise Undecided(f"the mask {term.node.name} does not have a row's dimension first")
            seen = seen.reshape(rows, -1, *seen.shape[1:])
        while seen.dim() < 4:
            seen = seen.unsqueeze(0)
        if seen.dim() > 4 or seen.shape[0] not in (1, rows):
            raise Undecided(f"the mask {term.node.name} has the sizes {tuple(value.shape)} on a probe of {sizes}")
        visible = visible & seen
    if not (visible == visible[:, :1]).all():
        raise Undecided("the mask differs between heads")
    return visible[:, 0], says_more


def _offsets(offset: torch.Tensor, chosen: torch.Tensor) -> list[int]:
    """The distinct key - query offsets (queries, keys) of the chosen pairs (rows, queries, keys)."""
    return offset[chosen.any(0)].unique().tolist()


def _window(
    runs: list[Any], choice: tuple[fx.Node, str] | None, same_space: bool, longest: int
) -> tuple[int, int] | None:
    """The window (left, right) that explains every run with this choice of token mask, or None."""
    seen: set[int] = set()
    unseen: set[int] = set()
    told_apart = False
    for mask, values, _ in runs:
        rows, queries, keys = mask.shape
        if choice is None:
            tokens = torch.ones(rows, keys, dtype=torch.bool)
        else:
            value = values[choice[0]]
            tokens = READINGS[choice[1]](value).reshape(rows, keys)
            told_apart = told_apart or (bool(tokens.any()) and not bool(tokens.all()))
        looking = tokens if same_space else torch.ones(rows, queries, dtype=torch.bool)
        if (mask & looking[:, :, None] & ~tokens[:, None, :]).any():
            return None
        pairs = looking[:, :, None] & tokens[:, None, :]
        offset = torch.arange(keys)[None, :] - torch.arange(queries)[:, None]
        seen.update(_offsets(offset, pairs & mask))
        unseen.update(_offsets(offset, pairs & ~mask))
    if seen & unseen or not seen or (choice is not None and not told_apart):
        return None
    if not same_space:
        return (-1, -1) if not unseen else None
    if 0 not in seen:
        return None
    left, right = -min(seen), max(seen)
    if any(-left <= offset <= right for offset in unseen):
        return None
    beyond_left = any(offset < -left for offset in unseen)
    beyond_right = any(offset > right for offset in unseen)
    return (left if beyond_left else -1, right if beyond_right else -1)
