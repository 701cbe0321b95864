"""Recognition of the meaning of an attention's mask, by evaluating the mask on probe batches.

The part of a mask that follows from the batch alone is run on small random batches and compared with the known
meanings: every position, causal, a sliding window, each combined with "the key is a token". Probing does not depend on
how a mask was written, as pattern matching would. Terms beside the mask, such as a learned bias, are handed on as
additive terms.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import sympy
import torch
from torch import fx

from deepytorch.passes.base import Role
from deepytorch.passes.slicing import Slicer
from deepytorch.passes.unpad.attentions import MASKED, Attention, Term
from deepytorch.passes.unpad.empty_queries import infinite_scores, need_first_token
from deepytorch.passes.unpad.layout import Symbols
from deepytorch.passes.unpad.mask_checks import MaskCheck, is_settled, scores_of
from deepytorch.passes.unpad.probes import Probe, probe_lengths, random_values, role_of, whole_numbers

aten = torch.ops.aten


@dataclass(frozen=True)
class TokenSource:
    """The origin of a token mask: the value `node`, read by `reading` ("nonzero", "zero", "not negative")."""

    node: fx.Node
    reading: str

    def read(self, value: torch.Tensor) -> torch.Tensor:
        """Return the token mask as bool, in `value`'s shape."""
        return READINGS[self.reading](value)


READINGS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "nonzero": lambda value: value != 0,
    "zero": lambda value: value == 0,
    "not negative": lambda value: value >= 0,
}


@dataclass(frozen=True)
class Meaning:
    """The meaning of an attention's mask.

    Query i sees key j iff i - left <= j <= i + right (-1: no limit) and, if `tokens` is given, j is a token. Every step
    has to check: batches are no longer than `max_positions`; `buffers` are unchanged; each input in `assumed` holds
    only 0 or 1 ("binary"), or only 0 and very low numbers ("additive"). With `begins`, also that each row begins with a
    token: pads before it would see no key, and the model computes NaN there. With `check`, also that the mask means
    that for this batch, since probes do not settle it.
    """

    window_left: int = -1
    window_right: int = -1
    tokens: TokenSource | None = None
    bias: tuple[fx.Node, ...] = ()
    max_positions: int | None = None
    buffers: tuple[fx.Node, ...] = ()
    assumed: tuple[tuple[fx.Node, str], ...] = ()
    begins: bool = False
    check: MaskCheck | None = None

    @property
    def windowed(self) -> bool:
        """Return whether a limited window measures distances, so that tokens must be contiguous."""
        return self.window_left > 0 or self.window_right > 0


class Undecided(Exception):
    """The meaning of a mask was not found; the message says why."""


@dataclass(frozen=True)
class _Part:
    """A part of a graph that computes batch-only values, and the probes that tell what it computes.

    Attributes:
        nodes: in the graph's order.
        read: the inputs whose values, not only their sizes, it reads.
        lengths: of the probes.
        max_positions: the length up to which they prove a meaning; None for any.
        constants: whole numbers that the batch may hold.
    """

    nodes: list[fx.Node]
    read: frozenset[fx.Node]
    lengths: list[int]
    max_positions: int | None
    constants: list[int]


