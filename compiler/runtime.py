"""One step of a packed region: look at the batch, choose the packed or the padded step, hand its outputs back.

The first step runs in eager, and what is done with its outputs is watched (`usage`): a region whose outputs are looked
at where their pads are never runs packed, and one whose outputs are asked for gradients goes on in eager.

The two steps are compiled at their first use, each by a nested `torch.compile` with guards of its own, so that a size
that varies from batch to batch (the number of tokens) is symbolic without touching Dynamo's graph around it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx

from deepytorch.compiler.batch_facts import Facts, Indices, Refusal, read_facts
from deepytorch.compiler.dynamic_sizes import mark_alias, symbolic_dims
from deepytorch.compiler.outputs.deferred import defer
from deepytorch.compiler.outputs.kept_weights import Kept
from deepytorch.compiler.outputs.pending import Family
from deepytorch.compiler.outputs.replay import Replay
from deepytorch.compiler.outputs.tokens import UNKNOWN, ZERO, Memo, Once, Place, Tokens
from deepytorch.compiler.outputs.usage import Level, Usage
from deepytorch.compiler.report import RegionRecord
from deepytorch.compiler.second_backward import SecondBackward
from deepytorch.compiler.unused_outputs import parts_in_outputs
from deepytorch.compiler.verification import Verification
from deepytorch.errors import DeferredError
from deepytorch.log import logger, once
from deepytorch.passes.base import GraphInput, Role
from deepytorch.passes.samples import Sampler
from deepytorch.passes.unpad.program import IndexInput, IndexSet, Output, OutputMeta, Program

Lower = Callable[[fx.GraphModule, Sequence[Any]], Callable[..., Any]]

# A packed step that saves less than this share of the padded step's work is not worth its gathers.
MIN_SAVING = 0.02

# Calls that are watched at most while none of them has had its backward: a step may call a model several times.
MAX_WATCHED = 8

_SMALL = 1 << 20  # entries of a batch's tensor that is copied for later


class CompiledStep:
    """A graph that is compiled at its first call, with the sizes that vary marked.

    `varying`: for every argument the dimensions that vary from batch to batch.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        varying: Sequence[tuple[int, ...]],
        lower: Lower,
        record: RegionRecord,
        second: SecondBackward,
    ) -> None:
        self._module, self._varying, self._lower, self._record = module, varying, lower, record
        self._second = second
        self._compiles = 0
        self._compiled: Callable[..., Any] | None = None

    def __call__(self, arguments: list[Any], again: Callable[..., Sequence[Any]] | None = None) -> Sequence[Any]:
        """Run the step. `again` gives the same outputs of the same arguments in eager, for a second backward; the
        step's own graph does where it is None.
        """
        call = self._second.begin(arguments, again or self._module.forward)
        outputs = self._run(arguments)
        self._second.watch(call, outputs)
        return outputs

    def _run(self, arguments: list[Any]) -> Sequence[Any]:
        if self._compiled is None:
            # Dynamo never enters code that was generated while it was compiling, so it is generated again.
            self._module.recompile()
            compiled = torch.compile(self._module.forward, backend=self._backend, fullgraph=True)
            arguments = [
                mark_alias(value, dims) if dims else value for value, dims in zip(arguments, self._varying, strict=True)
            ]
            started = time.perf_counter()
            outputs = compiled(*arguments)
            self._compiled = compiled
            self._record.compile_seconds += time.perf_counter() - started
            return outputs
        return self._compiled(*arguments)

    def _backend(self, module: fx.GraphModule, example_inputs: Sequence[Any]) -> Callable[..., Any]:
        self._record.compiles += 1
        if self._compiles:
            self._record.recompiles += 1
        self._compiles += 1
        _carry_tags(self._module.graph, module.graph)
        return self._lower(module, example_inputs)


