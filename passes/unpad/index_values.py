"""Fake tensors, with new size symbols, for the inputs that a packed graph takes in addition to the region's inputs."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import DimDynamic

from deepytorch.passes.base import GraphInput, Role
from deepytorch.passes.unpad.program import IndexInput
from deepytorch.torch_internals import ConstantSource, detect_fake_mode


class IndexValues:
    """The symbols of a packed graph: one for the entries of each set, and one for the longest row of each space.

    sizes: for each space, the placeholder, the dim of rows and the dim of positions that its sizes are read from.
    """

    def __init__(self, sizes: Sequence[tuple[fx.Node, int, int]], shape_env: Any) -> None:
        self._sizes, self._env = sizes, shape_env
        self._counts: dict[Hashable, Any] = {}

    def describe(self, node: fx.Node, index: IndexInput) -> None:
        """Store the value and the role of the placeholder of `index` in `node.meta`."""
        source, rows_dim, positions_dim = self._sizes[index.entries.space]
        batch = source.meta["val"]
        rows, positions = batch.shape[rows_dim], batch.shape[positions_dim]
        dtype = torch.int64
        shape: tuple[Any, ...]
        if index.kind == "cu_seqlens":
            shape, dtype = (rows + 1,), torch.int32
        elif index.kind == "longest":
            shape, dtype = (self._count(("longest", index.entries.space), positions), 0), torch.float32
        elif index.kind == "picked":
            shape = (rows,)
        else:
            shape = (self._count(index.entries, rows * positions),)
        mode = detect_fake_mode(batch)
        assert mode is not None, "a packed graph comes from a trace of fake tensors"
        with mode:
            node.meta["val"] = torch.empty(shape, dtype=dtype, device=batch.device)
        node.meta["input"] = GraphInput(node.name, Role.INDEX)

    def _count(self, what: Hashable, at_most: Any) -> Any:
        """Return a size with its own symbol, whose hint differs from the sizes that it must not be confused with."""
        if what not in self._counts:
            most = at_most.node.hint if isinstance(at_most, torch.SymInt) else at_most
            hint = max(2, most - 1 - len(self._counts))
            source = ConstantSource(f"deepytorch_count_{len(self._counts)}")
            symbol = self._env.create_symbol(
                hint, source, dynamic_dim=DimDynamic.DYNAMIC, do_not_specialize_zero_one=True
            )
            self._counts[what] = self._env.create_symintnode(symbol, hint=hint, source=source)
        return self._counts[what]
