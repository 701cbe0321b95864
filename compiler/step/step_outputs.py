"""The deferred outputs that a region's step hands back, and the computation of each if somebody needs it.

Outputs of a packed step are made from its values, by an epilogue of the graph, or by a padded replay: the step run once
more, padded and in eager. Outputs of a profiled step are computed already, and their uses are noted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.step.batch_facts import Indices
from deepytorch.compiler.step.events import RegionEvents
from deepytorch.compiler.step.kept_weights import PastWeights, listen_to_steps
from deepytorch.compiler.step.outputs.deferred import defer, defer_together, see_autograd_functions
from deepytorch.compiler.step.outputs.pending import Family, Pending
from deepytorch.compiler.step.outputs.replay import Replay
from deepytorch.compiler.step.outputs.rules.operands import pads_of
from deepytorch.compiler.step.outputs.tokens import UNKNOWN, ZERO, Memo, Once, Pads, Place, Tokens
from deepytorch.compiler.step.past import Modes
from deepytorch.passes.samples import Sampler
from deepytorch.passes.unpad.program import IndexInput, IndexSet, Output, OutputMeta, Program


@dataclass(frozen=True, slots=True)
class Begun:
    """A packed step that is about to run: its inputs as they are now, and the padded replay on them."""

    inputs: Sequence[Any]
    replay: Replay | None


class StepOutputs:
    """The maker of the outputs of one region's steps.

    Args:
        program: The packed form's relation to the region's inputs and outputs.
        eager: Runs the region operator by operator.
        events: The events of the region.
        record: The region's record in the report.
        batch: Places of the inputs that belong to the batch.
        parameters: Places of the inputs that are weights.
        written: Places of the inputs that the region writes to.
        draws: Whether the region draws random numbers.
    """

    def __init__(
        self,
        program: Program,
        eager: Callable[..., Any],
        events: RegionEvents,
        record: RegionRecord,
        batch: Sequence[int],
        parameters: Sequence[int],
        written: Sequence[int],
        draws: bool,
    ) -> None:
        self._program, self._eager, self._events, self._record = program, eager, events, record
        self._batch, self._parameters, self._written, self._draws = batch, parameters, written, draws
        self._sampler, self._spread = Sampler(), [Sampler(spread=True) for _ in program.epilogues]
        self._replayed = [
            (number, output.meta)
            for number, output in enumerate(program.outputs)
            if output.kind == "replayed" and output.meta is not None
        ]
        listen_to_steps()
        self.are_deferred = any(output.kind != "value" for output in program.outputs)

    def begin(self, inputs: Sequence[Any]) -> Begun:
        """Keep what the deferred outputs of a packed step may need. To be called right before the step."""
        if not self.are_deferred:
            return Begun(inputs, None)
        see_autograd_functions()
        kept = self._kept(inputs)
        replay = Replay(
            self._eager,
            kept,
            parameters=self._parameters,
            sampler=self._sampler,
            written=self._written,
            draws=self._draws,
        )
        return Begun(kept, replay)

    def packed(self, begun: Begun, values: Sequence[Any], indices: Indices, places: Places) -> tuple[Any, ...]:
        """Return the outputs of a packed step, from the `values` that its graph gave."""
        trains = True in [begun.inputs[index].requires_grad for index in self._parameters]
        taken = _Taken(begun.inputs, values, indices, places, begun.replay, Family(), trains)
        replayed = iter(self._defer_replayed(taken))
        outputs = [
            values[output.index]
            if output.kind == "value"
            else next(replayed)
            if output.kind == "replayed"
            else self._defer(output, place, taken)
            for place, output in enumerate(self._program.outputs)
        ]
        return tuple(outputs)

    def profiled(self, plain: Sequence[Any], places: Places) -> tuple[Any, ...]:
        """Return the outputs of a step in eager, wrapped so that their uses are noted."""
        see_autograd_functions()
        family = Family()
        outputs = list(plain)
        for number, (output, value) in enumerate(zip(self._program.outputs, plain, strict=True)):
            if output.kind == "value" or not isinstance(value, torch.Tensor):
                continue
            assert output.meta is not None
            outputs[number] = defer(
                value.shape,
                partial(_there, value),
                dtype=value.dtype,
                device=value.device,
                requires_grad=value.requires_grad,
                name=output.meta.name,
                tokens=places.of_padded(value, output) if output.entries is not None else None,
                events=self._events,
                family=family,
                profiled=True,
                whole=output.kind == "epilogue" and output.entries is None,
            )
        return tuple(outputs)

    def _kept(self, inputs: Sequence[Any]) -> list[Any]:
        """Return the inputs with ids, masks and labels copied: loops overwrite these with the next batch."""
        kept = list(inputs)
        for index in self._batch:
            given = kept[index]
            if isinstance(given, torch.Tensor) and not given.is_floating_point() and given.numel() <= _SMALL:
                kept[index] = given.clone()
        return kept

    def _defer(self, output: Output, number: int, taken: _Taken) -> torch.Tensor:
        """Return output `number` of the region, deferred."""
        meta = output.meta
        assert meta is not None
        places = taken.places
        if output.kind == "tokens":
            rows = taken.values[output.index]
            tokens = places.later(lambda: rows, output, meta, rows.requires_grad)
            return defer(
                meta.shape(*taken.places.extent),
                (lambda: tokens().padded_with_zeros()) if output.zero_at_pads else self._exact(number, meta, taken),
                dtype=meta.dtype,
                device=rows.device,
                requires_grad=rows.requires_grad,
                name=meta.name,
                tokens=tokens,
                events=self._events,
                family=taken.family,
            )
        return self._defer_epilogue(output, number, taken, places)

    def _defer_epilogue(self, output: Output, number: int, taken: _Taken, places: Places) -> torch.Tensor:
        epilogue, meta, replay = self._program.epilogues[output.index], output.meta, taken.replay
        assert meta is not None
        assert replay is not None
        given = [taken.inputs[index] for index in epilogue.inputs]
        learned = {at: index for at, index in enumerate(epilogue.inputs) if index in self._parameters}
        others = {*self._batch, *epilogue.inputs} - set(learned.values())
        weights = PastWeights(replay.past, list(learned.values()), others, meta.name, self._spread[output.index])
        rest = [taken.values[index] for index in epilogue.values] + [
            taken.indices.get(index) for index in epilogue.indices
        ]
        requires_grad = True in [value.requires_grad for value in (*rest, *weights.given)]

        def compute() -> torch.Tensor:
            arguments = list(given)
            with weights.past.trained_as_it_was():
                for at, weight in zip(learned, weights.then(), strict=True):
                    arguments[at] = weight
                return epilogue.module(*arguments, *rest)[0]

        whole = output.entries is None  # the epilogue gives it whole, else its tokens
        return defer(
            meta.shape(*taken.places.extent),
            compute if whole else self._exact(number, meta, taken),
            dtype=meta.dtype,
            device=rest[0].device,
            requires_grad=requires_grad,
            name=meta.name,
            tokens=None if whole else places.later(Once(compute, grad=requires_grad), output, meta, requires_grad),
            events=self._events,
            family=taken.family,
            whole=whole,
        )

    def _exact(self, number: int, meta: OutputMeta, taken: _Taken) -> Callable[[], torch.Tensor]:
        """Return a function that makes output `number` padded, as eager does, by the padded replay of the step."""
        replay = taken.replay
        assert replay is not None

        def compute() -> torch.Tensor:
            first = not replay.has_run
            found = replay.outputs(meta.name)[number]
            if first:
                self._record.steps_replayed += 1
                self._record.replay_seconds += replay.seconds
            return found

        return compute

    def _defer_replayed(self, taken: _Taken) -> Sequence[torch.Tensor]:
        """Return the outputs that only a padded replay can give, deferred; mostly these are cached keys and values."""
        if not self._replayed:
            return ()
        requires_grad = taken.trains and torch.is_grad_enabled()
        modes, device = Modes(grad=requires_grad), taken.inputs[self._batch[0]].device
        pendings = []
        for number, meta in self._replayed:
            shape, compute = meta.shape(*taken.places.extent), self._exact(number, meta, taken)
            pending = Pending(shape, meta.dtype, device, requires_grad, meta.name, compute, taken.family, modes)
            pending.events = self._events
            pendings.append(pending)
        return defer_together(pendings)


@dataclass(frozen=True, slots=True)
class _Taken:
    """A packed step that has run, for its deferred outputs; each output keeps only the parts it is made from."""

    inputs: Sequence[Any]
    values: Sequence[Any]
    indices: Indices
    places: Places
    replay: Replay | None
    family: Family
    trains: bool  # some weight requires gradients


def _there(value: torch.Tensor) -> torch.Tensor:
    return value


class Places:
    """The places of the tokens of one step's outputs: read from the batch now, the rest is made when one is used."""

    def __init__(self, indices: Indices, sizes: Sequence[tuple[int, int]], outputs: Sequence[Output]) -> None:
        self.sizes, self.extent = sizes, (sizes[0][0], *[positions for _, positions in sizes])
        spaces = {output.entries.space for output in outputs if output.entries is not None}
        self._flat = {space: indices.get(IndexInput("flat", IndexSet(space))) for space in spaces}
        self._known: dict[tuple[IndexSet, bool], Place] = {}

    def of(self, output: Output) -> Place:
        """Return the place of an output's entries."""
        entries = output.entries
        assert entries is not None
        key = (entries, output.merged)
        if key not in self._known:
            rows, positions = self.sizes[entries.space]
            whole = Place((rows, positions), self._flat[entries.space])
            place, _ = whole.sliced(1, entries.offset, positions - entries.cut + entries.offset)
            self._known[key] = place.reshaped((place.size,)) if output.merged else place
        return self._known[key]

    def later(
        self, rows: Callable[[], torch.Tensor], output: Output, meta: OutputMeta, requires_grad: bool
    ) -> Callable[[], Tokens]:
        """Return a function that gives an output's tokens, from packed `rows` that are made when they are needed."""

        def make() -> Tokens:
            place = self.of(output)
            shape, device = meta.shape(*self.extent), place.at.device
            features = tuple(shape[len(place.grid) :])
            pads = ZERO if output.zero_at_pads else UNKNOWN
            packed = Memo(lambda: rows().reshape(place.count, *features))
            return Tokens(place, features, meta.dtype, device, packed, pads, requires_grad=requires_grad)

        return Memo(make)

    def of_padded(self, value: torch.Tensor, output: Output) -> Callable[[], Tokens]:
        """Return a function that gives an output's tokens, from a padded value that is computed already."""

        def make() -> Tokens:
            place = self.of(output)
            features = tuple(value.shape[len(place.grid) :])
            seen = pads_of(value, place)
            pads = seen if output.zero_at_pads else Pads(finite=seen.finite)  # the same is assumed of later steps
            packed = Once(lambda: place.take(value), grad=value.requires_grad)
            return Tokens(place, features, value.dtype, value.device, packed, pads, requires_grad=value.requires_grad)

        return Memo(make)


_SMALL = 1 << 20  # entries of a batch's tensor that is copied for later
