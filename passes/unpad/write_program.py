"""Writing of a decided region: its packed graph, the graph of its facts, and the epilogues of its deferred outputs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import sympy
import torch
from torch import fx

from deepytorch.passes.graphs import arguments_of, drop_unread_inputs
from deepytorch.passes.samples import sample
from deepytorch.passes.unpad import demand as seeing
from deepytorch.passes.unpad.demand import admitted_rule
from deepytorch.passes.unpad.emit import Emitter
from deepytorch.passes.unpad.index_values import IndexValues
from deepytorch.passes.unpad.layout import Layout, Positions, is_token, positions_of
from deepytorch.passes.unpad.mask_checks import MaskCheck, mask_differs
from deepytorch.passes.unpad.masks import TokenSource
from deepytorch.passes.unpad.program import (
    Assumption,
    BufferState,
    Epilogue,
    IndexInput,
    IndexSet,
    LossFacts,
    Output,
    OutputMeta,
    PickFacts,
    Program,
    SpaceFacts,
)
from deepytorch.passes.unpad.region import Declined, Region, Space
from deepytorch.passes.unpad.rules import Linear, rule_for

aten = torch.ops.aten


AddOutput = Callable[[fx.Node], int]  # adds an output to a graph under construction, and returns its number
# Values of a graph, each with the entries that its packed form holds; None for the padded form, and for numbers.
Sources = list[tuple[Any, IndexSet | None]]


def write_program(module: fx.GraphModule, region: Region) -> Program:
    """Replace the module's graph by its packed form, and return how to run it."""
    emitter = Emitter(region, region.entries)
    number = {node: index for index, node in enumerate(emitter.inputs)}
    for node in region.graph.nodes:
        _write_node(region, emitter, node)
    deferred = [node for node in region.output_nodes if node in region.seen.deferred - region.replayed]
    late = {node: _late_graph(module, region, node) for node in deferred}
    outputs: list[Output] = []
    sources: Sources = []
    for node in region.outputs:
        if node in region.replayed:
            outputs.append(Output("replayed", 0, _output_meta(region, node)))
        elif node in late:
            entries = late[node].entries
            merged = entries is not None and _is_merged(region, node)
            outputs.append(Output("epilogue", deferred.index(node), _output_meta(region, node), entries, merged))
        elif node in region.seen.token_outputs and node in region.entries:
            entries, meta, zeros = region.entries[node], _output_meta(region, node), node in region.zeroing
            outputs.append(Output("tokens", len(sources), meta, entries, _is_merged(region, node), zeros))
            sources.append((node, entries))
        else:
            outputs.append(Output("value", len(sources)))
            sources.append((node, None))
    epilogues = []
    for each in late.values():
        values = tuple(range(len(sources), len(sources) + len(each.boundary)))
        epilogues.append(Epilogue(each.module, each.inputs, each.indices, values))
        sources += [(node, region.entries.get(node)) for node in each.boundary]
    reference, reference_inputs, reference_indices = _reference(module, region, sources)
    facts = _facts(module, region)
    graph = emitter.finish(_values(emitter, sources))
    described = IndexValues([space.size for space in region.spaces.values()], region.symbols.shape_env)
    for index in emitter.indices:
        described.describe(emitter.index(index), index)
    kept = drop_unread_inputs(graph, len(number))
    module.graph = graph
    module.recompile()
    return Program(
        *facts,
        indices=tuple(emitter.indices),
        outputs=tuple(outputs),
        epilogues=tuple(epilogues),
        sizes=tuple((number[s.size[0]], s.size[1], s.size[2]) for s in region.spaces.values()),
        buffers=_buffers(region, number),
        packed_inputs=kept,
        values=tuple(entries for _, entries in sources),
        reference=reference,
        reference_inputs=reference_inputs,
        reference_indices=reference_indices,
        costs=_costs(region),
        sites=_sites(region),
    )


def _values(emitter: Emitter, sources: Sources) -> list[Any]:
    """Return the values in the forms that are asked for."""
    found = []
    for node, entries in sources:
        if not isinstance(node, fx.Node):
            found.append(node)
        else:
            found.append(emitter.padded(node) if entries is None else emitter.packed(node, entries))
    return found


def _is_merged(region: Region, node: fx.Node) -> bool:
    """Return whether a token value is (rows * positions, ...)."""
    return len(region.layouts[node][0]) == 2


