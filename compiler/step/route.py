"""Which route a call of a region takes, and why: one state a region, and one function that chooses.

[Note: Routes]
A region is one graph of Dynamo's. Each call of it takes one of four routes:

    EAGER     the model's own operators, one by one
    PROFILED  the same, with outputs whose uses are noted
    PADDED    compiled, for the batch as it came
    PACKED    compiled, for the tokens of the batch alone

`route` chooses from two things: the region's `State`, which events change and which never goes back (what a script did
once it may do again), and what `Call` tells of the call that begins. Until the code for a route is compiled the region
runs in eager, packed or padded: that is `Region`'s, and changes no state.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, IntEnum
from typing import Protocol

# A script may call a model several times a step: so many calls are profiled at most while none has had its backward.
MAX_PROFILED = 8


class Route(Enum):
    """How one call of a region runs."""

    EAGER = "eager"
    PROFILED = "profiled"
    PADDED = "padded"
    PACKED = "packed"


class Uses(IntEnum):
    """How much of its outputs a script uses: their tokens, their pads too, or their place in autograd's graph."""

    TOKENS = 0
    PADS = 1
    GRAPH = 2


@dataclass(frozen=True, slots=True)
class State:
    """What is known of one region.

    packs: it has a packed form.
    defers: some outputs of that form are computed when they are used. profiles: so their uses have to be known first.
    uses: the most that a script was seen to use of the outputs. because: what it did.
    profiled: calls that were profiled so far. had_backward: one of these has had its backward, or has none.
    broken: the routes whose code failed when it ran.
    """

    packs: bool = False
    defers: bool = False
    profiles: bool = False
    uses: Uses = Uses.TOKENS
    because: str = ""
    profiled: int = 0
    had_backward: bool = False
    broken: frozenset[Route] = frozenset()

    @property
    def is_profiled(self) -> bool:
        """Whether it is known how a script uses the outputs, or does not matter."""
        return not self.profiles or self.profiled >= MAX_PROFILED or (self.profiled > 0 and self.had_backward)

    # ------------------------------------------------------------------ events

    def used(self, uses: Uses, because: str) -> State:
        """Return the state after a script has used an output so."""
        return replace(self, uses=uses, because=because) if uses > self.uses else self

    def double_backward(self, asked: str) -> State:
        """Return the state after a backward was asked for what compiled code cannot give."""
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
    """What is asked of a call that begins, in the order below, and only as far as the answer is needed."""

    @property
    def is_forward_mode(self) -> bool:
        """Whether forward-mode differentiation is on."""
        ...

    @property
    def is_recomputed(self) -> bool:
        """Whether the call is part of a checkpoint, or of a backward, and has to run as it ran before."""
        ...

    @property
    def is_searched(self) -> bool:
        """Whether DistributedDataParallel looks for unused parameters behind the outputs."""
        ...

    @property
    def refusal(self) -> str | None:
        """Why this batch is not packed, if it is not: the batch is read for this."""
        ...


def route(state: State, call: Call) -> tuple[Route, str]:
    """Return the route of a call, and why it is no faster one (empty for the fastest)."""
    if call.is_forward_mode:
        return Route.EAGER, "forward-mode differentiation is on"
    if state.defers:
        if call.is_recomputed:
            return Route.EAGER, "under hooks on saved tensors, such as a checkpoint's around the model"
        if call.is_searched:
            return Route.EAGER, "DistributedDataParallel looks for unused parameters behind its outputs"
    if state.uses is Uses.GRAPH and not call.is_recomputed:
        return Route.EAGER, state.because
    why = _why_not_packed(state, call)
    if why is None:
        return (Route.PACKED if state.is_profiled else Route.PROFILED), ""
    return (Route.EAGER if Route.PADDED in state.broken else Route.PADDED), why


def _why_not_packed(state: State, call: Call) -> str | None:
    if not state.packs:
        return ""
    if Route.PACKED in state.broken:
        return "the packed step failed"
    return state.because if state.uses is not Uses.TOKENS else call.refusal