def _carry_tags(source: fx.Graph, traced: fx.Graph) -> None:
    """Give the tags of activation checkpointing to Dynamo's trace of `source`, which went through generated code."""
    tagged, untagged = _operator_calls(source), _operator_calls(traced)
    if not any("recompute" in node.meta for node in tagged):
        return
    if [node.target for node in tagged] != [node.target for node in untagged]:
        once(logging.WARNING, "activation checkpointing was lost on the way: more memory may be used")
        return
    for node, other in zip(tagged, untagged, strict=True):
        for name in ("recompute", "ac_graph_id"):
            if name in node.meta:
                other.meta[name] = node.meta[name]


def _operator_calls(graph: fx.Graph) -> list[fx.Node]:
    sizes = torch.ops.aten.sym_size.int
    return [n for n in graph.nodes if isinstance(n.target, torch._ops.OpOverload) and n.target is not sizes]


@dataclass(frozen=True)
class Effects:
    """What a region does besides computing its outputs. written: the inputs that it writes to. draws: whether it draws
    random numbers.
    """

    written: tuple[int, ...] = ()
    draws: bool = False


class RewrittenStep:
    """What Dynamo calls in place of a region that was rewritten for every batch alike."""

    def __init__(
        self,
        module: fx.GraphModule,
        fakes: Sequence[Any],
        eager: Callable[..., Any],
        lower: Lower,
        record: RegionRecord,
        effects: Effects,
        leaves_unused: bool = True,
    ) -> None:
        """fakes, leaves_unused: as `Step` takes them."""
        self._eager, self._effects, self._record, self._failed = eager, effects, record, False
        self._inputs = _read_inputs(module, len(fakes))
        self._usage = Usage(record.name)
        second = SecondBackward((), self._usage.twice, parts_in_outputs(module.graph) if leaves_unused else None)
        varying = [symbolic_dims(fakes[index]) for index in self._inputs]
        self._step = CompiledStep(module, varying, lower, record, second)

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run one step of the region."""
        if self._failed or self._usage.level is Level.EAGER:
            return tuple(self._eager(*inputs))
        try:
            return tuple(self._step([inputs[index] for index in self._inputs]))
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:
            if self._effects.written:
                raise
            _fell_back(self._record, "rewritten", error)
            outputs = tuple(self._eager(*inputs))
            self._failed = True  # eager went through, so the batch was not to blame
            return outputs


def _fell_back(record: RegionRecord, step: str, error: Exception) -> None:
    message = f"{record.name}: the {step} step failed with {type(error).__name__}: {str(error)[:500]}"
    record.fallbacks.append(message)
    once(logging.WARNING, "%s; going on without it", message)
    logger.debug("traceback of the failure", exc_info=error)


class Step:
    """What Dynamo calls in place of a packed region."""

    def __init__(
        self,
        padded: fx.GraphModule,
        packed: fx.GraphModule,
        program: Program,
        inputs: Sequence[GraphInput],
        fakes: Sequence[Any],
        eager: Callable[..., Any],
        lower: Lower,
        record: RegionRecord,
        effects: Effects,
        min_padding: float = 0.0,
        zero_outputs: bool = False,
        leaves_unused: bool = True,
        verify_every: int | None = None,
    ) -> None:
        """leaves_unused: whether weights of outputs that nobody used get no gradient, as in eager. verify_every: of so
        many packed steps one is compared with eager; None compares none.
        """
        self._program, self._record, self._eager, self._effects = program, record, eager, effects
        self._sampler = Sampler()
        self._min_padding, self._zero_outputs = min_padding, zero_outputs
        self._padded_inputs = _read_inputs(padded, len(inputs))
        self._usage = Usage(record.name)
        record.outputs = self._usage.outputs
        seconds = [
            SecondBackward((), self._usage.twice, parts_in_outputs(each.graph) if leaves_unused else None)
            for each in (padded, packed)
        ]
        self._padded = CompiledStep(
            padded, [symbolic_dims(fakes[index]) for index in self._padded_inputs], lower, record, seconds[0]
        )
        varying = [symbolic_dims(fakes[index]) for index in program.packed_inputs] + [(0,)] * len(program.indices)
        self._packed: CompiledStep | None = CompiledStep(packed, varying, lower, record, seconds[1])
        self._batch = tuple(index for index, given in enumerate(inputs) if given.role is Role.BATCH)
        self._parameters = tuple(index for index, given in enumerate(inputs) if given.role is Role.PARAMETER)
        self._padded_failed = False
        self._defers = any(output.kind != "value" for output in program.outputs)
        compares = verify_every is not None and not effects.written and not effects.draws
        self._verification = Verification(verify_every, record) if compares and verify_every is not None else None
        self._differentiates = leaves_unused  # else a backward of our own would reduce gradients between ranks
        # None: it is known how outputs are used, or it does not matter
        self._watched = _Watched(self._usage) if self._defers and not zero_outputs else None

    def __call__(self, *inputs: Any) -> tuple[Any, ...]:
        """Run one step of the region."""
        if self._usage.level is Level.EAGER:
            return self._run_eager(inputs, self._usage.reason)
        if self._defers and _is_recomputed():
            return self._run_eager(inputs, "under hooks on saved tensors, such as a checkpoint's around the model")
        started = time.perf_counter()
        chosen = self._choose(inputs)
        if isinstance(chosen, Refusal):
            self._record.host_seconds += time.perf_counter() - started
            return self._run_padded(inputs, chosen.reason)
        indices = Indices(chosen)
        places = _Places(indices, chosen.sizes, self._program.outputs)
        if self._watched is not None:
            if self._watched.goes_on:
                return self._watch(inputs, places, self._watched)
            self._watched = None
        arguments = [inputs[index] for index in self._program.packed_inputs]
        arguments += [indices.get(index) for index in self._program.indices]
        if self._verification is not None and self._verification.is_due() and torch.is_grad_enabled():
            if not self._agrees(inputs, chosen, indices, arguments):
                self._usage.differs()
                return self._run_padded(inputs, self._usage.reason)
            started = time.perf_counter()
        kept = self._kept(inputs) if self._defers else inputs
        replay = self._replay(kept) if self._defers else None
        host = time.perf_counter() - started
        compiles = self._record.compiles
        assert self._packed is not None
        try:
            values = self._packed(arguments, partial(self._packed_again, inputs, indices))
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:
            return self._without_packed(inputs, error)
        started = time.perf_counter()
        batch = _Batch(kept[index] for index in self._batch)
        taken = _Taken(kept, values, indices, chosen.sizes, places, batch, replay, Family())
        outputs = tuple(
            values[output.index] if output.kind == "value" else self._defer(output, place, taken)
            for place, output in enumerate(self._program.outputs)
        )
        self._record.steps_packed += 1
        host += time.perf_counter() - started
        if self._record.compiles > compiles:  # what is done for the first time loads code and is not a step's cost
            self._record.compile_seconds += host
        else:
            self._record.host_seconds += host
        return outputs

    def _agrees(self, inputs: Sequence[Any], facts: Facts, indices: Indices, arguments: Sequence[Any]) -> bool:
        """Whether the packed step gives at tokens what eager gives, and weights the same gradients."""
        assert self._verification is not None
        assert self._packed is not None
        step, places = self._packed, _Places(indices, facts.sizes, self._program.outputs)
        compared = [
            (number, output)
            for number, output in enumerate(self._program.outputs)
            if output.kind in ("value", "tokens")
        ]

        def packed() -> list[torch.Tensor]:
            values = step(list(arguments), partial(self._packed_again, inputs, indices))
            return [values[output.index] for _, output in compared if _is_float(values[output.index])]

        def eager() -> list[torch.Tensor]:
            values = self._eager(*inputs)
            found = [(output, values[number]) for number, output in compared if _is_float(values[number])]
            return [places.of(output).take(value) if output.kind == "tokens" else value for output, value in found]

        weights = [inputs[index] for index in self._parameters if inputs[index].requires_grad]
        return self._verification.agree(packed, eager, weights if self._differentiates else [])

    def _packed_again(self, inputs: Sequence[Any], indices: Indices, *arguments: Any) -> Sequence[Any]:
        """What the packed step gives, computed padded and in eager, where every operator has a second derivative."""
        program = self._program
        given = list(inputs)
        for index, argument in zip(program.packed_inputs, arguments, strict=False):
            given[index] = argument
        taken = [given[index] for index in program.reference_inputs]
        assert program.reference is not None
        return program.reference(*taken, *(indices.get(index) for index in program.reference_indices))

    def _replay(self, inputs: Sequence[Any]) -> Replay:
        effects = self._effects
        return Replay(
            self._eager,
            inputs,
            parameters=self._parameters,
            sampler=self._sampler,
            written=effects.written,
            draws=effects.draws,
        )

    def _kept(self, inputs: Sequence[Any]) -> list[Any]:
        """The inputs with ids, masks and labels copied: loops overwrite them with the next batch."""
        kept = list(inputs)
        for index in self._batch:
            given = kept[index]
            if isinstance(given, torch.Tensor) and not given.is_floating_point() and given.numel() <= _SMALL:
                kept[index] = given.clone()
        return kept

    def _watch(self, inputs: Sequence[Any], places: _Places, watched: _Watched) -> tuple[Any, ...]:
        """The step in eager, with outputs whose uses are noted."""
        plain = tuple(self._eager(*inputs))
        self._record.steps_watched += 1
        watched.took(plain)
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
                usage=self._usage,
                family=family,
                watched=True,
                whole=output.kind == "tail" and output.entries is None,
            )
        return tuple(outputs)

    # ------------------------------------------------------------------ choosing

    def _choose(self, inputs: Sequence[Any]) -> Facts | Refusal:
        if self._packed is None:
            return Refusal("the packed step failed")
        if self._usage.level is Level.PADDED:
            return Refusal(self._usage.reason)
        with torch.no_grad():
            try:
                facts = read_facts(self._program, inputs)
            except (torch.OutOfMemoryError, KeyboardInterrupt):
                raise
            except Exception as error:
                _fell_back(self._record, "look at the batch before a", error)
                return Refusal("the batch could not be read")
            if isinstance(facts, Refusal):
                return facts
            tokens = facts.tokens
            self._record.tokens_real += sum(tokens)
            self._record.tokens_padded += facts.num_positions
            self._record.labels += sum(facts.labels)
            saving = 1.0 - self._program.relative_cost(tokens, facts.labels, facts.sizes)
            padding = 1.0 - sum(tokens) / facts.num_positions
            if saving < MIN_SAVING or padding < self._min_padding:
                return Refusal("hardly any padding in the batch")
        return facts

    # ------------------------------------------------------------------ the other ways

    def _run_padded(self, inputs: Sequence[Any], reason: str) -> tuple[Any, ...]:
        record = self._record
        record.steps_padded += 1
        record.padded_because[reason] = record.padded_because.get(reason, 0) + 1
        if self._padded_failed:
            return tuple(self._eager(*inputs))
        try:
            return tuple(self._padded([inputs[index] for index in self._padded_inputs]))
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:
            if self._effects.written:
                raise
            _fell_back(self._record, "padded", error)
            outputs = tuple(self._eager(*inputs))
            self._padded_failed = True  # eager went through, so the batch was not to blame
            return outputs

    def _run_eager(self, inputs: Sequence[Any], reason: str) -> tuple[Any, ...]:
        record = self._record
        record.steps_padded += 1
        record.padded_because[reason] = record.padded_because.get(reason, 0) + 1
        return tuple(self._eager(*inputs))

    def _without_packed(self, inputs: Sequence[Any], error: Exception) -> tuple[Any, ...]:
        """The packed step failed before it changed anything: this batch and all later ones run padded."""
        if self._effects.written:
            raise error
        _fell_back(self._record, "packed", error)
        self._packed = None
        return self._run_padded(inputs, "the packed step failed")

    # ------------------------------------------------------------------ outputs

    def _defer(self, output: Output, number: int, taken: _Taken) -> torch.Tensor:
        """Output `number` of the region, for whoever comes to use it."""
        if output.kind == "twin":
            return self._defer_twin(output, number, taken)
        meta = output.meta
        assert meta is not None
        places = taken.places
        if output.kind == "tokens":
            rows = taken.values[output.index]
            tokens = places.later(lambda: rows, output, meta, rows.requires_grad)
            return defer(
                meta.shape(taken.sizes),
                (lambda _: tokens().padded_with_zeros()) if output.zero_at_pads else self._exact(number, meta, taken),
                dtype=meta.dtype,
                device=rows.device,
                requires_grad=rows.requires_grad,
                name=meta.name,
                tokens=tokens,
                usage=self._usage,
                family=taken.family,
            )
        return self._defer_tail(output, number, taken, places)

    def _defer_tail(self, output: Output, number: int, taken: _Taken, places: _Places) -> torch.Tensor:
        tail, meta = self._program.tails[output.index], output.meta
        assert meta is not None
        given = [taken.inputs[index] for index in tail.inputs]
        learned = [number for number, index in enumerate(tail.inputs) if index in self._parameters]
        weights = [given[number] for number in learned]
        rest = [taken.values[index] for index in tail.values] + [taken.indices.get(index) for index in tail.indices]
        batch = taken.batch

        def compute(weights_then: list[torch.Tensor]) -> torch.Tensor:
            batch.check(meta.name)
            arguments = list(given)
            for number, weight in zip(learned, weights_then, strict=True):
                arguments[number] = weight
            return tail.module(*arguments, *rest)[0]

        requires_grad = any(value.requires_grad for value in (*rest, *weights))
        if output.entries is None:  # the tail gives it whole
            return defer(
                meta.shape(taken.sizes),
                compute,
                dtype=meta.dtype,
                device=rest[0].device,
                requires_grad=requires_grad,
                name=meta.name,
                depends_on=weights,
                usage=self._usage,
                family=taken.family,
                whole=True,
            )
        kept = Kept(weights, meta.name)

        def rows() -> torch.Tensor:
            made = compute(kept.usable())
            kept.release()
            return made

        return defer(
            meta.shape(taken.sizes),
            self._exact(number, meta, taken),
            dtype=meta.dtype,
            device=rest[0].device,
            requires_grad=requires_grad,
            name=meta.name,
            tokens=places.later(Once(rows, grad=requires_grad), output, meta, requires_grad),
            usage=self._usage,
            family=taken.family,
        )

    def _exact(self, number: int, meta: OutputMeta, taken: _Taken) -> Callable[[Any], torch.Tensor]:
        """Makes output `number` padded, as eager does: the step runs once more."""
        replay = taken.replay
        assert replay is not None

        def compute(_: Any) -> torch.Tensor:
            known = replay.seconds
            found = replay.outputs(meta.name)[number]
            if not known:
                self._record.steps_replayed += 1
                self._record.replay_seconds += replay.seconds
            return found

        return compute

    def _defer_twin(self, output: Output, number: int, taken: _Taken) -> torch.Tensor:
        meta = output.meta
        assert meta is not None
        return defer(
            meta.shape(taken.sizes),
            self._exact(number, meta, taken),
            dtype=meta.dtype,
            device=taken.inputs[self._batch[0]].device,
            requires_grad=any(taken.inputs[index].requires_grad for index in self._parameters),
            name=meta.name,
            usage=self._usage,
            family=taken.family,
        )


@dataclass(frozen=True, slots=True)
class _Taken:
    """A packed step that was taken, for its deferred outputs; each keeps only the parts that it is made from."""

    inputs: Sequence[Any]
    values: Sequence[Any]
    indices: Indices
    sizes: Sequence[tuple[int, int]]
    places: _Places
    batch: _Batch
    replay: Replay | None
    family: Family


class _Places:
    """Where the tokens of one step's outputs stand. The batch is read now; the rest when somebody uses one."""

    def __init__(self, indices: Indices, sizes: Sequence[tuple[int, int]], outputs: Sequence[Output]) -> None:
        self._sizes = sizes
        spaces = {output.entries.space for output in outputs if output.entries is not None}
        self._flat = {space: indices.get(IndexInput("flat", IndexSet(space))) for space in spaces}
        self._known: dict[tuple[IndexSet, bool], Place] = {}

    def of(self, output: Output) -> Place:
        """Of an output's entries."""
        entries = output.entries
        assert entries is not None
        key = (entries, output.merged)
        if key not in self._known:
            rows, positions = self._sizes[entries.space]
            whole = Place((rows, positions), self._flat[entries.space])
            place, _ = whole.sliced(1, entries.offset, positions - entries.cut + entries.offset)
            self._known[key] = place.reshaped((place.size,)) if output.merged else place
        return self._known[key]

    def later(
        self, rows: Callable[[], torch.Tensor], output: Output, meta: OutputMeta, requires_grad: bool
    ) -> Callable[[], Tokens]:
        """Gives an output's tokens, of packed rows that are made when they are needed."""

        def make() -> Tokens:
            place = self.of(output)
            shape, device = meta.shape(self._sizes), place.at.device
            features = tuple(shape[len(place.grid) :])
            pads = ZERO if output.zero_at_pads else UNKNOWN
            packed = Memo(lambda: rows().reshape(place.count, *features))
            return Tokens(place, features, meta.dtype, device, packed, pads, requires_grad=requires_grad)

        return Memo(make)

    def of_padded(self, value: torch.Tensor, output: Output) -> Callable[[], Tokens]:
        """Gives an output's tokens, of a padded value that is there."""

        def make() -> Tokens:
            place = self.of(output)
            features = tuple(value.shape[len(place.grid) :])
            pads = ZERO if output.zero_at_pads else UNKNOWN
            packed = Once(lambda: place.take(value), grad=value.requires_grad)
            return Tokens(place, features, value.dtype, value.device, packed, pads, requires_grad=value.requires_grad)

        return Memo(make)