def _reference(
    module: fx.GraphModule, region: Region, sources: Sources
) -> tuple[fx.GraphModule, tuple[int, ...], tuple[IndexInput, ...]]:
    """Return the padded graph with the outputs of the packed graph, which are gathered from padded values."""
    emitter = Emitter(region, {})
    for node in region.graph.nodes:
        if node.op not in ("placeholder", "output"):
            emitter.copy(node)
    return _finished(module, emitter, _values(emitter, sources))


def _finished(
    module: fx.GraphModule, emitter: Emitter, values: list[Any]
) -> tuple[fx.GraphModule, tuple[int, ...], tuple[IndexInput, ...]]:
    """Return the emitter's graph with these outputs, the region's inputs that it takes, and its index inputs."""
    graph = emitter.finish(values)
    kept = drop_unread_inputs(graph, len(emitter.inputs))
    return fx.GraphModule(module, graph), kept, tuple(emitter.indices)


def _write_node(region: Region, emitter: Emitter, node: fx.Node) -> None:
    """Add one node of the padded graph to the packed graph, in the form that was decided."""
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
        space = region.space(node.args[0])
        rank = emitter.index(IndexInput("picked", IndexSet(space.number), pick=seen.picks[node]))
        x = emitter.packed(node.args[0], IndexSet(space.number))
        picked = emitter.call(aten.index_select.default, (x, 0, rank))
        emitter.provide(node, picked, None)
    elif node in region.entries:
        emitter.pack(node)
    elif node not in emitter.swallowed:
        emitter.copy(node)


def _write_loss(region: Region, emitter: Emitter, node: fx.Node) -> None:
    entries = region.entries[node]
    arguments = arguments_of(node)
    logits = emitter.packed(node.args[0], entries)
    labels = emitter.aligned(node.args[1], _label_layout(region, node), entries)
    names = [argument.name for argument in node.target._schema.arguments]  # type: ignore[union-attr]
    arguments[names[0]], arguments[names[1]] = logits, labels
    target = aten.nll_loss_nd.default if node.target is aten.nll_loss.default else node.target
    args = [
        value if name in names[:2] else emitter.copied(value)
        for name, value in ((name, arguments[name]) for name in names)
    ]
    made = emitter.call(target, tuple(args))
    emitter.provide(node, made, entries if is_token(region.layouts.get(node)) else None)


def _label_layout(region: Region, node: fx.Node) -> Layout:
    """Return the labels' layout with the positions of the logits, which say where the labels stand in the space."""
    grid = positions_of(region.layouts[node.args[0]])[0]  # type: ignore[index]
    labels = region.layouts[node.args[1]]  # type: ignore[index]
    return tuple(tuple(grid if isinstance(atom, Positions) else atom for atom in dim) for dim in labels)


class _Late(NamedTuple):
    """The graph of a deferred output, which starts from values that the step computes anyway.

    Attributes:
        module: the graph; see `Epilogue`.
        inputs: the region's inputs that it takes.
        indices: its index inputs.
        boundary: the values from which it starts.
        entries: those that it returns; None for the padded value.
    """

    module: fx.GraphModule
    inputs: tuple[int, ...]
    indices: tuple[IndexInput, ...]
    boundary: list[fx.Node]
    entries: IndexSet | None


def _late_graph(module: fx.GraphModule, region: Region, output: fx.Node) -> _Late:
    nodes = region.epilogue_nodes(output)
    inside = set(nodes)
    sources = (source for node in nodes for source in region.read_late(node) if source not in inside)
    boundary = list(dict.fromkeys(node for node in sources if node.op == "call_function")) if nodes else [output]
    entries = _epilogue_entries(region, nodes, boundary)
    emitter = Emitter(region, entries)
    for index, node in enumerate(boundary):
        emitter.provide(node, emitter.input(f"value_{index}"), entries.get(node))
    for node in nodes:
        if node in entries:
            emitter.pack(node)
        elif node.op != "placeholder":
            emitter.copy(node)
    home = entries.get(output)
    return _Late(*_finished(module, emitter, _values(emitter, [(output, home)])), boundary, home)


def _epilogue_entries(region: Region, nodes: list[fx.Node], boundary: list[fx.Node]) -> dict[fx.Node, IndexSet]:
    entries = {node: region.entries[node] for node in boundary if node in region.entries}
    if not region.packs:
        return entries
    for node in nodes:
        if node.op != "call_function" or region.seen.from_batch[node] or admitted_rule(node, region.seen) is None:
            continue
        entries[node] = region.tokens(node)
    return entries