class Prober:
    """Evaluates batch-only parts of one graph on probe batches."""

    def __init__(self, graph: fx.Graph, symbols: Symbols, slicer: Slicer) -> None:
        self._graph, self._symbols, self._slicer = graph, symbols, slicer

    def meaning(self, attention: Attention, queries: sympy.Symbol, keys: sympy.Symbol) -> Meaning:
        """Return the meaning of the attention's mask.

        Raises:
            Undecided: the meaning was not found.
        """
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
        window_right = 0 if attention.causal else -1
        if attention.causal and queries != keys:
            raise Undecided("causal attention between two token spaces")
        if not visible:
            return Meaning(-1, window_right, None, tuple(bias))
        meaning = self._probe_terms(visible, queries, keys, attention.empty_is_nan)
        if attention.causal:
            meaning = replace(meaning, window_right=0)
        return replace(meaning, bias=(*bias, *meaning.bias))

    def _probe_terms(self, terms: list[Term], queries: sympy.Symbol, keys: sympy.Symbol, empty_is_nan: bool) -> Meaning:
        part = self._part([term.node for term in terms])
        buffers = tuple(node for node in part.nodes if role_of(node) is Role.BUFFER)
        batch = tuple(node for node in part.nodes if node in part.read and role_of(node) is Role.BATCH)
        floats = any(node.meta["val"].is_floating_point() for node in batch)
        reason = ""
        with_bias: Meaning | None = None
        for domain in ("binary", "additive") if floats else ("any", "binary"):
            try:
                meaning = self._match(terms, part, domain, (queries, keys), empty_is_nan)
            except Undecided as undecided:
                reason = reason or str(undecided)
                continue
            meaning = replace(
                meaning,
                max_positions=part.max_positions,
                buffers=buffers,
                assumed=() if domain == "any" else tuple((node, domain) for node in batch),
            )
            if not meaning.bias:
                return meaning
            with_bias = with_bias or meaning
        if with_bias is not None:
            return with_bias
        raise Undecided(reason)

    def _part(self, outputs: list[fx.Node]) -> _Part:
        nodes = self._slicer.slice(outputs)
        read = frozenset(self._slicer.inputs_read(outputs))
        return _Part(nodes, read, *probe_lengths(nodes, self._symbols), self._telling_numbers(nodes))

    def _candidates(self, part: _Part, keys: sympy.Symbol) -> list[fx.Node]:
        """Return the values with one entry per row and key that a token mask may be read from.

        The value nearest to the mask comes first: it is what the mask really depends on, however it was computed.
        """
        found = []
        for node in part.nodes:
            value = node.meta.get("val")
            if isinstance(value, torch.Tensor) and (node.op != "placeholder" or node in part.read):
                sizes = [self._symbols.expr(size) for size in value.shape]
                if [size for size in sizes if size != 1] == [self._symbols.rows, keys]:
                    found.append(node)
        return found[::-1]

    def _match(
        self, terms: list[Term], part: _Part, domain: str, spaces: tuple[sympy.Symbol, sympy.Symbol], empty_is_nan: bool
    ) -> Meaning:
        queries, keys = spaces
        more_keys = 0 if keys == queries else 2
        runs, infinite = [], []
        for probe, values in self._runs(part, lambda length: {queries: length, keys: length + more_keys}, (domain,)):
            sizes = probe.sizes
            mask, bias = _combine(terms, values, (sizes[self._symbols.rows], sizes[queries], sizes[keys]))
            runs.append((mask, values, bias))
            if empty_is_nan and queries == keys:
                infinite.append(
                    infinite_scores(terms, values, (sizes[self._symbols.rows], sizes[queries], sizes[keys]))
                )
        candidates = self._candidates(part, keys)
        has_bias = any(bias for _, _, bias in runs)
        added = tuple(term.node for term in terms if term.kind == "added") if has_bias else ()
        readings: list[Any] = [(node, reading) for node in candidates for reading in READINGS]
        if not any(role_of(node) is Role.BATCH for node in part.read):
            readings = [None]  # the mask does not depend on the batch, so it treats all keys alike
        for choice in readings:
            window = _window(runs, choice, queries == keys)
            if window is not None:
                source = None if choice is None else self._before_moves(choice, candidates, [run[1] for run in runs])
                begins = self._begins(runs, infinite, choice, window)
                check = None
                if choice is not None and not is_settled(terms, choice[0], domain, self._slicer):
                    check = self._check(terms, choice, window, spaces)
                return Meaning(window[0], window[1], source, added, begins=begins, check=check)
        raise Undecided(
            "the mask matches no known meaning (full, causal or sliding window, and-ed with 'the key is a token')"
        )

    def _check(
        self,
        terms: list[Term],
        choice: tuple[fx.Node, str],
        window: tuple[int, int],
        spaces: tuple[sympy.Symbol, sympy.Symbol],
    ) -> MaskCheck:
        node, reading = choice
        queries, keys = spaces
        sizes = [self._symbols.expr(size) for size in node.meta["val"].shape]
        dims = sizes.index(self._symbols.rows), sizes.index(keys)
        return MaskCheck(tuple(terms), node, dims, reading, window, queries == keys)

    def _begins(
        self, runs: list[Any], infinite: list[torch.Tensor], choice: tuple[fx.Node, str] | None, window: tuple[int, int]
    ) -> bool:
        """Return whether each row has to begin with a token, so that no query sees no key."""
        if choice is None or not infinite:
            return False
        node, reading = choice
        tokens = [
            READINGS[reading](run[1][node]).reshape(each.shape[0], -1) for run, each in zip(runs, infinite, strict=True)
        ]
        begins = need_first_token(infinite, tokens, window)
        if begins is None:
            raise Undecided("pads see no key, and become NaN")
        return begins

    def _before_moves(
        self, choice: tuple[fx.Node, str], candidates: list[fx.Node], runs: list[dict[fx.Node, Any]]
    ) -> TokenSource:
        """Return the same token mask before operators that only move values.

        Operators of this kind are casts to bool, views, and indexing with every row and position in order. Moving
        ignores what the values are, so results that are equal on random values are equal on all values.
        """
        node, reading = choice
        while _moves(node, reading):
            source: fx.Node = node.args[0]  # type: ignore[assignment]
            others = [other for other in node.all_input_nodes if other is not source]
            if source not in candidates or self._slicer.inputs_read(others):
                break
            read = READINGS[reading]
            if not all(torch.equal(read(run[source]).flatten(), read(run[node]).flatten()) for run in runs):
                break
            node = source
        return TokenSource(node, reading)

    def _telling_numbers(self, subgraph: list[fx.Node]) -> list[int]:
        """Return whole numbers that a batch may hold and that a mask may distinguish.

        Such numbers are those that the mask is written with, for example a pad id, and their neighbours; the contents
        of small tables; and places in a table, in case ids are looked up there.
        """
        exact, places = set(whole_numbers(subgraph)), set[int]()
        for table in self._tables(subgraph):
            if not table.is_floating_point():
                numbers = table.flatten().tolist()
                exact.update(int(number) for number in numbers[:: max(1, len(numbers) // 64)])
            if table.dim() > 0:
                places.update(_places(table))
        return sorted({*exact, *(number + 1 for number in exact), *(number - 1 for number in exact), *places})

    def _tables(self, subgraph: list[fx.Node]) -> Iterator[torch.Tensor]:
        """Yield the constants and buffers that are read."""
        for node in subgraph:
            value = None
            if node.op == "get_attr":
                value = getattr(self._graph.owning_module, str(node.target))
            elif role_of(node) is Role.BUFFER:
                value = node.meta["input"].value
            if isinstance(value, torch.Tensor):
                yield value

    def probe_together(self, nodes: list[fx.Node]) -> Iterator[list[torch.Tensor]]:
        """Yield the values of several batch-only nodes, probe by probe."""
        part, positions = self._part(nodes), self._symbols.positions
        for _, values in self._runs(part, lambda length: dict.fromkeys(positions, length), ("any", "binary")):
            yield [values[node] for node in nodes]

    def _runs(
        self, part: _Part, positions: Callable[[int], dict[sympy.Symbol, int]], domains: Sequence[str]
    ) -> Iterator[tuple[Probe, dict[fx.Node, Any]]]:
        """Yield each probe with the values of all nodes.

        positions: the number of positions in each space, for a probe of this length.
        """
        for length in part.lengths:
            for seed in range(3 if length < 64 else 1):
                for domain in domains:
                    sizes = {self._symbols.rows: 3, **positions(length)}
                    generator = torch.Generator().manual_seed(1000 * length + seed)
                    probe = Probe(sizes, domain, generator, part.constants)
                    yield probe, self._evaluate(part, probe)

    def _evaluate(self, part: _Part, probe: Probe) -> dict[fx.Node, Any]:
        """Run batch-only nodes on real CPU tensors. Inputs whose values are not read get only sizes."""
        values: dict[fx.Node, Any] = {}
        for node in part.nodes:
            if node.op == "placeholder":
                values[node] = self._input(node, probe, node in part.read)
            elif node.op == "get_attr":
                value = getattr(self._graph.owning_module, str(node.target))
                values[node] = value.clone() if self._slicer.is_written(node) else value
            elif node.target is aten.sym_size.int:
                values[node] = self._size(node.meta["val"], probe)
            else:
                args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
                kwargs = {name: torch.device("cpu") if name == "device" else value for name, value in kwargs.items()}
                args = tuple(torch.device("cpu") if isinstance(value, torch.device) else value for value in args)
                try:
                    values[node] = node.target(*args, **kwargs)
                except Exception as error:
                    raise Undecided(f"the mask's {node.name} cannot be evaluated on a probe: {error}") from error
        return values

    def _input(self, node: fx.Node, probe: Probe, read: bool) -> Any:
        graph_input, fake = node.meta["input"], node.meta["val"]
        if graph_input.role is Role.BUFFER:
            if self._slicer.is_written(node):
                raise Undecided(f"the mask reads {graph_input.name}, which the model writes to")
            return graph_input.value.detach().cpu()
        if not isinstance(fake, torch.Tensor):
            return self._size(fake, probe)
        if not read:  # only its sizes are used, and each is computed by itself
            return None
        return random_values([self._size(size, probe) for size in fake.shape], fake.dtype, probe)

    def _size(self, size: Any, probe: Probe) -> int:
        if isinstance(size, int):
            return size
        known = self._symbols.expr(size).subs(probe.sizes)
        if not known.is_Integer:
            raise Undecided(f"the mask depends on {known}, which is no size of its rows, queries or keys")
        return int(known)


_MOVES = frozenset({
    aten.clone.default, aten.contiguous.default, aten.alias.default, aten.detach.default, aten.view.default,
    aten.reshape.default, aten.unsqueeze.default, aten.squeeze.dim, aten.expand.default, aten.slice.Tensor,
    aten.index.Tensor,
})  # fmt: skip
_TO_DTYPE = frozenset({aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten._to_copy.default})


def _moves(node: fx.Node, reading: str) -> bool:
    """Return whether a node passes on the values of its first argument, as far as this reading of the values goes."""
    if node.op != "call_function" or not isinstance(node.args[0], fx.Node):
        return False
    before, after = node.args[0].meta["val"].dtype, node.meta["val"].dtype
    if node.target in _TO_DTYPE and before != after:
        return before is torch.bool or (after is torch.bool and reading in ("nonzero", "zero"))
    return node.target in _MOVES or node.target in _TO_DTYPE


def _places(table: torch.Tensor) -> list[int]:
    """Return indices into the first dimension of size above 1.

    Some are for every value that the table distinguishes, and some are spread over the whole table.
    """
    table = table.detach().cpu().squeeze()
    if table.dim() == 0:
        return []
    places = torch.linspace(0, len(table) - 1, 16).long().tolist()
    if table.dim() == 1:
        values, which = table.unique(return_inverse=True)
        for number in range(min(len(values), 8)):
            places += (which == number).nonzero().flatten()[:8].tolist()
    return places


def _combine(terms: list[Term], values: dict[fx.Node, Any], sizes: tuple[int, int, int]) -> tuple[torch.Tensor, bool]:
    """Return all terms as one bool mask (rows, queries, keys), and whether an added term says more than that mask.

    Such a term adds a value other than zero to a score that is seen.
    """
    rows, queries, keys = sizes
    visible = torch.ones(rows, 1, queries, keys, dtype=torch.bool)
    says_more = False
    for term in terms:
        value = values[term.node]
        if term.kind == "factor":
            continue
        if term.kind == "visible":
            seen = value.bool()
        elif term.kind == "hidden":
            seen = ~value.bool()
        else:
            if torch.isnan(value).any():
                raise Undecided("the mask holds NaN on a probe")
            seen = value > MASKED
            says_more = says_more or bool((value[seen] != 0).any())
        visible = visible & _of_scores(term, seen, sizes)
    if not (visible == visible[:, :1]).all():
        raise Undecided("the mask differs between heads")
    for term in terms:
        if term.kind == "factor" and not (_of_scores(term, _is_one(values[term.node]), sizes) | ~visible).all():
            raise Undecided(f"the factor {term.node.name} changes scores that are seen")
    return visible[:, 0], says_more


def _is_one(factor: torch.Tensor) -> torch.Tensor:
    """Return where a factor leaves the scores as they are.

    Raises:
        Undecided: it does anything but that or zero them.
    """
    if not ((factor == 0) | (factor == 1)).all():
        raise Undecided("a factor of the scores is neither 0 nor 1")
    return factor == 1


def _of_scores(term: Term, value: torch.Tensor, sizes: tuple[int, int, int]) -> torch.Tensor:
    """Return a term's values as (1 or rows, 1 or heads, 1 or queries, 1 or keys)."""
    try:
        return scores_of(value, term.ndim, sizes[0])
    except ValueError as error:
        raise Undecided(f"the mask {term.node.name} {error}") from error


def _offsets(offset: torch.Tensor, chosen: torch.Tensor) -> list[int]:
    """Return the distinct key - query offsets (queries, keys) of the chosen pairs (rows, queries, keys)."""
    return offset[chosen.any(0)].unique().tolist()


def _window(runs: list[Any], choice: tuple[fx.Node, str] | None, same_space: bool) -> tuple[int, int] | None:
    """Return the window (left, right) that explains every run with this choice of token mask, or None."""
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
