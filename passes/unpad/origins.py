"""Origins: which inputs a token value follows, position by position, such as embedded ids or given embeddings.

Two sequences that a model forces to one length share the symbol of their positions, but are still two sequences: a pad
of the source is no pad of the target. The origins of their values tell the two apart. An attention passes on the
origins of its queries: each query keeps its position, whichever keys it attends to.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import fx

from deepytorch.passes.base import Role
from deepytorch.passes.slicing import Slicer
from deepytorch.passes.unpad.attentions import Attention
from deepytorch.passes.unpad.layout import Layout, is_token

Origins = frozenset[fx.Node]


def origins(
    graph: fx.Graph, known: Mapping[fx.Node, Layout], attentions: Iterable[Attention], slicer: Slicer
) -> dict[fx.Node, Origins]:
    """Return the batch inputs that every value of the model follows token by token; an empty set if there is none."""
    query_of = {attention.output: attention.query for attention in attentions}
    found: dict[fx.Node, Origins] = {}
    of_batch: dict[fx.Node, Origins] = {}
    for node in graph.nodes:
        if node.op == "placeholder":
            found[node] = frozenset([node]) if node.meta["input"].role is Role.BATCH else frozenset()
        elif slicer.from_batch(node):
            found[node] = frozenset()
        elif node in query_of:
            found[node] = found[query_of[node]]
        else:
            merged: Origins = frozenset()
            for source in node.all_input_nodes:
                if not _has_tokens(source, known):
                    continue
                if slicer.from_batch(source):
                    if source not in of_batch:
                        read = slicer.inputs_read([source])
                        of_batch[source] = frozenset(leaf for leaf in read if leaf.meta["input"].role is Role.BATCH)
                    merged |= of_batch[source]
                else:
                    merged |= found[source]
            found[node] = merged
    return found


def are_one_sequence(all_origins: Iterable[Origins]) -> bool:
    """Return whether values with these origins belong together, linked to each other by a chain of shared inputs."""
    groups: list[Origins] = []
    for each in filter(None, all_origins):
        touching = [group for group in groups if group & each]
        groups = [group for group in groups if not group & each] + [each.union(*touching)]
    return len(groups) <= 1


def _has_tokens(node: fx.Node, known: Mapping[fx.Node, Layout]) -> bool:
    value = node.meta.get("val")
    return is_token(known.get(node)) if isinstance(value, torch.Tensor) else isinstance(value, (list, tuple))
