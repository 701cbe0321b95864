"""Padded graphs written by hand, a node at a time, and what the pass makes of them: no model, no `torch.compile`.

Sizes are spelled "r" (rows), "p" (positions), "q" (positions of a second sequence) or a number. Values are float64, so
that what differs is wrong and not merely rounded.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import sympy
import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

from deepytorch.compiler.step.batch_facts import Facts, Indices, Refusal, read_facts
from deepytorch.passes.base import Context, GraphInput, Role
from deepytorch.passes.slicing import Slicer
from deepytorch.passes.unpad.analysis import _forget_sorted
from deepytorch.passes.unpad.demand import Seen
from deepytorch.passes.unpad.emit import Emitter
from deepytorch.passes.unpad.layout import ROWS, Layout, Positions, Symbols, is_token, layouts, positions_of
from deepytorch.passes.unpad.masks import TokenSource
from deepytorch.passes.unpad.program import IndexInput, Output, Program
from deepytorch.passes.unpad.region import Region, Space
from deepytorch.passes.unpad.routing import Router
from deepytorch.passes.unpad.strip_padding import StripPadding, decide
from deepytorch.passes.unpad.write_program import write_program

aten = torch.ops.aten
Dims = tuple[Any, ...]

# The sizes that stand for symbols while the graph is written: primes, so that no plain size is one of them.
HINTS = {"r": 29, "p": 31, "q": 37}


class PaddedGraph:
    """A graph under construction, with the metadata that a captured one has.

    `mask` is its first input, (rows, positions) of 0 and 1: the tokens.
    """

    def __init__(self) -> None:
        self.env = ShapeEnv()
        self._fake = FakeTensorMode(shape_env=self.env)
        seed = self._fake.from_tensor(
            torch.empty(*HINTS.values()),
            symbolic_context=StatelessSymbolicContext(dynamic_sizes=[DimDynamic.DYNAMIC] * len(HINTS)),
        )
        self._sizes = dict(zip(HINTS, seed.shape, strict=True))
        self.module = torch.nn.Module()
        self.graph = fx.Graph(self.module)
        self.dims: dict[fx.Node, Dims] = {}
        self.inputs: list[fx.Node] = []
        self._numbers = 0
        self.mask = self.batch("r", "p", dtype=torch.int64, name="mask")

    # ---------------------------------------------------------------- inputs

    def input(
        self,
        *dims: Any,
        role: Role = Role.BATCH,
        dtype: torch.dtype = torch.float64,
        grad: bool = False,
        name: str = "",
        value: torch.Tensor | None = None,
    ) -> fx.Node:
        """A tensor that the region is given."""
        name = name or f"{role.value}_{len(self.inputs)}"
        # New inputs stand before every call, as in a captured graph.
        with self.graph.inserting_after(self.inputs[-1]) if self.inputs else self.graph.inserting_before(None):
            node = self.graph.placeholder(name)
        with self._fake:
            sizes = [self._sizes.get(dim, dim) for dim in dims]
            node.meta["val"] = torch.empty(sizes, dtype=dtype, requires_grad=grad)
        node.meta["input"] = GraphInput(node.name, role, value)
        self.dims[node] = dims
        self.inputs.append(node)
        return node

    def x(self, *dims: Any, dtype: torch.dtype = torch.float64) -> fx.Node:
        """A value of the model's own: embeddings that were given, or, where no gradient is possible, a parameter."""
        floats = dtype.is_floating_point
        return self.input(*dims, role=Role.BATCH if floats else Role.PARAMETER, dtype=dtype, grad=floats)

    def weight(self, *dims: int) -> fx.Node:
        """A parameter."""
        return self.input(*dims, role=Role.PARAMETER, grad=True)

    def batch(self, *dims: Any, dtype: torch.dtype = torch.int64, name: str = "") -> fx.Node:
        """A value of the batch: ids, labels, masks."""
        return self.input(*dims, role=Role.BATCH, dtype=dtype, name=name)

    def buffer(self, value: torch.Tensor) -> fx.Node:
        """A buffer of the model."""
        return self.input(*value.shape, role=Role.BUFFER, dtype=value.dtype, value=value)

    # ---------------------------------------------------------------- calls

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """One operator; its value's sizes are found by running it on fake tensors."""
        node = self.graph.call_function(target, args, kwargs)
        with self._fake, torch.no_grad(), enable_python_dispatcher():  # symbols stay symbols in torch 2.11, too
            args, kwargs = fx.node.map_arg((args, kwargs), lambda source: source.meta["val"])
            node.meta["val"] = target(*args, **kwargs)
        return node

    def size(self, dim: str) -> fx.Node:
        """The number of rows ("r"), of positions ("p") or of the second sequence's ("q"), as a node."""
        holders = [node for node in self.inputs if dim in self.dims[node]]
        source = min(holders, key=lambda node: node.meta["val"].requires_grad)  # the batch's own, where it has one
        return self.call(aten.sym_size.int, source, self.dims[source].index(dim))

    def merged(self, x: fx.Node) -> fx.Node:
        """(rows, positions, ...) viewed as (rows * positions, ...)."""
        rest = [int(size) for size in x.meta["val"].shape[2:]]
        return self.call(aten.view.default, x, [self.call(operator.mul, self.size("r"), self.size("p")), *rest])

    def output(self, *values: Any) -> None:
        """Close the graph."""
        self.graph.output(tuple(values))
        self.graph.lint()

    # ---------------------------------------------------------------- what the analyses need

    def symbol(self, dim: str) -> sympy.Symbol:
        """The symbol of rows or of positions."""
        return self.env.replace(self._sizes[dim].node.expr)

    @property
    def symbols(self) -> Symbols:
        """What the sizes mean."""
        used = [dim for dim in ("p", "q") if any(dim in dims for dims in self.dims.values())]
        return Symbols(self.symbol("r"), frozenset(self.symbol(dim) for dim in used), self.env)

    def context(self, **kwargs: Any) -> Context:
        """What a pass may know."""
        return Context(self.env, **kwargs)

    def layouts(self) -> dict[fx.Node, Layout]:
        """The layouts, without those of what an operator without a rule made of token values."""
        return self._routed()[0]

    def _routed(self) -> tuple[dict[fx.Node, Layout], Router]:
        slicer, router = Slicer(self.graph), Router(self.symbols)
        known = layouts(self.graph, self.symbols, slicer.from_batch, router.layout)
        _forget_sorted(self.graph, known, {node: slicer.from_batch(node) for node in self.graph.nodes}, router)
        return known, router

    def seen(self, **kwargs: Any) -> Seen:
        """What `demands` is told, for a graph without attentions and losses; `kwargs` change it."""
        slicer = Slicer(self.graph)
        known, router = self._routed()
        given: dict[str, Any] = {
            "layouts": known,
            "from_batch": {node: slicer.from_batch(node) for node in self.graph.nodes},
            "attentions": {}, "losses": {}, "loss_rows": True, "token_outputs": frozenset(), "biases": {},
            "unreduced": frozenset(), "picks": {}, "zero_at_pads": frozenset(), "sums": frozenset(),
            "deferred": frozenset(), "routed": router.rules, "order_of": router.order_of,
        }  # fmt: skip
        return Seen(**{**given, **kwargs})

    def region(self) -> Region:
        """The graph as a region whose one token space is that of `mask`, and whose outputs are seen at tokens alone."""
        outputs = list(next(iter(reversed(self.graph.nodes))).args[0])
        seen = self.seen()
        seen.token_outputs = frozenset(
            node for node in outputs if is_token(seen.layouts.get(node)) and not seen.from_batch[node]
        )
        space = Space(0, self.symbol("p"), "mask", (self.mask, 0, 1), source=TokenSource(self.mask, "nonzero"))
        region = Region(
            self.graph, Slicer(self.graph), self.symbols, dict(seen.layouts), {space.symbol: space}, losses=[],
            outputs=outputs, defers=False, packs=True,
        )  # fmt: skip
        region.seen = seen
        return region

    def values(self, mask: torch.Tensor, generator: torch.Generator, given: Mapping[fx.Node, Any]) -> list[Any]:
        """Random values for every input, for a batch with these tokens; `given` names what is not random."""
        sizes = {"r": mask.shape[0], "p": mask.shape[1], "q": mask.shape[1] + 2}
        found = []
        for node in self.inputs:
            if node is self.mask:
                found.append(mask.long())
            elif node in given:
                found.append(given[node])
            elif node.meta["input"].role is Role.BUFFER:
                found.append(node.meta["input"].value)
            else:
                shape = [sizes.get(dim, dim) for dim in self.dims[node]]
                found.append(random_value(shape, node.meta["val"].dtype, generator))
        return found


