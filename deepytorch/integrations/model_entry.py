"""Packing at model entry, for Hugging Face models whose graphs break so that the compiler cannot follow a mask.

The batch is packed into one long row before the model's forward, attention runs by `packed_attention`, and outputs are
unpacked. No graph is needed, so this works under ZeRO-3, checkpoint wrappers, hooks and prints.

A model's code is not analysed here: the model is run on a probe, see `entry_proof`. Properties that a small batch
cannot show are declined before that: windows that only masks know of, state that training changes, sizes that enter
the numbers.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from deepytorch import autowrap
from deepytorch.compiler.backend import EXPLAINING
from deepytorch.compiler.dynamo.sizes import unmarked
from deepytorch.compiler.report import LEDGER, RegionRecord
from deepytorch.compiler.step.agreement import precision_of
from deepytorch.compiler.step.batch_facts import Refusal
from deepytorch.compiler.step.outputs.replay import Replay
from deepytorch.compiler.step.route import MOST_REAL, Route, State, Uses, route
from deepytorch.integrations import cached_prefix, packed_attention
from deepytorch.integrations.cached_prefix import CachedPrefix
from deepytorch.integrations.entry_calls import INSIDE, Replaced, replace_calls, restore_calls
from deepytorch.integrations.entry_proof import (
    Attributes,
    Unchanged,
    is_deterministic,
    prove,
    quietly,
    small_weights,
)
from deepytorch.integrations.entry_readings import BY_ROW, declined_beforehand, readings
from deepytorch.integrations.entry_uses import OutputUses, Peers, with_weights
from deepytorch.integrations.packed_attention import CannotPack
from deepytorch.integrations.packed_batch import (
    PackedBatch,
    Reading,
    is_known,
    pack_batch,
    unknown_argument,
    zeros_at_pads,
)
from deepytorch.integrations.padded_hooks import UserHooks
from deepytorch.library_code import functions_on
from deepytorch.log import logger, once
from deepytorch.parallel_modules import class_of, is_sharded
from deepytorch.torch_internals import current_graph_task_id, top_saved_tensors_default_hooks

Run = Callable[..., Any]

MANY_KINDS = 8
OF_HEADS = ("start_positions", "end_positions")


@dataclass
class _Call:
    """One call of the outer module.

    Attributes:
        args: The positional arguments.
        kwargs: The keyword arguments.
        given: The arguments by name; None if they are not the model's.
        kind: The kind of call for which a proof holds; None if there can be no proof.
        why: The reason against a proof.
        reading: The reading of the batch, if the proof has found one.
        proves: Whether the call is part of a proof.
        found: The packed batch, or a refusal.
    """

    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    given: Mapping[str, Any] | None
    kind: Any
    why: str | None = None
    reading: Reading | None = None
    proves: bool = False
    found: PackedBatch | Refusal | None = None


@dataclass(frozen=True)
class _Asked:
    """The properties that `route` asks of a call. Checkpoints and hooks inside of the model see packed rows as well."""

    refusal: str | None
    is_forward_mode: bool = False
    is_recomputed: bool = False
    is_searched: bool = False
    real_share: float = 0.0  # looked at already


_OF_PROOF = State(packs=True)


class ModelEntry:
    """The packing at the entry of one Hugging Face model.

    outer: the module whose calls are training steps: the model, or a wrapper that hands arguments on to it, such as a
    PeftModel. model: the Hugging Face model itself. min_padding: batches with a smaller share of pads run padded.

    The batch is packed on entry into `self.target`: `outer`, or the model below a head that looks at rows or takes
    arguments of its own.
    """

    def __init__(self, outer: nn.Module, model: Any, min_padding: float = 0.0) -> None:
        self._outer, self._model, self._min_padding = outer, model, min_padding
        self.target = outer
        if type(model).__name__.endswith(BY_ROW):
            self.target = model.base_model
        self._listed: list[RegionRecord] = []
        self._in_eager = False  # whether module calls are replaced, which Dynamo would not see
        self._is_prepared = False  # since the last `restore`
        self._found_out: dict[Any, Reading | None] = {}  # by kind of call
        self._above: _Call | None = None  # the running call of the head, if the target is below it
        self._uses: dict[Any, OutputUses] = {}  # by kind of call
        self._attributes = Attributes()
        self._calls = 0
        self._agrees = False  # whether ranks that share weights have exchanged the uses of outputs
        self._peers: Peers | None = None  # from the first call on
        name = type(model).__name__
        self._records = {
            True: RegionRecord(f"model entry of {name}", "declined", "eager"),
            False: RegionRecord(f"model entry of {name}, without gradients", "declined", "eager"),
        }
        self.record = self._records[True]  # of calls with gradients, or without, as the present call is

    def call(self, run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Run a call of the outer module, `run(*args, **kwargs)`, packed if that is possible.

        A checkpoint around the module has to compute the call in the backward as it was computed first, which a
        profiled call is not. So it runs as the module does, then and now.
        """
        if _is_checkpointed():
            return run(*args, **kwargs)
        self.record = self._records[torch.is_grad_enabled()]
        if not torch.is_grad_enabled() and self._shares_weights():  # a rank alone must not ask the others
            return run(*args, **kwargs)
        call = self._read(args, kwargs)
        others = self._as_others(call.given)
        if call.given is not None and call.kind not in self._found_out:
            if others is None:
                self._ask(call, call.given)
            else:
                call.why = others
                self._list()
        call.reading = self._found_out.get(call.kind)
        if call.reading is not None and not self._is_prepared:
            self._prepare()
        with contextlib.nullcontext() if call.reading is None else unmarked():
            return self._through(call, run)

    def _read(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> _Call:
        """Return the description of a call by its arguments."""
        given = _bound(self._outer, args, kwargs)
        if given is None:
            return _Call(args, kwargs, None, None, "the call's arguments are not the model's")
        return _Call(args, kwargs, given, self._kind(given))

    def _as_others(self, given: Mapping[str, Any] | None) -> str | None:
        """Return why no proof may be made in this call of a model with sharded weights; None if one may be made.

        All ranks make the same proof, in their first call, and exchange the uses of outputs before each later one until
        no rank waits for the backward of a profiled call. If one rank alone made a proof, because of a keyword that
        only it got, the others would wait for it.
        """
        self._calls += 1
        if not self._shares_weights():
            return None
        assert self._peers is not None
        if self._calls == 1:
            return None if self._peers.all_say(self._question(given)) else "ranks that share weights begin unlike"
        if not self._agrees:
            found = list(self._uses.values())
            own = max((each.events.state.uses for each in found), default=Uses.TOKENS)
            most, is_profiling = self._peers.highest(own, any(each.is_profiling for each in found))
            self._agrees = not is_profiling
            for each in found if self._agrees else ():
                each.raise_to(Uses(most))
                each.end_profiling()
        return "another kind of call than the first, which ranks that share weights were asked about"

    def _shares_weights(self) -> bool:
        """Return whether other ranks hold parts of the model's weights."""
        if self._peers is None:
            self._peers = Peers.of_shards(self._outer)
        return bool(self._peers)

    def _question(self, given: Mapping[str, Any] | None) -> str:
        """Return the subject of a proof in this call, as text that ranks compare; empty if there is no proof."""
        if given is None or UserHooks(self._outer).refused is not None:
            return ""
        tensors = {name: given[name] for name in sorted(given) if isinstance(given[name], torch.Tensor)}
        names = sorted(
            (name, value if isinstance(value, bool) else None) for name, value in given.items() if value is not None
        )
        # Tensors that lie on one grid with others are probed alike.
        grids = [
            (name, value.dtype, value.ndim, [each for each in tensors if tensors[each].shape[:2] == value.shape[:2]])
            for name, value in tensors.items()
        ]
        return f"{names} {grids} {declined_beforehand(self._outer, self._model)}"

    @property
    def asked(self) -> bool:
        """Return whether a call was proved or declined before."""
        return bool(self._found_out)

    @property
    def is_the_only_way(self) -> bool:
        """Return whether the model attends by kernels that are opaque in graphs, so that no graph can be packed."""
        return bool(packed_attention.implementations(self._model) & set(packed_attention.OPAQUE))

    @property
    def packs(self) -> bool:
        """Return whether some kind of call was proved."""
        return any(self._found_out.values())

    def is_the_only_way_for(self, kwargs: Mapping[str, Any]) -> bool:
        """Return whether a call is given keys for each row to begin with: in a graph they are not of its positions."""
        return CachedPrefix.of(kwargs) is not None and cached_prefix.is_wanted(kwargs)

    def explain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RegionRecord:
        """Return the record of a training call with these arguments, without running it; prove the model if needed."""
        call = self._read(args, kwargs)
        if call.given is not None and call.kind not in self._found_out:
            self._ask(call, call.given)
        record = replace(self.record, steps_packed=0, steps_padded=0, padded_because={}, tokens_real=0, tokens_padded=0)
        call.reading = self._found_out.get(call.kind)
        if call.given is None or call.reading is None:
            record.outcome = "declined"
            record.declined = [call.why] if call.why is not None else record.declined
            return record
        mask = call.given["attention_mask"]
        prefix = CachedPrefix.of(call.given)
        mask = mask if prefix is None else mask[:, prefix.length :]
        record.tokens_real, record.tokens_padded = int((mask != 0).sum()), mask.numel()
        if self.target is self._outer:
            found = self._pack(call, UserHooks(self.target), args, kwargs)
            if isinstance(found, Refusal):
                record.padded_because = {found.reason: 1}
        return record

    def _kind(self, given: Mapping[str, Any]) -> Any:
        """Return the kind of call for which a proof holds: the arguments that are given, and the model's make-up."""
        modules = list(self._outer.modules())
        functions = [(place, functions_on(module)) for place, module in enumerate(modules)]
        loss = getattr(self._model, "_loss_function", None), getattr(self._model, "loss_type", None)
        return (
            (torch.is_grad_enabled(), self._outer.training),
            frozenset((n, v if isinstance(v, bool) else None) for n, v in given.items() if v is not None),
            tuple(map(weakref.ref, modules)),
            tuple((place, *map(_weakly, found)) for place, found in functions if found),
            frozenset((kind, kind.forward) for kind in {type(each) for each in modules}),
            loss,
            self._attributes.read(modules),
            frozenset(packed_attention.implementations(self._model)),
        )

    def restore(self) -> None:
        """Undo all changes of the model, until the next call that is packed."""
        restore_calls(self._model)
        self._is_prepared = False

    @property
    def replaces_calls(self) -> bool:
        """Return whether calls of modules inside are replaced, which would cut Dynamo's graphs of the model."""
        return self._is_prepared and (self._in_eager or self.target is not self._outer)

    def leave(self, reason: str) -> None:
        """Undo all changes of the model, and give the reason in the report."""
        self.restore()
        self.record.declined.append(reason)

    def _through(self, call: _Call, run: Run) -> Any:
        if self.target is self._outer:
            return self._enter(call, run, call.args, call.kwargs)
        before, self._above = self._above, call
        try:
            return self._outer._call_impl(*call.args, **call.kwargs)
        finally:
            self._above = before

    def _call_below(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """Call the model below a head."""
        if self._above is None:
            return module._call_impl(*args, **kwargs)
        return self._enter(self._above, module._call_impl, args, kwargs)

    def _enter(self, call: _Call, run: Run, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if INSIDE.get() is not None:  # inside of itself or of another packed model
            return run(*args, **kwargs)
        started = time.perf_counter()
        uses = None if call.proves or call.reading is None else self._uses_of(call.kind)
        if uses is not None:
            uses.begin()
        found = call.found = self._pack(call, UserHooks(self.target), args, kwargs, uses)
        state = _OF_PROOF if uses is None else uses.events.state
        chosen, why = route(state, _Asked(found.reason if isinstance(found, Refusal) else None))
        self.record.route = chosen.value
        if isinstance(found, Refusal):
            self.record.steps_padded += 1
            self.record.padded_because[why] = self.record.padded_because.get(why, 0) + 1
            return self.target._call_impl(*args, **kwargs) if chosen is Route.EAGER else run(*args, **kwargs)
        if chosen is Route.PROFILED:
            assert uses is not None
            self.record.steps_profiled += 1
            outputs = run(*args, **kwargs)
            uses.profiled(outputs)
            return found.profiled(outputs, uses.profiling())
        again = None if uses is None else self._again(uses, found, args, kwargs)
        show = zeros_at_pads if uses is None else uses.showing(again, self.record)
        token = INSIDE.set((self, found))
        self.record.host_seconds += time.perf_counter() - started
        try:
            outputs = found.outputs(self._as_proved(run, found.arguments), show)
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:  # a case that the probe did not have, such as a cache of another kind
            if call.proves:
                raise
            if is_sharded(self._outer):  # a second forward on this rank alone would gather other weights than its peers
                raise
            INSIDE.set(None)
            if again is not None and uses is not None:  # undo the draws and writes of the failed call
                again.rewind()
                uses.buffers.put_back()
            outputs = run(*args, **kwargs)  # raises again if the batch is to blame
            self._decline(
                str(error) if isinstance(error, CannotPack) else f"{type(error).__name__}: {str(error)[:300]}"
            )
            return outputs
        finally:
            INSIDE.reset(token)
        self.record.steps_packed += 1
        for side in found.sides:
            self.record.tokens_real += side.num_tokens
            self.record.tokens_padded += side.num_rows * side.num_positions
        return outputs

    def _uses_of(self, kind: Any) -> OutputUses:
        """Return the uses of the outputs of this kind of calls."""
        if kind not in self._uses:
            self._uses[kind] = OutputUses(self.record, self.target, self._peers, can_replay=not self._peers)
        return self._uses[kind]

    def _again(
        self, uses: OutputUses, batch: PackedBatch, args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Replay | None:
        """Return the padded replay of this call, for a look at pads of its outputs.

        None if weights are sharded: a call on one rank alone would wait for the others.
        """
        if self._peers:
            return None
        uses.buffers.keep()
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        if batch.prefix is not None:
            tensors += batch.prefix.prefix.tensors
            args = list(map(batch.prefix.without_script_cache, args))
            kwargs = {name: batch.prefix.without_script_cache(each) for name, each in kwargs.items()}
        prefix = batch.prefix
        inputs, modes = [*uses.parameters, *tensors], uses.modes()

        def run(*given: Any) -> tuple[Any]:
            pairs = zip(uses.parameters, given, strict=False)
            changed = {id(weight): then for weight, then in pairs if then is not weight}
            with UserHooks(self.target).silenced(), with_weights(self.target, changed), uses.in_modes(modes):
                if prefix is None:
                    return (self.target._call_impl(*args, **kwargs),)
                named = {name: prefix.with_own_cache(each) for name, each in kwargs.items()}
                return (self.target._call_impl(*map(prefix.with_own_cache, args), **named),)

        parameters = range(len(uses.parameters))
        return Replay(run, inputs, parameters=parameters, sampler=uses.sampler, draws=True)

    def _as_proved(self, run: Run, arguments: Mapping[str, Any]) -> Any:
        """Run the model on packed arguments; without compiled code inside if module calls are replaced.

        Dynamo calls the `forward` of a module and not its replaced call. So no compiled code of the model or its blocks
        may run then. (A stance of `torch.compiler` would hold in all threads.)
        """
        if not self._in_eager:
            return run(**arguments)
        with autowrap.paused():
            return _undisturbed(self.target._call_impl, arguments)

    def _is_compiled_inside(self) -> bool:
        """Return whether somebody else has compiled a part of the model."""
        parts = (each for each in self._model.modules() if each is not self._outer)
        return any(autowrap.is_compiled(each) and not isinstance(each._compiled_call_impl, Replaced) for each in parts)

    def _pack(
        self,
        call: _Call,
        hooks: UserHooks,
        args: Sequence[Any],
        kwargs: Mapping[str, Any],
        uses: OutputUses | None = None,
    ) -> PackedBatch | Refusal:
        """Pack the batch in these arguments of the target; return it, or a refusal."""
        if call.reading is None:
            return Refusal(call.why or "; ".join(self.record.declined))
        given = _bound(self.target, args, kwargs)
        if given is None:
            return Refusal("the call's arguments are not the model's")
        if not call.proves and (generates := _of_generation(given)) is not None:
            return Refusal(generates)
        if uses is not None and uses.events.state.uses > Uses.VALUES:
            return Refusal(uses.events.state.because)
        if hooks.refused is not None:
            return Refusal(hooks.refused)
        if self._in_eager and self._is_compiled_inside():
            return Refusal("a part of the model is compiled, which would not see the calls that are replaced")
        above = call.given if self.target is not self._outer else None
        try:
            found = pack_batch(given, call.reading, None if above is None else above.get("labels"))
        except CannotPack as error:
            return Refusal(str(error))
        if isinstance(found, PackedBatch) and not call.proves and found.padding < self._min_padding:
            return Refusal("hardly any padding in the batch")
        if isinstance(found, PackedBatch) and uses is not None and uses.events.state.uses is Uses.VALUES:
            return found if 1 - found.padding <= MOST_REAL else Refusal(uses.events.state.because)
        return found

    # ------------------------------------------------------------------ finding out

    def _ask(self, call: _Call, given: Mapping[str, Any]) -> None:
        """Find out how this model reads a batch, or why it cannot be packed.

        The call's kind is None if no proof was tried. The batch's values do not matter, so that data-parallel ranks
        find the same, in the same number of calls.
        """
        strange = {name: value for name, value in given.items() if value is not None and not is_known(name)}
        tensors = [n for n, value in strange.items() if isinstance(value, torch.Tensor) and n not in OF_HEADS]
        familiar = {name: value for name, value in given.items() if name not in strange or name in tensors}
        hooked = UserHooks(self._outer).refused
        call.why, call.kind = hooked or unknown_argument(familiar) or _of_generation(given), None
        if hooked is not None:
            self._list()
        if call.why is not None:  # another call may come without the argument
            return
        if strange:  # arguments of a head
            self.target = self._model.base_model
        self._list()
        before = replace(self.record, padded_because=dict(self.record.padded_because))
        if len(self._found_out) >= MANY_KINDS:
            call.why = "more kinds of calls than are proved"
            return
        held = self._attributes.read(list(self._outer.modules()))
        reading, reason = None, declined_beforehand(self._outer, self._model)
        if reason is None:
            self._prepare()
            reading, reason = self._prove(given)
        self._attributes.leave_out(held, self._attributes.read(list(self._outer.modules())))
        kind = call.kind = self._kind(given)
        for name in ("steps_packed", "steps_padded", "tokens_real", "tokens_padded", "padded_because"):
            setattr(self.record, name, getattr(before, name))  # the probes are not steps
        self._found_out[kind] = reading
        if reading is not None:
            self.record.outcome = "packed"
            self.record.changes.append("padding stripped at model entry: a probe came out the same packed and padded")
            if self._in_eager and EXPLAINING.get() is None:  # checkpointed blocks run again in the backward
                autowrap.disarm_inside(self._outer)
            logger.info("%s: padding is stripped", self.record.name)
        else:
            self._decline(reason or "", all_kinds=False)

    def _list(self) -> None:
        """Add this record to the report."""
        if self.record not in self._listed and EXPLAINING.get() is None:
            LEDGER.open(self.record)
            self._listed.append(self.record)

    def _decline(self, reason: str, *, all_kinds: bool = True) -> None:
        if all_kinds:
            self._found_out = dict.fromkeys(self._found_out)
        if not any(self._found_out.values()):
            self.restore()
            self.record.outcome = "declined"
        if reason not in self.record.declined:
            self.record.declined.append(reason)
        once(logging.INFO, "%s: padding stays: %s", self.record.name, reason)

    @property
    def _packed_model(self) -> Any:
        """Return the Hugging Face model that gets packed batches."""
        return self._model if self.target is self._outer else self.target

    def _prepare(self) -> None:
        self._is_prepared = True
        packed_attention.attach(import_module("transformers.modeling_utils"))
        if self.target is not self._outer:
            self.target._compiled_call_impl = Replaced(self._call_below, self.target)
        takes_positions = "position_ids" in inspect.signature(self._packed_model.forward).parameters
        self._in_eager = replace_calls(self, self._model, takes_positions=takes_positions)

    def _prove(self, given: Mapping[str, Any]) -> tuple[Reading | None, str | None]:
        """Return the reading under which the model computes the same packed as padded; or None and the reason."""
        reasons, shown = [], None
        tried = list(readings(self._model, self._packed_model))
        kept = Unchanged(self._outer)
        run = self._outer._call_impl
        with UserHooks(self._outer).silenced():
            is_whole, gradients = not is_sharded(self._outer), torch.is_grad_enabled()
            training = is_whole and self._outer.training
            if training:
                with quietly(self._outer, training=True, gradients=gradients):
                    training = is_deterministic(run, given, tried[0])
            weights, precision = small_weights(self._outer), precision_of(self._outer.parameters())
            with quietly(self._outer, training=training, gradients=gradients and training):
                for reading in tried:
                    reason = prove(run, partial(self._probe, reading), given, reading, weights, precision)
                    if reason is None:
                        shown = reading
                        break
                    reasons.append(reason)
        changed = kept.put_back()
        if changed is not None:
            return None, changed
        return (shown, None) if shown is not None else (None, reasons[0])

    def _probe(self, reading: Reading, arguments: Mapping[str, Any]) -> tuple[Any, PackedBatch | Refusal | None]:
        given = _bound(self._outer, (), arguments)
        call = _Call((), arguments, given, None, reading=reading, proves=True)
        return self._through(call, self._outer._call_impl), call.found


def entry_for(module: nn.Module, min_padding: float = 0.0) -> ModelEntry | None:
    """Return the `ModelEntry` of a module that trains: a Hugging Face model or a PeftModel around one.

    None for any other module.
    """
    pretrained = import_module("transformers.modeling_utils").PreTrainedModel
    if isinstance(module, pretrained):
        return ModelEntry(module, module, min_padding)
    kind = class_of(module)
    if kind.__module__.startswith("peft.") and hasattr(kind, "get_base_model"):  # PEFT's layers have none
        inner = module.get_base_model()  # type: ignore[operator]
        if isinstance(inner, pretrained):
            return ModelEntry(module, inner, min_padding)
    return None


def _of_generation(given: Mapping[str, Any]) -> str | None:
    """Return why a call with cached keys is not packed; None if it has none, or trains or evaluates with them."""
    name = next((name for name in cached_prefix.NAMES if given.get(name) is not None), None)
    return f"the argument {name} is given" if name is not None and not cached_prefix.is_wanted(given) else None


def _is_checkpointed() -> bool:
    """Return whether torch's checkpoint saves what a call needs to be recomputed, or recomputes it."""
    hooks = top_saved_tensors_default_hooks(True)
    saves = hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"
    return saves or current_graph_task_id() != -1


@torch.compiler.disable(reason="calls of modules inside are replaced, which Dynamo would not see")
def _undisturbed(call: Run, arguments: Mapping[str, Any]) -> Any:
    return call(**arguments)


class _Itself:
    """A key that is equal only to a key of the same object."""

    def __init__(self, value: Any) -> None:
        self._value = value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Itself) and other._value is self._value

    def __hash__(self) -> int:
        return id(self._value)


def _weakly(function: Any) -> Any:
    """Return a part of a key for a function, which does not keep the function alive if it can be referenced weakly."""
    try:
        found = weakref.ref(function)
        hash(found)
    except TypeError:
        return _Itself(function)
    return found


def _bound(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the arguments of a call by name; None if they do not fit, for which the call itself will raise."""
    signature = inspect.signature(module.forward)
    try:
        given = dict(signature.bind(*args, **kwargs).arguments)
    except TypeError:
        return None
    for name, parameter in signature.parameters.items():
        if name in given and parameter.kind is parameter.VAR_KEYWORD:
            given |= given.pop(name)
        elif name in given and parameter.kind is parameter.VAR_POSITIONAL and given.pop(name):
            return None
    return given
