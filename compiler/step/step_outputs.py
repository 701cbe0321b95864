"""The deferred outputs that a region's step hands back, and the computation of each if somebody needs it.

Outputs of a packed step are made from its values, by an epilogue of the graph, or by a padded replay: the step run once
more, padded and in eager. Outputs of a profiled step are computed already, and their uses are noted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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
from deepytorch.passes.unpad.program import Epilogue, IndexInput, IndexSet, Output, OutputMeta, Program


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

    Attributes:
        are_deferred: Whether some outputs of a packed step are deferred.
        flat: For each space of the outputs, the index input with the places of its tokens.
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
        self._sampler = Sampler()
        self._epilogues = [self._reads(each) for each in program.epilogues]
        self._replayed = [
            (number, output.meta)
            for number, output in enumerate(program.outputs)
            if output.kind == "replayed" and output.meta is not None
        ]
        spaces = {output.entries.space for output in program.outputs if output.entries is not None}
        self.flat = {space: IndexInput("flat", IndexSet(space)) for space in spaces}
        listen_to_steps()
        self.are_deferred = any(output.kind != "value" for output in program.outputs)

    def _reads(self, epilogue: Epilogue) -> _Reads:
        weights = {at: place for at, place in enumerate(epilogue.inputs) if place in self._parameters}
        others = {*self._batch, *epilogue.inputs} - set(weights.values())
        return _Reads(epilogue, weights, others, Sampler(spread=True))

    def begin(self, inputs: Sequence[Any]) -> Begun:
        """Keep what the deferred outputs of a packed step may need. To be called right before the step."""
        if not self.are_deferred:
            return Begun(inputs, None)
        see_autograd_functions()
        kept = list(inputs)
        for index in self._batch:
            given = kept[index]
            if isinstance(given, torch.Tensor) and not given.is_floating_point() and given.numel() <= _SMALL:
                kept[index] = given.clone()  # ids, masks and labels: loops overwrite these with the next batch
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
        replay = begun.replay
        modes = {} if replay is None else {torch.is_grad_enabled(): replay.past.modes}
        taken = _Taken(begun.inputs, values, indices, places, replay, Family(), modes)
        replayed = iter(self._defer_replayed(taken) if self._replayed else ())
        outputs = []
        for number, output in enumerate(self._program.outputs):
            if output.kind == "value":
                outputs.append(values[output.index])
            elif output.kind == "replayed":
                outputs.append(next(replayed))
            elif output.kind == "tokens":
                outputs.append(self._defer_tokens(output, number, taken))
            else:
                outputs.append(self._defer_epilogue(output, number, taken))
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

    def _defer_tokens(self, output: Output, number: int, taken: _Taken) -> torch.Tensor:
        """Return output `number` of the region, whose tokens the packed graph gave, deferred."""
        meta, rows = output.meta, taken.values[output.index]
        assert meta is not None
        tokens = taken.places.later(lambda: rows, output, meta, rows.requires_grad)
        return defer(
            meta.sizes_of(*taken.places.extent),
            (lambda: tokens().padded_with_zeros()) if output.zero_at_pads else self._exact(number, meta, taken),
            dtype=meta.dtype,
            device=rows.device,
            requires_grad=rows.requires_grad,
            name=meta.name,
            tokens=tokens,
            events=self._events,
            family=taken.family,
            modes=taken.modes.get(rows.requires_grad),
        )

    def _defer_epilogue(self, output: Output, number: int, taken: _Taken) -> torch.Tensor:
        """Return output `number` of the region, which an epilogue computes, deferred."""
        reads, meta, replay = self._epilogues[output.index], output.meta, taken.replay
        assert meta is not None
        assert replay is not None
        epilogue, places = reads.epilogue, taken.places
        given = list(map(taken.inputs.__getitem__, epilogue.inputs))
        weights = PastWeights(replay.past, list(reads.weights.values()), reads.others, meta.name, reads.sampler)
        rest = [*map(taken.values.__getitem__, epilogue.values), *taken.indices.all_of(epilogue.indices)]
        requires_grad = torch.is_grad_enabled() and True in [each.requires_grad for each in (*rest, *weights.given)]
        modes = taken.modes.get(requires_grad) or Modes(requires_grad)

        def compute() -> torch.Tensor:
            arguments = list(given)
            with weights.past.trained_as_it_was():
                for at, weight in zip(reads.weights, weights.then(), strict=True):
                    arguments[at] = weight
                return epilogue.module(*arguments, *rest)[0]

        whole = output.entries is None  # the epilogue gives it whole, else its tokens
        return defer(
            meta.sizes_of(*places.extent),
            compute if whole else self._exact(number, meta, taken),
            dtype=meta.dtype,
            device=rest[0].device,
            requires_grad=requires_grad,
            name=meta.name,
            tokens=None if whole else places.later(Once(compute, modes), output, meta, requires_grad),
            events=self._events,
            family=taken.family,
            whole=whole,
            modes=modes,
        )

    def _exact(self, number: int, meta: OutputMeta, taken: _Taken) -> Callable[[], torch.Tensor]:
        """Return a function that makes output `number` padded, as eager does, by the padded replay of the step."""
        assert taken.replay is not None
        return partial(self._replayed_output, taken.replay, number, meta.name)

    def _replayed_output(self, replay: Replay, number: int, name: str) -> torch.Tensor:
        known, seconds = replay.has_run, replay.seconds
        found: torch.Tensor = replay.outputs(name)[number]
        self._record.steps_replayed += not known
        self._record.replay_seconds += replay.seconds - seconds
        return found

    def _defer_replayed(self, taken: _Taken) -> Sequence[torch.Tensor]:
        """Return the outputs that only a padded replay can give, deferred; mostly these are cached keys and values."""
        assert taken.replay is not None
        requires_grad = torch.is_grad_enabled() and True in [taken.inputs[at].requires_grad for at in self._parameters]
        modes, device = taken.modes.get(requires_grad), taken.inputs[self._batch[0]].device
        extent, family, replay = taken.places.extent, taken.family, taken.replay
        pendings = []
        for number, meta in self._replayed:
            shape = tuple(map(int, meta.sizes_of(*extent)))
            compute = partial(self._replayed_output, replay, number, meta.name)
            pending = Pending(shape, meta.dtype, device, requires_grad, meta.name, compute, family, modes)
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
    modes: dict[bool, Modes]  # of the step, by the grad mode in them


@dataclass(frozen=True, slots=True)
class _Reads:
    """An epilogue, with the inputs of the region that it reads.

    weights: for each weight among the epilogue's inputs its place there, with its place among the region's inputs.
    others: the places of the region's inputs that must not have changed when the epilogue runs.
    """

    epilogue: Epilogue
    weights: dict[int, int]
    others: set[int]
    sampler: Sampler


def _there(value: torch.Tensor) -> torch.Tensor:
    return value


class Places:
    """The places of the tokens of one step's outputs: read from the batch now, the rest is made when one is used."""

    def __init__(self, indices: Indices, sizes: Sequence[tuple[int, int]], flat: Mapping[int, IndexInput]) -> None:
        """Read the places. flat: the index input of each space's tokens: `StepOutputs.flat`."""
        self.sizes, self.extent = sizes, (sizes[0][0], *[positions for _, positions in sizes])
        self._flat = dict(zip(flat, indices.all_of(list(flat.values())), strict=True))
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
            packed = Once(lambda: place.take(value), Modes(value.requires_grad))
            return Tokens(place, features, value.dtype, value.device, packed, pads, requires_grad=value.requires_grad)

        return Memo(make)


_SMALL = 1 << 20  # entries of a batch's tensor that is copied for later
