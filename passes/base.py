"""What a pass is, what it is given and what it answers."""

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
    """What a graph input is to the model."""

    PARAMETER = "parameter"
    BUFFER = "buffer"
    BATCH = "batch"
    INDEX = "index"  # where tokens stand: a pass has added it, and the run time feeds it
    SIZE = "size"  # an integer that Dynamo lifted: the size of some tensor's dimension


@dataclass(frozen=True)
class GraphInput:
    """One input of a region. `value` is the real tensor for buffers, whose contents a pass may look at."""

    name: str
    role: Role
    value: torch.Tensor | None = None


@dataclass
class Context:
    """What a pass may know beyond the graph. Placeholders say what they are: `node.meta["input"]`, a `GraphInput`."""

    shape_env: Any = None  # torch.fx.experimental.symbolic_shapes.ShapeEnv; None where every size is a number
    # The rest of the frame sees the outputs: zeros at pads would be seen by the model itself.
    ends_in_break: bool = False


@dataclass(frozen=True)
class Decline:
    """Something a pass left as it was: `where` (a node or a region), and the `reason` in a user's words."""

    where: str
    reason: str


@dataclass
class Rewrite:
    """What a pass did to a graph: one line for each change, and what it declined.

    program: of a pass that `depends_on_batch`: which batches its graph is for, how it is fed and its outputs are read.
    """

    changes: list[str] = field(default_factory=list)
    declined: list[Decline] = field(default_factory=list)
    program: Program | None = None

    @property
    def fired(self) -> bool:
        """Whether the graph is another one now."""
        return bool(self.changes)


@dataclass(frozen=True)
class Pass(ABC):
    """Rewrites one graph in place. Its fields are its whole configuration, so (class source, fields) is its cache
    key.
    """

    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset()
    # The graph is for some batches alone; the one before it is kept for the others, and both are compiled.
    depends_on_batch: ClassVar[bool] = False

    def concerns(self, module: fx.GraphModule) -> bool:
        """Whether there may be something for it in a graph, of which the values of placeholders are known alone.

        Where it is not asked for them, the values of what a pass before it wrote are not computed.
        """
        return True

    @abstractmethod
    def rewrite(self, module: fx.GraphModule, context: Context) -> Rewrite:
        """Rewrite `module.graph` and say what changed, where, and what was declined and why.

        Every node has a fake tensor in `meta["val"]`; what is written here gets one before the next pass runs.
        """
