"""The ways to compute a packed step, of which the next one is taken when a step has differed from eager.

[Note: Ladder]
Passes have written the packed graph, and a compiler its code. If a compiled step differs from eager by more than
rounding, the graph is run operator by operator on the same batch. If that agrees, the compiler is to blame: the graph
is compiled once more with strict numerics, and if that differs, too, the region runs padded. Else a pass is to blame.
The graph is tried without the passes behind the one that packs; if it differs still, packing is to blame, and the
region runs padded. Each new way is compared with eager in turn, in its first compiled step. Code for whole batches is
compared likewise (`Guarded`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import fx

from deepytorch.compiler.code.compiled_step import CompiledStep
from deepytorch.compiler.step.second_backward import SecondBackward


class Way(NamedTuple):
    """One way to compute the packed step: its graph, and the code of it, ready for second backwards."""

    graph: fx.GraphModule
    code: CompiledStep
    second: SecondBackward


class Ladder:
    """The ways to compute the packed step of one region.

    Args:
        make: Returns the way for a graph, compiled with strict numerics if asked to; None if there are none.
        planned: The graph that all passes have written.
        alone: The graph without the passes behind the one that packs; None if there are none.
        behind: The names of these passes.

    Attributes:
        way: The way in use.
        compiler_is_to_blame: Whether code of the region's graph differed that agreed operator by operator.
    """

    def __init__(
        self,
        make: Callable[[fx.GraphModule, bool], Way | None],
        planned: fx.GraphModule,
        alone: fx.GraphModule | None = None,
        behind: Sequence[str] = (),
    ) -> None:
        way = make(planned, False)
        assert way is not None
        self.way, self._make = way, make
        self._alone, self._behind, self._is_strict = alone, behind, False
        self.compiler_is_to_blame = False

    def step_down(self, agrees: Callable[[Way], bool | None], *, is_compiled: bool) -> tuple[bool, str]:
        """Take the next way after a step has differed from eager; return whether there is one, and what is done.

        agrees: whether a way agrees with eager on this batch, if its graph runs operator by operator; None if that is
        not known. is_compiled: whether the step that has differed was compiled.
        """
        by_operators: bool | None = False
        if is_compiled:  # operator by operator, parts that are to be computed again would all be kept
            by_operators = None if self.way.code.recomputes else agrees(self.way)
        self.compiler_is_to_blame = bool(by_operators)
        culprit = {True: "the compiler is to blame", None: "what is to blame is not known", False: "a pass is to blame"}
        if by_operators is not False and not self._is_strict:
            strict = self._make(self.way.graph, True)
            if strict is not None:
                self.way, self._is_strict = strict, True
                return True, f"{culprit[by_operators]}, and it is compiled again with strict numerics"
        if not by_operators and self._alone is not None:
            alone, self._alone = self._make(self._alone, self._is_strict), None
            if alone is not None and agrees(alone):
                self.way = alone
                return True, f"{' or '.join(self._behind)} is to blame, and left out"
        return False, "StripPadding is to blame" if by_operators is False else culprit[by_operators]

    def settle(self) -> None:
        """Keep the way in use: it has agreed with eager, and nothing will be compared any more."""
        self._alone = None
