"""Writing of a decided region: its packed graph, the graph of its facts, and the epilogues of its deferred outputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

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
from deepytorch.passes.unpad.region import Declined, Region
from deepytorch.passes.unpad.rules import Linear, rule_for

aten = torch.ops.aten


def write_program(module: fx.GraphModule, region: Region, *, zero_outputs: bool) -> Program:
    """Replace the module's graph by its packed form, and return how to run it.

    zero_outputs: token outputs are padded with zeros in the graph; otherwise they leave the graph packed.
    """
    placeholders = [node for node in region.graph.nodes if node.op == "placeholder"]
    number = {node: index for index, node in enumerate(placeholders)}
    epilogues, epilogue_of, epilogue_entries = _epilogues(module, region, number, zero_outputs)
    emitter = _emitter(region, region.entries)
    for node in region.graph.nodes:
        _write_node(region, emitter, node)
    outputs: list[Output] = []
    values: list[Any] = []
    sources: list[tuple[Any, IndexSet | None]] = []  # for each value: its node, and the entries that it holds
    for node in region.outputs:
        if node in region.replayed:
            outputs.append(Output("replayed", 0, _output_meta(region, node)))
        elif node in region.seen.deferred:
            entries = epilogue_entries[node]
            merged = entries is not None and len(region.layouts[node][0]) == 2
            outputs.append(Output("epilogue", epilogue_of[node], _output_meta(region, node), entries, merged))
        elif not zero_outputs and node in region.seen.token_outputs and node in region.entries:
            zeros, merged = node in region.zeroing, len(region.layouts[node][0]) == 2
            entries = region.entries[node]
            outputs.append(Output("tokens", len(values), _output_meta(region, node), entries, merged, zeros))
            values.append(emitter.packed(node, entries))
            sources.append((node, entries))
        else:
            outputs.append(Output("value", len(values)))
            values.append(emitter.padded(node) if isinstance(node, fx.Node) else node)
            sources.append((node, None))
    wired = []
    for epilogue, boundary in epilogues:
        start = len(values)
        for node in boundary:
            home = region.entries.get(node)
            values.append(emitter.padded(node) if home is None else emitter.packed(node, home))
            sources.append((node, home))
        wired.append(Epilogue(epilogue.module, epilogue.inputs, epilogue.indices, tuple(range(start, len(values)))))
    reference, reference_inputs, reference_indices = _reference(module, region, sources)
    facts, facts_inputs, found = _facts(module, region)
    graph = emitter.finish(values)
    described = IndexValues([space.size for space in region.spaces.values()], region.symbols.shape_env)
    for index in emitter.indices:
        described.describe(emitter.index(index), index)
    kept = drop_unread_inputs(graph, len(placeholders))
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
        epilogues=tuple(wired),
        sizes=tuple((number[s.size[0]], s.size[1], s.size[2]) for s in region.spaces.values()),
        buffers=_buffers(region, number),
        packed_inputs=kept,
        values=tuple(home for _, home in sources),
        reference=reference,
        reference_inputs=reference_inputs,
        reference_indices=reference_indices,
        costs=_costs(region),
        sites=_sites(region),
    )


def _reference(
    module: fx.GraphModule, region: Region, sources: list[tuple[Any, IndexSet | None]]
) -> tuple[fx.GraphModule, tuple[int, ...], tuple[IndexInput, ...]]:
    """Return the padded graph with the outputs of the packed graph, which are gathered from padded values."""
    emitter = _emitter(region, {})
    for node in region.graph.nodes:
        if node.op not in ("placeholder", "output"):
            emitter.copy(node)
    values = [
        node
        if not isinstance(node, fx.Node)
        else emitter.padded(node)
        if home is None
        else emitter.gathered(node, home)
        for node, home in sources
    ]
    graph = emitter.finish(values)
    kept = drop_unread_inputs(graph, len(emitter.inputs))
    return fx.GraphModule(module, graph), kept, tuple(emitter.indices)


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
    made = emitter.call(target, tuple(args), {})
    emitter.provide(node, made, entries if is_token(region.layouts.get(node)) else None)


def _label_layout(region: Region, node: fx.Node) -> Layout:
    """Return the labels' layout with the positions of the logits, which say where the labels stand in the space."""
    grid = positions_of(region.layouts[node.args[0]])[0]  # type: ignore[index]
    labels = region.layouts[node.args[1]]  # type: ignore[index]
    return tuple(tuple(grid if isinstance(atom, Positions) else atom for atom in dim) for dim in labels)


def _epilogues(
    module: fx.GraphModule, region: Region, number: Mapping[fx.Node, int], zero_outputs: bool
) -> tuple[list[tuple[Epilogue, list[fx.Node]]], dict[fx.Node, int], dict[fx.Node, IndexSet | None]]:
    """Return a small graph for every deferred output, and the entries that each graph returns.

    The graphs start from values that the step computes anyway.
    """
    epilogues: list[tuple[Epilogue, list[fx.Node]]] = []
    epilogue_of: dict[fx.Node, int] = {}
    gives: dict[fx.Node, IndexSet | None] = {}
    for output in region.outputs:
        if output not in region.seen.deferred or output in epilogue_of or output in region.replayed:
            continue
        nodes = region.epilogue_nodes(output)
        inside = set(nodes)
        boundary = [output] if not nodes else []
        for node in nodes:
            for source in node.all_input_nodes:
                if source not in inside and source not in boundary and source.op == "call_function":
                    boundary.append(source)
        entries = _epilogue_entries(region, nodes, boundary)
        emitter = _emitter(region, entries)
        for index, node in enumerate(boundary):
            emitter.provide(node, emitter.input(f"value_{index}"), entries.get(node))
        for node in nodes:
            if node.op == "placeholder":
                continue
            if node in entries:
                emitter.pack(node)
            else:
                emitter.copy(node)
        home = None if zero_outputs else entries.get(output)
        gives[output] = home
        graph = emitter.finish([emitter.padded(output) if home is None else emitter.packed(output, home)])
        kept = drop_unread_inputs(graph, len(number))
        epilogue_of[output] = len(epilogues)
        epilogues.append((Epilogue(fx.GraphModule(module, graph), kept, tuple(emitter.indices), ()), boundary))
    return epilogues, epilogue_of, gives


def _epilogue_entries(region: Region, nodes: list[fx.Node], boundary: list[fx.Node]) -> dict[fx.Node, IndexSet]:
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
    """Return the graph that tells, from a batch alone, what has a token or a label, and if the assumptions hold."""
    emitter = _emitter(region, {})
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
        target = output(emitter.grid(_labels(region, loss)))
        losses.append(
            LossFacts(
                region.space(loss.args[0]).number,
                target,
                arguments_of(loss)["ignore_index"],
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
    kept = drop_unread_inputs(graph, len(emitter.inputs))
    found = _Found(tuple(spaces), tuple(losses), tuple(picks), tuple(assumptions))
    return fx.GraphModule(module, graph), kept, found


def _facts_nodes(region: Region) -> list[fx.Node]:
    nodes = [space.source.node for space in region.spaces.values() if space.source is not None]
    nodes += [_labels(region, loss) for loss in region.losses]
    nodes += [factor for node, factor in region.zeroing.items() if node in region.entries]
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
        if isinstance(rule_for(node), Linear):
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
