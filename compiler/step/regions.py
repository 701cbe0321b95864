"""The regions that graphs become: packed, rewritten for every batch alike, or compiled as they are."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Any

from torch import fx

from deepytorch.compiler.code.compiled_step import CompiledStep, recomputes
from deepytorch.compiler.code.lower_region import RegionLowering
from deepytorch.compiler.dynamo.sizes import symbolic_dims
from deepytorch.compiler.dynamo.trace_gate import current_trace
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.events import RegionEvents
from deepytorch.compiler.step.guard import Guard
from deepytorch.compiler.step.guarded import Guarded
from deepytorch.compiler.step.kept_choices import KeptChoice
from deepytorch.compiler.step.ladder import Ladder, Way
from deepytorch.compiler.step.packing import Packing
from deepytorch.compiler.step.region import Compiled, Padded, Region
from deepytorch.compiler.step.route import State
from deepytorch.compiler.step.second_backward import SecondBackward
from deepytorch.compiler.step.step_outputs import StepOutputs
from deepytorch.compiler.step.tuner import STRICT, CompiledForm, Eager, Form, OperatorByOperator, Tuner
from deepytorch.compiler.step.turns import OneProcess
from deepytorch.compiler.step.unused_outputs import Parts, parts_in_outputs
from deepytorch.compiler.step.verification import Verification
from deepytorch.passes.base import GraphInput, Role
from deepytorch.passes.graphs import drop_unread_inputs
from deepytorch.passes.unpad.program import Program


@dataclass(frozen=True)
class Effects:
    """The side effects of a region.

    written: places of the inputs that it writes to. draws: whether it draws random numbers.
    """

    written: tuple[int, ...] = ()
    draws: bool = False


@dataclass(frozen=True)
class Tuning:
    """The choice among the forms of a region that is not packed, see [Note: Tuning].

    turns: the time of each form's trial. kept: the outcome of earlier runs. rewritten: the graph with images whose
    channels are last, for all inputs, to run operator by operator.
    """

    turns: OneProcess
    kept: KeptChoice
    rewritten: fx.GraphModule | None = None


@dataclass(frozen=True)
class Compared:
    """The comparison with eager of what a region that is not packed runs.

    own_weights: whether compiled code is for the model's own weights alone, whose gradients it reduces. every: one of
    so many steps is compared; None: a form's first one only.
    """

    own_weights: bool = False
    every: int | None = None


def packed_region(
    padded: fx.GraphModule,
    packed: fx.GraphModule,
    program: Program,
    inputs: Sequence[GraphInput],
    fakes: Sequence[Any],
    eager: Callable[..., Any],
    lowering: RegionLowering,
    record: RegionRecord,
    effects: Effects,
    *,
    min_padding: float = 0.0,
    verify_every: int | None = None,
    compares_first: bool = False,
    round_sizes: bool = False,
    alone: fx.GraphModule | None = None,
    behind: Sequence[str] = (),
) -> Region:
    """Return a region that strips the padding of its batches.

    Args:
        padded: The region's graph in its padded form.
        packed: The graph in its packed form.
        program: The relation between the inputs and outputs of the two forms.
        inputs: The roles of the inputs.
        fakes: Fake tensors of the inputs.
        eager: Runs the graph operator by operator.
        lowering: The lowering of both forms.
        record: The region's record in the report.
        effects: The side effects of the region.
        min_padding: The share of pads from which on a batch is packed.
        verify_every: One of so many packed steps is compared with eager.
        compares_first: Whether compiled code is compared in its first step anyway, packed or padded.
        round_sizes: Whether packed steps get few sizes only.
        alone: `packed` without the passes behind the one that packs; None if there are none.
        behind: The names of these passes.
    """
    batch = tuple(index for index, given in enumerate(inputs) if given.role is Role.BATCH)
    parameters = tuple(index for index, given in enumerate(inputs) if given.role is Role.PARAMETER)
    defers = any(output.kind != "value" for output in program.outputs)
    events = RegionEvents(record, State(packs=True, defers=defers))
    whole = _WholeBatch.of(padded, fakes, record, events)
    code: Padded | Guarded = whole.compiled(lowering)
    if compares_first:
        code = _guarded(whole, lowering, eager, effects, verify_every)
    varying = [symbolic_dims(fakes[index]) for index in program.packed_inputs] + [(0,)] * len(program.indices)
    rounded = None
    if round_sizes:
        from deepytorch.compiler.step.rounding.step import rounded_step, without_recording  # on a GPU, when asked for

        rounded = rounded_step(packed, program, fakes, lowering, record, events.needs_eager_backward)
        lowering = without_recording(lowering)

    def way(graph: fx.GraphModule, strict: bool) -> Way | None:
        numerics = lowering.strict(graph) if strict else lowering
        if numerics is None:
            return None
        second = SecondBackward((), events.needs_eager_backward, parts_in_outputs(graph.graph))
        return Way(graph, CompiledStep(graph, varying, numerics, record), second)

    outputs = StepOutputs(program, eager, events, record, batch, parameters, effects.written, effects.draws)
    may_compare = not effects.written and not effects.draws
    compares = may_compare and (verify_every is not None or compares_first)
    trace = current_trace()
    packing = Packing(
        program,
        eager,
        Ladder(way, packed, alone, behind),
        rounded,
        outputs,
        record,
        parameters=parameters,
        min_padding=min_padding,
        verification=Verification(verify_every, record) if compares else None,
        packs_in_eager=trace is None or trace.packs_in_eager,
    )
    return Region(eager, code, events, record, packing, meet=lowering.meet, falls_back=not effects.written)


def rewritten_region(
    module: fx.GraphModule,
    fakes: Sequence[Any],
    eager: Callable[..., Any],
    lowering: RegionLowering,
    record: RegionRecord,
    effects: Effects,
    plain: tuple[fx.GraphModule, Sequence[str]] | None = None,
    verify_every: int | None = None,
) -> Region:
    """Return a region whose graph was rewritten for every batch alike.

    Arguments: as for `packed_region`; plain: the graph before it was rewritten, and the names of the passes that have
    done so, where compiled code is compared with eager. verify_every: of one in so many steps, and not the first only.
    """
    events = RegionEvents(record, State())
    whole = _WholeBatch.of(module, fakes, record, events)
    code: Padded | Guarded = whole.compiled(lowering)
    if plain is not None:
        code = _guarded(whole, lowering, eager, effects, verify_every, plain)
    return Region(eager, code, events, record, meet=lowering.meet, falls_back=not effects.written)


def _guarded(
    whole: _WholeBatch,
    lowering: RegionLowering,
    eager: Callable[..., Any],
    effects: Effects,
    every: int | None,
    plain: tuple[fx.GraphModule, Sequence[str]] | None = None,
) -> Guarded:
    """Return the code of a graph, compared with eager. plain: as for `rewritten_region`, None if it is as it was."""

    def strict() -> CompiledForm | None:
        numerics = lowering.strict(whole.module)
        return None if numerics is None else CompiledForm(whole.compiled(numerics), STRICT)

    def without() -> CompiledForm | None:
        if plain is None:
            return None
        before = _WholeBatch.of(plain[0], whole.fakes, whole.record, whole.events)
        return CompiledForm(before.compiled(lowering), f"compiled without {' and '.join(plain[1])}")

    return Guarded(
        CompiledForm(whole.compiled(lowering)),
        None if recomputes(whole.module) else Eager(whole.by_operators),
        strict,
        without,
        Eager(eager),
        Guard(whole.record, own_weights=lowering.gradients is not None, written=effects.written, needs_memory=False),
        whole.record,
        whole.events.has_no_padded_code,
        every,
    )


@dataclass(frozen=True)
class _WholeBatch:
    """A graph for whole batches that takes the inputs of a region that it reads, at the places `reads`."""

    module: fx.GraphModule
    reads: Sequence[int]
    fakes: Sequence[Any]
    record: RegionRecord
    events: RegionEvents

    @classmethod
    def of(
        cls, module: fx.GraphModule, fakes: Sequence[Any], record: RegionRecord, events: RegionEvents
    ) -> _WholeBatch:
        """Return the graph without inputs that it does not read: sizes, mostly. fakes: of all inputs."""
        reads = drop_unread_inputs(module.graph)
        module.recompile()
        return cls(module, reads, fakes, record, events)

    def by_operators(self, *inputs: Any) -> Sequence[Any]:
        """Run it operator by operator, given all inputs of the region."""
        return self.module.forward(*(inputs[index] for index in self.reads))

    def compiled(self, lowering: RegionLowering) -> Padded:
        """Return its code, to be compiled once it is polled or called."""
        varying = [symbolic_dims(self.fakes[index]) for index in self.reads]
        code = CompiledStep(self.module, varying, lowering, self.record)
        second = SecondBackward((), self.events.needs_eager_backward, parts_in_outputs(self.module.graph))
        return Padded(code, self.reads, second, self.module.forward, takes_read=True)


def whole_region(
    later: fx.GraphModule,
    eager: Callable[..., Any],
    lowering: RegionLowering,
    record: RegionRecord,
    unread: Collection[int] = (),
    parts: Parts | None = None,
    tuning: Tuning | None = None,
    compared: Compared | None = None,
) -> Region:
    """Return a region whose graph is compiled in the background, unchanged, as stock would compile it.

    Args:
        later: The graph as `graph_for_later` gives it, for the region to keep.
        eager: Runs the graph operator by operator.
        lowering: The lowering of the graph.
        record: The region's record in the report.
        unread: As for `SecondBackward`, of all inputs.
        parts: Likewise.
        tuning: The choice among this and other forms; None: compiled code runs once it is there.
        compared: Its comparison with eager; None if there is to be none, and no choice.
    """
    placeholders = [node for node in later.graph.nodes if node.op == "placeholder"]
    fakes = [node.meta.get("example_value", node.meta.get("val")) for node in placeholders]
    reads = drop_unread_inputs(later.graph)
    later.recompile()
    varying, numerics = [symbolic_dims(fakes[index]) for index in reads], lowering.strict(later)
    code = CompiledStep(later, varying, lowering, record)
    strict = None if numerics is None else CompiledStep(later, varying, numerics, record)
    return _as_it_is(code, reads, eager, lowering, record, unread, parts, tuning, compared, strict)


def compiled_region(
    compiled: Callable[..., Sequence[Any]],
    num_inputs: int,
    eager: Callable[..., Any],
    lowering: RegionLowering,
    record: RegionRecord,
    unread: Collection[int] = (),
    parts: Parts | None = None,
    tuning: Tuning | None = None,
    compared: Compared | None = None,
) -> Region:
    """Return a region whose unchanged graph is compiled already. Arguments: as for `whole_region`."""
    return _as_it_is(Compiled(compiled), range(num_inputs), eager, lowering, record, unread, parts, tuning, compared)


def _as_it_is(
    code: CompiledStep | Compiled,
    reads: Sequence[int],
    eager: Callable[..., Any],
    lowering: RegionLowering,
    record: RegionRecord,
    unread: Collection[int],
    parts: Parts | None,
    tuning: Tuning | None,
    compared: Compared | None,
    strict: CompiledStep | None = None,
) -> Region:
    events = RegionEvents(record, State())

    def padded(code: CompiledStep | Compiled) -> Padded:
        second = SecondBackward(unread, events.needs_eager_backward, parts)
        return Padded(code, reads, second, eager, takes_read=False)

    if compared is None:
        return Region(eager, padded(code), events, record, meet=lowering.meet)
    written = frozenset() if parts is None else parts.written
    guard = Guard(record, own_weights=compared.own_weights, written=written, needs_memory=tuning is not None)
    with_strict = None if strict is None else CompiledForm(padded(strict), STRICT)
    if tuning is None:
        guarded = Guarded(
            CompiledForm(padded(code)),
            None,
            lambda: with_strict,
            lambda: None,
            Eager(eager),
            guard,
            record,
            events.has_no_padded_code,
            compared.every,
        )
        return Region(eager, guarded, events, record, meet=lowering.meet)
    forms: list[Form] = [] if tuning.rewritten is None else [OperatorByOperator("channels last", tuning.rewritten)]
    plain, compiled = Eager(eager), CompiledForm(padded(code))
    is_compiled = isinstance(code, Compiled)
    tuner = Tuner(
        plain,
        [*forms, plain if is_compiled else compiled],
        guard,
        record,
        tuning.turns,
        compiled if is_compiled else None,
        tuning.kept,
        compared.every,
        with_strict,
    )
    return Region(eager, tuner, events, record, meet=lowering.meet)
