"""The pass from a padded batch to packed tokens: it finds out what can be packed, and rewrites the graph.

Read `StripPadding.rewrite` top to bottom: what the graph allows (`analysis`, with `sizes`, `masks` and `layout`), which
values are seen (`demand`), what is packed in consequence (`decide`, here), then the packed graph (`emit`,
`write_program`) and, for the run time, how to feed the graph and read its outputs (`program`).
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from deepytorch.passes.base import Context, Decline, Pass, Rewrite
from deepytorch.passes.functional import without_writes
from deepytorch.passes.graphs import is_random
from deepytorch.passes.unpad import demand as seeing
from deepytorch.passes.unpad.analysis import analyse, why_not
from deepytorch.passes.unpad.demand import admitted_rule, demands, is_float
from deepytorch.passes.unpad.layout import is_token, leads_with_tokens
from deepytorch.passes.unpad.program import IndexSet
from deepytorch.passes.unpad.region import Declined, Region
from deepytorch.passes.unpad.rules import tensor_inputs
from deepytorch.passes.unpad.write_program import write_program


@dataclass(frozen=True)
class StripPadding(Pass):
    """Rewrites a padded region into one on packed tokens.

    The rewrite is exact: pads are never seen, or checked at run time.

    `loss_rows`: entries whose label is ignored run neither head nor loss. `defer_outputs`: outputs besides a loss are
    computed at their first use, and values leave the region packed, with tokens only, until pads are read.
    """

    provides: ClassVar[frozenset[str]] = frozenset({"packed"})
    depends_on_batch: ClassVar[bool] = True
    loss_rows: bool = True
    defer_outputs: bool = True

    def rewrite(self, module: fx.GraphModule, context: Context) -> Rewrite:
        """Pack what can be packed. The program of the result tells the run time how to feed the new graph."""
        rewrite = Rewrite()
        try:
            source = without_writes(module)
            region = analyse(source, context, loss_rows=self.loss_rows, defer_outputs=self.defer_outputs)
            decide(region)
            rewrite.program = write_program(source, region)
        except Declined as declined:
            rewrite.declined.append(Decline(declined.where, str(declined)))
            return rewrite
        if source is not module:
            module.graph = source.graph
            module.recompile()
        rewrite.changes.extend(rewrite.program.sites)
        rewrite.declined.extend(region.declined)
        return rewrite


def decide(region: Region) -> None:
    """Compute demand, and decide from it which values are packed over which entries, and which outputs are deferred."""
    may_wait = region.defers and bool(region.losses)
    modes = _modes(region.graph)
    deferrable = {node for node in region.outputs if region.defers and _is_token_output(node, region)}
    deferred = set(deferrable) if may_wait else set()
    if region.packs:
        # such as a key-value cache, whose layout does not fit an output that holds tokens only
        region.replayed |= {node for node in deferrable if not leads_with_tokens(region.layouts[node])}
    keep: set[fx.Node] = set()
    for _ in range(2 * len(region.outputs) + 4):
        region.seen.deferred = frozenset(deferred | region.replayed)
        region.seen.keep_tokens = frozenset(keep)
        region.seen.refused.clear()
        region.demand = demands(region.graph, region.seen)
        region.entries = _entries(region)
        before = (len(deferred), len(region.replayed), len(keep))
        if may_wait and not region.slicer.writes_inputs:
            region.replayed |= _outputs_in_the_way(region)
        for node in list(deferred - region.replayed):
            late = region.epilogue_nodes(node)
            keep |= {other for other in late if is_random(other)}
            inside = [other for other in late if not region.seen.from_batch[other] and other.op == "call_function"]
            written = any(
                other in region.seen.written or (other.op == "placeholder" and region.slicer.is_written(other))
                for other in late
            )
            if written or any(n in region.seen.attentions or n in region.losses or modes[n] for n in inside):
                deferred.discard(node)
        if before == (len(deferred), len(region.replayed), len(keep)):
            break
    for node, target in region.seen.refused.items():
        if all(source in region.entries or region.seen.from_batch[source] for source in tensor_inputs(node)):
            continue  # its inputs are zero at pads in the padded graph as well
        region.declined.append(Decline(node.name, f"{target} may look across positions: what feeds it stays padded"))
    if not region.entries:
        raise Declined(why_not(region.declined))


def _modes(graph: fx.Graph) -> dict[fx.Node, tuple[Any, ...]]:
    """Return the autocast and grad modes that the graph itself switched on around each node; empty at its top level."""
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
    """Return the outputs besides the loss that alone keep token values padded, such as a part of a key-value cache."""
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
    """Return the nodes that get a packed form, and the entries of their space that each form holds."""
    entries: dict[fx.Node, IndexSet] = {}
    for node in region.graph.nodes:
        found = _entry(region, node)
        if found is not None and not (_is_item(node) and node.args[0] not in entries):
            entries[node] = found
    return entries


def _is_item(node: fx.Node) -> bool:
    """Return whether a node is one of several results, which is packed only together with the others."""
    return node.target is operator.getitem


def _entry(region: Region, node: fx.Node) -> IndexSet | None:
    demand, seen = region.demand[node], region.seen
    if node.op != "call_function" or demand == seeing.NOTHING or seen.from_batch[node]:
        return None
    if node in seen.attentions:
        return IndexSet(region.space(node).number) if demand.packable else None
    if node in seen.losses:
        if seeing.by_token(node, demand, seen) or not seen.loss_rows:
            return region.tokens(node.args[0])  # type: ignore[arg-type]
        return IndexSet(region.space(node.args[0]).number, loss=seen.losses[node])
    if node in seen.picks or admitted_rule(node, seen) is None:
        return None
    if not demand.packable:
        if node not in seen.zero_at_pads:
            return None
        demand = seeing.TOKENS
    if node in seen.keep_tokens:
        demand = seeing.TOKENS
    tokens = region.tokens(node)
    if demand.loss is not None:
        return IndexSet(tokens.space, loss=demand.loss)
    return tokens if region.packs else None
