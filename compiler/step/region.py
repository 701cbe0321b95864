"""The region, which Dynamo calls in place of one of its graphs: each call takes the route that `route` chooses.

The forms of a graph are compiled at their first use, each by a nested `torch.compile` with guards of its own. So a size
that varies from batch to batch (the number of tokens) is symbolic without a change to Dynamo's graph around it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.batch_facts import Facts, Indices, Refusal
from deepytorch.compiler.step.events import RegionEvents
from deepytorch.compiler.step.guarded import Guarded
from deepytorch.compiler.step.outputs.deferred import must_be_plain
from deepytorch.compiler.step.packing import Packing
from deepytorch.compiler.step.route import Route, route
from deepytorch.compiler.step.second_backward import SecondBackward
from deepytorch.compiler.step.step_outputs import Places
from deepytorch.compiler.step.tuner import Tuner
from deepytorch.torch_internals import (
    current_graph_task_id,
    forward_ad_level,
    get_active_ddp_module,
    top_saved_tensors_default_hooks,
)

_KEEPS_MORE = "it is being compiled, and operator by operator would keep what is to be computed again"
_TAKES_LONGER = "it is being compiled, and packing takes longer than it saves until then"


class Code(Protocol):
    """Compiled code of a graph, or code that is being compiled."""

    def poll(self, arguments: Sequence[Any]) -> bool:
        """Advance the compilation; return whether a call with these arguments runs compiled code now."""
        ...

    def __call__(self, arguments: Sequence[Any]) -> Sequence[Any]:
        """Run the code."""
        ...


class Compiled:
    """Code that is compiled already."""

    def __init__(self, function: Callable[..., Sequence[Any]]) -> None:
        self._function = function

    def poll(self, arguments: Sequence[Any]) -> bool:
        return True

    def __call__(self, arguments: Sequence[Any]) -> Sequence[Any]:
        return self._function(*arguments)


class Padded:
    """The compiled form of a graph for the batch as it came, ready for second backwards.

    reads: the places of the inputs that `code` takes. again: gives the same outputs in eager. takes_read: whether
    `again` takes the inputs in `reads` only, and not all of them.
    """

    def __init__(
        self,
        code: Code,
        reads: Sequence[int],
        second: SecondBackward,
        again: Callable[..., Sequence[Any]],
        *,
        takes_read: bool,
    ) -> None:
        self._code, self._reads, self._second = code, reads, second
        self._again, self._takes_read = again, takes_read

    def poll(self, inputs: Sequence[Any]) -> bool:
        """Advance the compilation; return whether the code is compiled."""
        return self._code.poll([inputs[index] for index in self._reads])

    def __call__(self, inputs: Sequence[Any]) -> Sequence[Any]:
        """Run the compiled code, or eager if no second backward could be made ready."""
        arguments = [inputs[index] for index in self._reads]
        if self._takes_read:
            return self._second.run(self._code, arguments, self._again, arguments)
        return self._second.run(self._code, arguments, self._again, inputs, lets_go=True)


class Region:
    """The callable that Dynamo calls in place of one of its graphs.

    eager: runs the graph operator by operator, as the model has it. falls_back: whether a call whose code fails
    is run again (packed code padded, padded code in eager); False if the code may have written to its inputs, or if
    that is not known. meet: given the data-parallel module in whose forward a call runs.
    """

    def __init__(
        self,
        eager: Callable[..., Any],
        padded: Padded | Guarded | Tuner,
        events: RegionEvents,
        record: RegionRecord,
        packing: Packing | None = None,
        *,
        meet: Callable[[Any], None],
        falls_back: bool = False,
    ) -> None:
        self._eager, self._padded, self._packing = eager, padded, packing
        self._events, self._record, self._falls_back, self._meet = events, record, falls_back, meet

    def __call__(self, *inputs: Any) -> Sequence[Any]:
        """Run one call of the region."""
        started = time.perf_counter()
        ddp = get_active_ddp_module()
        if ddp is not None:
            self._meet(ddp)
        call = _Call(self._packing, inputs)
        chosen, why = route(self._events.state, call)
        self._record.route = chosen.value
        if chosen is Route.EAGER:
            return self._run_eager(inputs, why)
        if chosen is Route.PADDED:
            if call.facts is not None:
                self._record.host_seconds += time.perf_counter() - started
            return self._run_padded(inputs, why)
        assert self._packing is not None
        facts = call.facts
        assert isinstance(facts, Facts)
        return self._run_tokens(self._packing, inputs, facts, chosen, started)

    # ------------------------------------------------------------------ padded and in eager

    def _run_eager(self, inputs: Sequence[Any], why: str) -> tuple[Any, ...]:
        self._count(why)
        return tuple(self._eager(*inputs))

    def _run_padded(self, inputs: Sequence[Any], why: str) -> tuple[Any, ...]:
        self._count(why)
        if Route.PADDED in self._events.state.broken:  # after a failed packed step, without asking `route`
            return tuple(self._eager(*inputs))
        if not self._padded.poll(inputs):
            self._record.steps_meanwhile += 1
            return tuple(self._eager(*inputs))
        try:
            return tuple(self._padded(inputs))
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:
            if not self._falls_back:
                raise
            outputs = tuple(self._eager(*inputs))
            self._events.failed(Route.PADDED, error, "" if self._packing is not None else "rewritten")
            return outputs

    def _count(self, why: str) -> None:
        if self._packing is not None:
            self._record.steps_padded += 1
            self._record.padded_because[why] = self._record.padded_because.get(why, 0) + 1

    # ------------------------------------------------------------------ the tokens of the batch

    def _run_tokens(
        self, packing: Packing, inputs: Sequence[Any], facts: Facts, chosen: Route, started: float
    ) -> tuple[Any, ...]:
        """Run a call on its tokens, or profile it.

        started: the time by `time.perf_counter` at which the host began to work for this call.
        """
        indices = Indices(facts)
        places = Places(indices, facts.sizes, packing.outputs.flat)
        if chosen is Route.PROFILED:
            plain = tuple(self._eager(*inputs))
            self._record.steps_profiled += 1
            self._events.profiled(plain)
            return packing.outputs.profiled(plain, places)
        call = packing.call(inputs, facts, indices)
        while True:
            is_compiled = call.code.poll(call.arguments)
            if not is_compiled:
                self._record.steps_meanwhile += 1
                if call.code.recomputes or not packing.packs_in_eager:
                    return self._run_eager(inputs, _KEEPS_MORE if call.code.recomputes else _TAKES_LONGER)
            if packing.takes_turn_to_verify(is_compiled=is_compiled):
                difference = packing.difference(inputs, places, call, is_compiled=is_compiled)
                started = time.perf_counter()
                if difference:
                    if not packing.step_down(difference, inputs, places, call, is_compiled=is_compiled):
                        self._events.differed()
                        if packing.compiler_is_to_blame and not isinstance(self._padded, Guarded):
                            self._events.has_no_padded_code()  # nothing compares it
                        return self._run_padded(inputs, self._events.state.because)
                    call, started = packing.call(inputs, facts, indices), time.perf_counter()
                    continue
            try:
                return packing.run(call, inputs, indices, places, started, is_compiled=is_compiled)
            except (torch.OutOfMemoryError, KeyboardInterrupt):
                raise
            except Exception as error:
                if packing.gives_up_rounding(call, error):  # a rounded step writes to no input: it can be run again
                    call, started = packing.call(inputs, facts, indices), time.perf_counter()
                    continue
                if not self._falls_back:
                    raise
                self._events.failed(Route.PACKED, error)
                return self._run_padded(inputs, "the packed step failed")


class _Call:
    """The properties that `route` asks of a call that begins."""

    def __init__(self, packing: Packing | None, inputs: Sequence[Any]) -> None:
        self._packing, self._inputs = packing, inputs
        self.facts: Facts | Refusal | None = None  # of the batch; None until `refusal` has read it

    @property
    def is_forward_mode(self) -> bool:
        return forward_ad_level() >= 0

    @property
    def is_recomputed(self) -> bool:
        return top_saved_tensors_default_hooks(True) is not None or current_graph_task_id() != -1

    @property
    def is_searched(self) -> bool:
        return must_be_plain()

    @property
    def refusal(self) -> str | None:
        if self.facts is None:
            assert self._packing is not None
            self.facts = self._packing.read(self._inputs)
        return self.facts.reason if isinstance(self.facts, Refusal) else None

    @property
    def real_share(self) -> float:
        assert isinstance(self.facts, Facts)
        return sum(self.facts.tokens) / self.facts.num_positions
