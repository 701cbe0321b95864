"""Which inputs a token value follows, position by position: the ids that were embedded, the embeddings that were given.

Two sequences that a model forces to one length share the symbol of their positions, and are two sequences all the same:
a pad of the source is none of the target. What tells them apart is where their values come from. An attention passes on
the origins of its queries: each query keeps its position, whatever keys it has looked at.
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
    """The batch inputs that every value of the model follows token by token; empty where there is none."""
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
    """Whether values with these origins belong together: each shares an input with another, and so on."""
    groups: list[Origins] = []
    for each in filter(None, all_origins):
        touching = [group for group in groups if group & each]
        groups = [group for group in groups if not group & each] + [each.union(*touching)]
    return len(groups) <= 1


def _has_tokens(node: fx.Node, known: Mapping[fx.Node, Layout]) -> bool:
    value = node.meta.get("val")
    return is_token(known.get(node)) if isinstance(value, torch.Tensor) else isinstance(value, (list, tuple))