class _Facts(NamedTuple):
    """The fields of `Program` that say what is to be known of a batch."""

    graph: fx.GraphModule
    inputs: tuple[int, ...]
    spaces: tuple[SpaceFacts, ...]
    losses: tuple[LossFacts, ...]
    picks: tuple[PickFacts, ...]
    assumptions: tuple[Assumption, ...]


def _facts(module: fx.GraphModule, region: Region) -> _Facts:
    """Return the graph that tells, from a batch alone, what has a token or a label, and if the assumptions hold."""
    emitter = Emitter(region, {})
    nodes = region.slicer.slice(_facts_nodes(region))
    written = next((node for node in nodes if node.op == "placeholder" and region.slicer.is_written(node)), None)
    if written is not None:  # computing the facts would write a second time
        raise Declined(f"what is a token or a label depends on {written.meta['input'].name}, which the model writes to")
    for node in nodes:
        if node.op != "placeholder":
            emitter.copy(node)
    values: list[fx.Node] = []

    def output(node: fx.Node) -> int:
        values.append(node)
        return len(values) - 1

    spaces = tuple(_space_facts(space, emitter, output) for space in region.spaces.values())
    losses = tuple(_loss_facts(region, emitter, loss, output) for loss in region.losses)
    picks = tuple(_pick_facts(region, emitter, pick, output) for pick in region.picks)
    assumptions = tuple(_assumptions(region, emitter, output))
    graph, kept, _ = _finished(module, emitter, values)
    return _Facts(graph, kept, spaces, losses, picks, assumptions)


def _space_facts(space: Space, emitter: Emitter, output: AddOutput) -> SpaceFacts:
    meanings = [meaning for _, meaning in space.attentions]
    limits = [meaning.max_positions for meaning in meanings if meaning.max_positions is not None]
    return SpaceFacts(
        name=space.name,
        mask=None if space.source is None else output(emitter.padded(space.source.node)),
        reading=None if space.source is None else space.source.reading,
        trimmed_by=space.trimmed_by,
        contiguous=any(meaning.windowed for meaning in meanings),
        prefix=space.source is not None and any(meaning.tokens is None for meaning in meanings),
        begins=any(meaning.begins for meaning in meanings),
        max_positions=min(limits, default=None),
    )


def _loss_facts(region: Region, emitter: Emitter, loss: fx.Node, output: AddOutput) -> LossFacts:
    space, grid = region.grid(loss.args[0])
    return LossFacts(
        space.number,
        output(emitter.grid(_labels(region, loss))),
        arguments_of(loss)["ignore_index"],
        grid.offset,
        grid.cut,
        ignores_pads=loss in region.entries and not seeing.by_token(loss, region.demand[loss], region.seen),
    )


def _assumptions(region: Region, emitter: Emitter, output: AddOutput) -> Iterator[Assumption]:
    for factor, packed, node in region.zero_factors():
        space, grid = region.grid(packed)
        value = emitter.grid(factor)
        if node.target is aten.masked_fill.Scalar:
            value = emitter.call(aten.logical_not.default, (value,))
        yield Assumption("zero at pads", output(value), space.number, grid.offset, grid.cut)
    assumed = dict.fromkeys(pair for meaning in region.meanings.values() for pair in meaning.assumed)
    for leaf, domain in assumed:
        yield Assumption(domain, output(emitter.padded(leaf)))
    for check in _checks(region):
        yield Assumption("mask as meant", output(_compared(emitter, check)))
    for space in region.spaces.values():
        flat = [_flat_tokens(emitter, source) for source in _sources(space)]
        for other in flat[1:]:
            yield Assumption("same tokens", output(emitter.call(aten.ne.Tensor, (flat[0], other))))


def _sources(space: Space) -> list[TokenSource]:
    """Return the different token masks of a space's attentions, if there are several: else one is used as it is."""
    sources = list(dict.fromkeys(meaning.tokens for _, meaning in space.attentions if meaning.tokens is not None))
    return sources if len(sources) > 1 else []


def _flat_tokens(emitter: Emitter, source: TokenSource) -> fx.Node:
    flat = emitter.call(aten.reshape.default, (emitter.padded(source.node), [-1]))
    return emitter.call(_READ[source.reading], (flat, 0))


def _checks(region: Region) -> list[MaskCheck]:
    return list(dict.fromkeys(meaning.check for meaning in region.meanings.values() if meaning.check is not None))


_READ = {"nonzero": aten.ne.Scalar, "zero": aten.eq.Scalar, "not negative": aten.ge.Scalar}