def random_value(shape: Sequence[int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random numbers; whole ones are 0 to 2, which index any dimension used here."""
    if dtype.is_floating_point:
        return torch.randn(shape, dtype=dtype, generator=generator)
    whole = torch.randint(0, 3, shape, generator=generator)
    return whole > 0 if dtype is torch.bool else whole.to(dtype)


@dataclass
class Packed:
    """A graph that was packed: the padded one and the packed one, to be run on one batch."""

    written: PaddedGraph
    region: Region
    padded: fx.GraphModule
    packed: fx.GraphModule
    program: Program
    unpacking: fx.GraphModule
    unpacking_indices: list[IndexInput]

    @classmethod
    def of(cls, written: PaddedGraph) -> Packed:
        """Decide and write, as the pass does; `Declined` where nothing is packed."""
        region = written.region()
        decide(region)
        module = fx.GraphModule(written.module, written.graph)
        padded = fx.GraphModule(written.module, written.graph)
        return cls(written, region, padded, module, write_program(module, region), *_unpacking(region))

    def run(self, mask: torch.Tensor, values: Sequence[Any]) -> Sequence[Any]:
        """The packed graph's outputs in their padded layouts, zeros at pads."""
        indices = Indices(facts(mask))
        found = self.packed(
            *(values[index] for index in self.program.packed_inputs),
            *(indices.get(index) for index in self.program.indices),
        )
        assert [output.kind == "tokens" for output in self.program.outputs] == [
            node in self.region.entries for node in self.region.outputs
        ]
        return self.unpacking(*values, *found, *(indices.get(index) for index in self.unpacking_indices))


def _unpacking(region: Region) -> tuple[fx.GraphModule, list[IndexInput]]:
    """A graph that scatters packed outputs into zeros, as the packed graph does where it reads a value padded."""
    emitter = Emitter(region, region.entries)
    for node in region.outputs:
        emitter.provide(node, emitter.input(f"packed_{node.name}"), region.entries.get(node))
    graph = emitter.finish([emitter.padded(node) for node in region.outputs])
    return fx.GraphModule(torch.nn.Module(), graph), emitter.indices


def facts(mask: torch.Tensor) -> Facts:
    """What a step knows of a batch with these tokens."""
    return Facts([tuple(mask.shape)], [mask], [], [mask.sum(1).tolist()], [], [], mask.device, {}, waited=False)


def by_token(value: torch.Tensor, layout: Layout, sizes: Mapping[str, int]) -> tuple[torch.Tensor, Positions]:
    """A padded value as (rows, positions, ...), and which positions of the space these are."""
    grid = positions_of(layout)[0]
    atoms = [atom for dim in layout for atom in (dim or (1,))]
    split = [
        sizes["r"] if atom is ROWS else sizes["p"] - grid.cut if isinstance(atom, Positions) else atom for atom in atoms
    ]
    rows = atoms.index(ROWS)
    positions = next(index for index, atom in enumerate(atoms) if isinstance(atom, Positions))
    return value.reshape(split).movedim((rows, positions), (0, 1)), grid


def batches() -> dict[str, torch.Tensor]:
    """Token masks: padding on either side and on both, holes, none; one row, one token."""
    drawn = torch.rand(4, 6, generator=torch.Generator().manual_seed(3)) < 0.6
    drawn[:, 2] = True
    rows = {
        "right": ["11100", "11111", "10000"],
        "left": ["00111", "11111", "00001"],
        "mixed": ["0110", "1100", "0011"],
        "holes": ["10101", "01011"],
        "real": ["111", "111"],
        "one token": ["010", "100", "001"],
        "one row": ["01110"],
    }
    written = {name: torch.tensor([[digit == "1" for digit in row] for row in grid]) for name, grid in rows.items()}
    return {**written, "drawn": drawn}


class Step:
    """A graph that the whole pass has rewritten, run as a step runs it: from the batch alone to the packed outputs."""

    def __init__(self, written: PaddedGraph, *, loss_rows: bool = True, ends_in_break: bool = False) -> None:
        self.padded = fx.GraphModule(written.module, written.graph)
        self.packed = fx.GraphModule(written.module, written.graph)
        self.rewrite = StripPadding(loss_rows=loss_rows).rewrite(
            self.packed, written.context(ends_in_break=ends_in_break)
        )

    @property
    def program(self) -> Program:
        """What the pass hands to the run time."""
        assert self.rewrite.program is not None, self.rewrite.declined
        return self.rewrite.program

    @property
    def reasons(self) -> list[str]:
        """Why something stayed padded."""
        return [decline.reason for decline in self.rewrite.declined]

    def run(self, values: Sequence[Any]) -> list[Any] | str:
        """The packed graph's outputs, zeros at pads; the reason where this batch has to run padded."""
        found = read_facts(self.program, values)
        if isinstance(found, Refusal):
            return found.reason
        indices = Indices(found)
        values = self.packed(
            *(values[index] for index in self.program.packed_inputs),
            *(indices.get(index) for index in self.program.indices),
        )
        return [_unpacked(output, values[output.index], found) for output in self.program.outputs]

    def targets(self) -> list[Any]:
        """The operators of the packed graph."""
        return [node.target for node in self.packed.graph.nodes if node.op == "call_function"]


def _unpacked(output: Output, value: Any, found: Facts) -> Any:
    """An output with its tokens at their positions and zeros elsewhere."""
    if output.kind == "value":
        return value
    assert output.kind == "tokens", "of the graphs here, none has an output that is computed later"
    assert output.entries.loss is None
    _, _, start, cut = output.entries
    mask = found.masks[output.entries.space]
    own = mask[:, start : mask.shape[1] - cut + start]
    padded = value.new_zeros(*own.shape, *value.shape[1:])
    padded[own] = value
    return padded.flatten(0, 1) if output.merged else padded


def key_mask(g: PaddedGraph, mask: fx.Node | None = None) -> fx.Node:
    """(rows, 1, 1, positions) bool: which keys are tokens."""
    seen = g.call(aten.ne.Scalar, g.mask if mask is None else mask, 0)
    return g.call(aten.unsqueeze.default, g.call(aten.unsqueeze.default, seen, 1), 1)


def project(g: PaddedGraph, x: fx.Node, heads: int, dim: str = "p") -> fx.Node:
    """(rows, positions, width) -> (rows, heads, positions, 4), by a weight of its own."""
    y = g.call(aten.linear.default, x, g.weight(4 * heads, int(x.meta["val"].shape[-1])))
    y = g.call(aten.view.default, y, [g.size("r"), g.size(dim), heads, 4])
    return g.call(aten.transpose.int, y, 1, 2)


def attend(g: PaddedGraph, x: fx.Node, mask: fx.Node | None, causal: bool = False, heads: int = 2) -> fx.Node:
    """Self-attention of (rows, positions, width), of the same width."""
    q, k, v = (project(g, x, heads) for _ in range(3))
    y = g.call(aten.scaled_dot_product_attention.default, q, k, v, mask, 0.0, causal)
    y = g.call(aten.reshape.default, g.call(aten.transpose.int, y, 1, 2), [g.size("r"), g.size("p"), 4 * heads])
    return g.call(aten.linear.default, y, g.weight(int(x.meta["val"].shape[-1]), 4 * heads))


def assert_tokens_as_eager(packed: Packed) -> None:
    """Every output equals eager at tokens, with its gradients, and at no token does it follow from another one."""
    g = packed.written
    layouts = [packed.region.layouts[output] for output in packed.region.outputs]
    for number, (name, mask) in enumerate(batches().items()):
        generator = torch.Generator().manual_seed(number)
        sizes = {"r": mask.shape[0], "p": mask.shape[1]}
        values = g.values(mask, generator, {})
        ours, theirs = packed.run(mask, values), packed.padded(*values)
        for our, their, layout in zip(ours, theirs, layouts, strict=True):
            (our, grid), (their, _) = by_token(our, layout, sizes), by_token(their, layout, sizes)
            own = mask[:, grid.offset : mask.shape[1] - grid.cut + grid.offset]
            torch.testing.assert_close(our[own], their[own], msg=lambda text, name=name: f"{name}: {text}")
            assert not our[~own].any(), "pads are scattered as zeros"
        tokens = mask.nonzero().tolist()
        for row, position in tokens[:: max(1, len(tokens) // 3)]:
            others = packed.padded(*_but_for(g, packed, values, mask, row, position, generator))
            for other, their, layout in zip(others, theirs, layouts, strict=True):
                (other, grid), (their, _) = by_token(other, layout, sizes), by_token(their, layout, sizes)
                column = position - grid.offset
                if 0 <= column < other.shape[1]:
                    before, after = their[row, column], other[row, column]
                    assert torch.equal(before, after), f"{name}: the token at {row}, {position} sees another one"
    _same_gradients(g, packed, layouts)


def _but_for(
    g: PaddedGraph, packed: Packed, values: list[Any], mask: torch.Tensor, row: int, position: int, generator: Any
) -> Iterator[Any]:
    """The same inputs for one token, others for all other ones, NaN at pads."""
    for node, value in zip(g.inputs, values, strict=True):
        dims = g.dims[node]
        # What is computed from the batch alone is gathered by its own index, such as labels that were shifted.
        moved = packed.region.seen.from_batch[node] and any(user.target is aten.slice.Tensor for user in node.users)
        if moved or not {"r", "p"} & {*dims}:
            yield value
            continue
        other = random_value(value.shape, value.dtype, generator)
        if {"r", "p"} <= {*dims} and value.is_floating_point():
            other.movedim((dims.index("r"), dims.index("p")), (0, 1))[~mask] = torch.nan
        at = tuple(row if dim == "r" else position if dim == "p" else slice(None) for dim in dims)
        other[at] = value[at]
        yield other


def _same_gradients(g: PaddedGraph, packed: Packed, layouts: list[Any]) -> None:
    """Gradients of what stands at tokens, with a weight of its own for every number."""
    mask = batches()["drawn"]
    sizes = {"r": mask.shape[0], "p": mask.shape[1]}
    values = g.values(mask, torch.Generator().manual_seed(0), {})
    wanted = [
        value.requires_grad_() for node, value in zip(g.inputs, values, strict=True) if node.meta["val"].requires_grad
    ]
    found = []
    for outputs in (packed.run(mask, values), packed.padded(*values)):
        total = torch.zeros((), dtype=torch.float64)
        for output, layout in zip(outputs, layouts, strict=True):
            if output.requires_grad:
                each, grid = by_token(output, layout, sizes)
                chosen = each[mask[:, grid.offset : mask.shape[1] - grid.cut + grid.offset]]
                chosen = torch.view_as_real(chosen) if chosen.is_complex() else chosen
                total = total + (chosen * torch.arange(1.0, chosen.numel() + 1).view_as(chosen)).sum()
        if not total.requires_grad:
            return
        found.append(torch.autograd.grad(total, wanted, allow_unused=True, materialize_grads=True))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)
