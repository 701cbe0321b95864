"""The interface of a pass: its input (a graph and a context) and its result (a rewrite)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import fx

if TYPE_CHECKING:
    from deepytorch.passes.unpad.program import Program


class Role(Enum):
    """The meaning of a graph input to the model."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    INDEX = "index"  # where tokens stand: an input that a pass added and that the run time feeds
    SIZE = "size"  # an integer that Dynamo made an input: the size of some tensor's dimension


@dataclass(frozen=True)
class GraphInput:
    """One input of a region.

    value: the real tensor of a buffer, whose contents a pass may read.
    """

    name: str
    role: Role
    value: torch.Tensor | None = None


@dataclass
class Context:
    """Facts beyond the graph that a pass may use.

    Each placeholder carries its own description: `node.meta["input"]`, a `GraphInput`.
    """

    shape_env: Any = None  # torch.fx.experimental.symbolic_shapes.ShapeEnv; None where every size is a number
    # The graph ends at a graph break: the model's own code reads the outputs, at pads too.
    ends_in_break: bool = False


@dataclass(frozen=True)
class Decline:
    """One thing that a pass left unchanged.

    where: a node or the region. reason: in a user's words.
    """

    where: str
    reason: str


@dataclass
class Rewrite:
    """The result of a pass on one graph: one line for each change, and everything that was declined.

    program: from a pass that `depends_on_batch`: which batches the graph is for, how the graph is fed, and how its
    outputs are read.
    """

    changes: list[str] = field(default_factory=list)
    declined: list[Decline] = field(default_factory=list)
    program: Program | None = None

    @property
    def fired(self) -> bool:
        """Return whether the pass changed the graph."""
        return bool(self.changes)


@dataclass(frozen=True)
class Pass(ABC):
    """A rewrite of one graph, in place.

    The fields of a pass are its whole configuration, so (class source, fields) is its cache key.
    """

    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    # True if the rewritten graph is valid for some batches only. The original graph is then kept for all other batches,
    # and both graphs are compiled.
    depends_on_batch: ClassVar[bool] = False

    def concerns(self, module: fx.GraphModule) -> bool:
        """Return whether the pass may find something to do in a graph of which only the placeholders have values.

        Computing the values of all nodes takes time. If every later pass answers False, the values of nodes that an
        earlier pass wrote are not computed.
        """
        return True

    @abstractmethod
    def rewrite(self, module: fx.GraphModule, context: Context) -> Rewrite:
        """Rewrite `module.graph`, and return what changed, where, and what was declined and why.

        Every node has a fake tensor in `meta["val"]`. Nodes that the pass writes get theirs before the next pass runs.
        """