class _Watched:
    """The calls of a region whose outputs are watched: until one of them has had its backward."""

    def __init__(self, usage: Usage) -> None:
        self._usage = usage
        self._count, self._backward = 0, False

    @property
    def goes_on(self) -> bool:
        """Whether the next call is watched as well."""
        return self._count == 0 or (self._count < MAX_WATCHED and not self._backward)

    def took(self, outputs: Sequence[Any]) -> None:
        """These are the outputs of one more."""
        self._count += 1
        trained = [each for each in outputs if isinstance(each, torch.Tensor) and each.requires_grad]
        self._backward |= not trained
        for each in trained:
            each.register_hook(self._saw_backward)

    def _saw_backward(self, gradient: torch.Tensor) -> None:
        self._backward = True
        if torch.is_grad_enabled():  # with a graph of its own
            self._usage.twice("create_graph=True")


def _there(value: torch.Tensor, _: Any) -> torch.Tensor:
    return value


def _is_float(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _is_recomputed() -> bool:
    """Whether what this call saves for its backward is in other hands, which may run it again and compare."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None or torch._C._current_graph_task_id() != -1


class _Batch:
    """The batch's tensors as they were, to be told if one is overwritten."""

    __slots__ = ("_versions",)

    def __init__(self, inputs: Iterable[Any]) -> None:
        tensors = [each for each in inputs if isinstance(each, torch.Tensor) and not each.is_inference()]
        self._versions = [(tensor, tensor._version) for tensor in tensors]

    def check(self, name: str) -> None:
        """Raise `DeferredError` where the batch was overwritten since."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise DeferredError(
                f"{name} is computed from a batch that was overwritten since. Read it before the next batch is copied "
                "in, or compile with options={'defer_outputs': False}."
            )


def _read_inputs(module: fx.GraphModule, count: int) -> tuple[int, ...]:
    """Drop the inputs that a padded graph does not read (sizes, mostly); say which stay."""
    kept = []
    placeholders = [node for node in module.graph.nodes if node.op == "placeholder"]
    assert len(placeholders) == count
    for index, node in enumerate(placeholders):
        if node.users:
            kept.append(index)
        else:
            module.graph.erase_node(node)
    module.recompile()
    return tuple(kept)
