"""The choice of the route that a call of a region takes: one state a region, and one function that chooses.

[Note: Routes]
A region is one graph of Dynamo's. Each call of it takes one of four routes:

    EAGER     the model's own operators, one by one
    PROFILED  the same, with outputs whose uses are noted
    PADDED    compiled, for the batch as it came
    PACKED    compiled, for the tokens of the batch alone

`route` chooses by two things: the region's `State` and the properties of the call that begins (`Call`). Events change
the state, and no event takes it back: what a script did once it may do again. Until the code for a route is compiled
the region runs in eager, packed or padded; `Region` sees to that, and no state changes by it.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Protocol

# The most calls that are profiled while none has had its backward: a script may call a model several times a step.
MAX_PROFILED = 8
# The largest share of tokens with which a packed step, and a padded forward without gradients beside it, beat a padded
# step. A padded step takes as long as three padded forwards; these two as long as 3 * share + 1, a part of it in eager.
MOST_REAL = 0.5


class Route(Enum):
    """The route of one call of a region: see [Note: Routes]."""

    EAGER = "eager"
    PROFILED = "profiled"
    PADDED = "padded"
    PACKED = "packed"


class Uses(IntEnum):
    """The parts of its outputs that a script uses, each with those before.

    TOKENS: what stands at tokens. VALUES: a number over all positions, without gradients, as for a log. PADS: what
    stands at pads, with gradients. GRAPH: the outputs' place in autograd's graph.
    """

    TOKENS = 0
    VALUES = 1
    PADS = 2
    GRAPH = 3


@dataclass(frozen=True, slots=True)
class State:
    """The knowledge of one region from which its routes are chosen.

    Attributes:
        packs: Whether it has a packed form.
        defers: Whether some outputs of the packed form are computed when they are used. Their uses have to be known
            first.
        uses: The most that a script was seen to use of the outputs.
        because: The script's action behind `uses`, for the report.
        profiled: The number of calls that were profiled so far.
        had_backward: Whether a profiled call has had its backward, or has none.
        broken: The routes whose code failed when it ran.
    """

    packs: bool = False
    defers: bool = False
    uses: Uses = Uses.TOKENS
    because: str = ""
    profiled: int = 0
    had_backward: bool = False
    broken: frozenset[Route] = frozenset()

    @property
    def knows_uses(self) -> bool:
        """Return whether the script's uses of the outputs are known, or do not matter."""
        return not self.defers or self.profiled >= MAX_PROFILED or (self.profiled > 0 and self.had_backward)

    # ------------------------------------------------------------------ events

    def used(self, uses: Uses, because: str) -> State:
        """Return the state after a script has used an output. because: the script's action, for the report."""
        return replace(self, uses=uses, because=because) if uses > self.uses else self

    def needs_eager_backward(self, asked: str) -> State:
        """Return the state after a backward was asked for something that compiled code cannot give."""
        return self.used(Uses.GRAPH, f"a backward with {asked}")

    def differed(self) -> State:
        """Return the state after a packed step gave other numbers than eager."""
        return self.used(Uses.PADS, "packed and eager steps differed when compared")

    def profiled_call(self, *, trains: bool) -> State:
        """Return the state after one more profiled call. trains: a backward may go through its outputs."""
        return replace(self, profiled=self.profiled + 1, had_backward=self.had_backward or not trains)

    def backward(self) -> State:
        """Return the state after a profiled call has had its backward."""
        return replace(self, had_backward=True)

    def failed(self, broken: Route) -> State:
        """Return the state after the code of a route failed, and eager did not."""
        return replace(self, broken=self.broken | {broken})


class Call(Protocol):
    """The properties of a call that begins, asked in the order below and only as far as the answer is needed."""

    @property
    def is_forward_mode(self) -> bool:
        """Return whether forward-mode differentiation is on."""
        ...

    @property
    def is_recomputed(self) -> bool:
        """Return whether the call is part of a checkpoint or of a backward, and has to run as it ran before."""
        ...

    @property
    def is_searched(self) -> bool:
        """Return whether DistributedDataParallel looks for unused parameters behind the outputs."""
        ...

    @property
    def refusal(self) -> str | None:
        """Return the reason for which the batch is not packed, None if it is; the batch is read for this."""
        ...

    @property
    def real_share(self) -> float:
        """Return the share of tokens among all positions of a batch that is packed."""
        ...


def route(state: State, call: Call) -> tuple[Route, str]:
    """Return the route of a call, and the reason for which it is no faster one (empty for the fastest)."""
    if call.is_forward_mode:
        return Route.EAGER, "forward-mode differentiation is on"
    if state.defers:
        if call.is_recomputed:
            return Route.EAGER, "under hooks on saved tensors, such as a checkpoint's around the model"
        if call.is_searched:
            return Route.EAGER, "DistributedDataParallel looks for unused parameters behind its outputs"
    if state.uses is Uses.GRAPH and (state.packs or not call.is_recomputed):
        return Route.EAGER, state.because
    if not state.packs:
        why = ""
    elif Route.PACKED in state.broken:
        why = "the packed step failed"
    elif state.uses > Uses.VALUES:
        why = state.because
    else:
        refusal = call.refusal
        if refusal is None and state.uses is Uses.VALUES and call.real_share > MOST_REAL:
            refusal = state.because
        if refusal is None:
            return (Route.PACKED if state.knows_uses else Route.PROFILED), ""
        why = refusal
    return (Route.EAGER if Route.PADDED in state.broken else Route.PADDED), why