def _compared(emitter: Emitter, check: MaskCheck) -> fx.Node:
    """Return the rows in which a mask says anything else than its meaning."""
    value = emitter.padded(check.tokens)
    sizes = [emitter.call(aten.sym_size.int, (value, dim)) for dim in check.dims]
    tokens = emitter.call(_READ[check.reading], (emitter.call(aten.reshape.default, (value, sizes)), 0))
    values = [emitter.padded(term.node) for term in check.terms]
    kinds = [(term.kind, term.ndim) for term in check.terms]
    return emitter.call(mask_differs, (values, kinds, tokens, check.window, check.same_space))


def _facts_nodes(region: Region) -> list[fx.Node]:
    nodes = [space.source.node for space in region.spaces.values() if space.source is not None]
    nodes += [_labels(region, loss) for loss in region.losses]
    nodes += [factor for factor, _, _ in region.zero_factors()]
    nodes += [node for check in _checks(region) for node in check.nodes]
    nodes += [source.node for space in region.spaces.values() for source in _sources(space)]
    for pick in region.picks:
        if pick.target is aten.index.Tensor:
            nodes += list(pick.args[1])  # type: ignore[arg-type]
    return nodes


def _labels(region: Region, loss: fx.Node) -> fx.Node:
    """Return a loss's labels before they were flattened: the same numbers in the same order, with fewer operations."""
    node: fx.Node = loss.args[1]  # type: ignore[assignment]
    while node.target in (aten.view.default, aten.reshape.default, aten.contiguous.default):
        source: fx.Node = node.args[0]  # type: ignore[assignment]
        layout = region.layouts.get(source)
        if layout is None or not is_token(layout) or _atoms(layout) != _atoms(region.layouts[node]):
            break
        node = source
    return node


def _atoms(layout: Layout) -> list[Any]:
    return [atom for dim in layout for atom in dim if atom != 1]


def _pick_facts(region: Region, emitter: Emitter, pick: fx.Node, output: AddOutput) -> PickFacts:
    space = region.space(pick.args[0])
    if pick.target is aten.select.int:
        return PickFacts(space.number, pick.args[2], None)  # type: ignore[arg-type]
    rows, columns = (emitter.padded(index) for index in pick.args[1])  # type: ignore[union-attr]
    count, positions = emitter.sizes(space.number)
    # Negative indices count from the end, as in the padded graph.
    rows, columns = (
        emitter.call(aten.remainder.Scalar, (index, size)) for index, size in ((rows, count), (columns, positions))
    )
    flat = emitter.call(aten.add.Tensor, (emitter.call(aten.mul.Scalar, (rows, positions)), columns))
    return PickFacts(space.number, None, output(flat))


def _buffers(region: Region, number: Mapping[fx.Node, int]) -> tuple[BufferState, ...]:
    nodes = dict.fromkeys(node for meaning in region.meanings.values() for node in meaning.buffers)
    found = []
    for node in nodes:
        value = node.meta["input"].value
        found.append(BufferState(number[node], value, value._version, sample(value)))
    return tuple(found)


def _output_meta(region: Region, node: fx.Node) -> OutputMeta:
    symbols = [region.symbols.rows, *(space.symbol for space in region.spaces.values())]
    shape = [region.symbols.expr(size) for size in node.meta["val"].shape]
    return OutputMeta(_spoken_name(node), node.meta["val"].dtype, sympy.lambdify(symbols, shape, modules="math"))


def _spoken_name(node: fx.Node) -> str:
    """Return the name that the model's code gives a value, if the line that computed the value assigns one."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip(" ^~")]
    named = re.match(r"(?:self\.)?(\w+)(?::[^=]+)?\s*=(?!=)", lines[-1]) if lines else None
    return named[1] if named is not None else node.name


def _costs(region: Region) -> tuple[tuple[IndexSet, float], ...]:
    """Return the multiply-adds of the matrix products, per entry of the set that the products run on."""
    costs: dict[IndexSet, float] = {}
    for node, entries in region.entries.items():
        if node in region.seen.routed:
            key = IndexSet(entries.space, entries.loss)
            costs[key] = costs.get(key, 0.0) + region.seen.routed[node].cost
        elif isinstance(rule_for(node), Linear):
            weights = [source.meta["val"] for source in node.all_input_nodes if source.op == "placeholder"]
            sizes = [weight.numel() for weight in weights if isinstance(weight, torch.Tensor) and weight.dim() == 2]
            if sizes and isinstance(sizes[0], int):
                key = IndexSet(entries.space, entries.loss)
                costs[key] = costs.get(key, 0.0) + sizes[0]
    return tuple(costs.items())


def _sites(region: Region) -> list[str]:
    """Return what was done, in a user's words."""
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
