"""Padding stripped at the door of a Hugging Face model, where graphs break and the compiler cannot follow a mask.

The batch is packed into one long row before the model's forward, attention runs by `packed_attention`, and outputs are
unpacked: no graph is needed, so this works under ZeRO-3, checkpoint wrappers, hooks and prints.

A model's code is not analysed here: it is asked, see `door_proof`. What a small batch cannot show is declined before
that: windows that only masks know of, state that training changes, sizes that enter the numbers.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch
from torch import nn

from deepytorch import autowrap
from deepytorch.compiler.backend import EXPLAINING
from deepytorch.compiler.batch_facts import Refusal
from deepytorch.compiler.outputs.deferred import defer
from deepytorch.compiler.outputs.pending import Family
from deepytorch.compiler.outputs.replay import Replay
from deepytorch.compiler.outputs.tokens import Memo, Tokens
from deepytorch.compiler.outputs.usage import Level, Usage
from deepytorch.compiler.report import LEDGER, RegionRecord
from deepytorch.errors import DeferredError
from deepytorch.integrations import packed_attention
from deepytorch.integrations.door_proof import (
    Unchanged,
    is_deterministic,
    is_sharded,
    precision_of,
    prove,
    quietly,
    sharding_groups,
    small_weights,
)
from deepytorch.integrations.packed_attention import CannotPack, call_with_bias, has_learned_bias
from deepytorch.integrations.packed_batch import (
    Find,
    PackedBatch,
    Reading,
    RowKind,
    Show,
    Side,
    columns,
    counts,
    ids_counted,
    is_known,
    pack_batch,
    unknown_argument,
    zeros_at_pads,
)
from deepytorch.integrations.padded_hooks import UserHooks
from deepytorch.log import logger, once
from deepytorch.passes.samples import Sampler

Call = Callable[..., Any]

# The door whose model runs packed, and the batch.
_INSIDE: ContextVar[tuple[Door, PackedBatch] | None] = ContextVar("deepytorch_packed_batch", default=None)

# Heads that look at a row and not at its tokens: the model below them is packed.
BY_ROW = ("ForSequenceClassification", "ForNextSentencePrediction")
AMONG_POSITIONS = ("ForQuestionAnswering", "ForMultipleChoice")
LENGTH_DEPENDENT_ROPE = ("dynamic", "longrope")  # numbers that depend on how long the padded row is
LAYER_TYPES = ("full_attention", "sliding_attention")
MANY_KINDS = 8
SHORTEST = 12  # positions of the probe
OF_HEADS = ("start_positions", "end_positions")


class Door:
    """The way into one Hugging Face model.

    outer: whose calls are training steps, the model or what hands its arguments on to it, such as a PeftModel.
    model: the Hugging Face model itself. The batch is packed on the way into `self.target`: `outer`, or, under a head
    that looks at rows or takes arguments of its own, the model below. min_padding: batches with a smaller share of pads
    run padded.
    """

    def __init__(self, outer: nn.Module, model: Any, min_padding: float = 0.0) -> None:
        self._outer, self._model, self._min_padding = outer, model, min_padding
        self.target = outer
        if type(model).__name__.endswith(BY_ROW):
            self.target = model.base_model
        self._given: Mapping[str, Any] = {}  # to the head above the target
        self._proving = self._open = self._listed = False
        self._in_eager = False  # calls of the model's modules are replaced, which Dynamo would not see
        self._found_out: dict[Any, Reading | None] = {}  # by kind of call
        self._reading: Reading | None = None
        self._unasked: str | None = None  # why nothing is known of this kind of call
        self._found: PackedBatch | Refusal | None = None  # what the last call came to
        self._uses: dict[Any, _Uses] = {}  # by kind of call
        self._kind_now: Any = None
        self.record = RegionRecord(f"door of {type(model).__name__}", "declined", "eager")

    def call(self, run: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """A training call of the outer module: `run(*args, **kwargs)`, packed if that is possible."""
        given = _bound(self._outer, args, kwargs)
        kind = None if given is None else self._kind(given)
        self._unasked = "the call's arguments are not the model's" if given is None else None
        if given is not None and kind not in self._found_out:
            kind = self._ask(given)
        self._reading, self._kind_now = self._found_out.get(kind), kind
        return self._through(run, args, kwargs)

    @property
    def asked(self) -> bool:
        """Whether a call was proved or declined before."""
        return bool(self._found_out)

    def explain(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> RegionRecord:
        """What would become of a training call with these arguments; the model is asked where it was not yet."""
        given = _bound(self._outer, args, kwargs)
        kind = None if given is None else self._kind(given)
        self._unasked = "the call's arguments are not the model's" if given is None else None
        if given is not None and kind not in self._found_out:
            kind = self._ask(given)
        record = replace(self.record, steps_packed=0, steps_padded=0, padded_because={}, tokens_real=0, tokens_padded=0)
        self._reading = self._found_out.get(kind)
        if given is None or self._reading is None:
            record.outcome = "declined"
            record.declined = [self._unasked] if self._unasked is not None else record.declined
            return record
        mask = given["attention_mask"]
        record.tokens_real, record.tokens_padded = int((mask != 0).sum()), mask.numel()
        if self.target is self._outer:
            found = self._pack(UserHooks(self.target), args, kwargs)
            if isinstance(found, Refusal):
                record.padded_because = {found.reason: 1}
        return record

    def _kind(self, given: Mapping[str, Any]) -> Any:
        """What a proof holds for: the arguments that are given, and the model as it is made up."""
        modules = [id(module) if "forward" not in vars(module) else -id(module) for module in self._outer.modules()]
        loss = getattr(self._model, "_loss_function", None), getattr(self._model, "loss_type", None)
        return (
            frozenset((n, v if isinstance(v, bool) else None) for n, v in given.items() if v is not None),
            hash(tuple(modules)),
            loss,
            bool(getattr(self._model.config, "output_attentions", False)),
        )

    def restore(self) -> None:
        """Take back what was set on the model."""
        for module in self._model.modules():
            if isinstance(getattr(module, "_compiled_call_impl", None), _Replaced):
                module.__dict__.pop("_compiled_call_impl")

    def _through(self, run: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if self.target is self._outer:
            return self._enter(run, args, kwargs)
        self._open, self._given = True, _bound(self._outer, args, kwargs) or {}
        try:
            return self._outer._call_impl(*args, **kwargs)
        finally:
            self._open, self._given = False, {}

    def _call_below(self, module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The call of the model below a head."""
        if not self._open:
            return module._call_impl(*args, **kwargs)
        return self._enter(module._call_impl, args, kwargs)

    def _enter(self, run: Call, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        if _INSIDE.get() is not None:  # inside of itself or of another packed model
            return run(*args, **kwargs)
        started = time.perf_counter()
        uses = None if self._proving or self._reading is None else self._uses_of(self._kind_now)
        first = uses is not None and uses.begins()
        found = self._found = self._pack(UserHooks(self.target), args, kwargs, uses)
        if isinstance(found, Refusal):
            self.record.steps_padded += 1
            self.record.padded_because[found.reason] = self.record.padded_because.get(found.reason, 0) + 1
            if uses is not None and uses.usage.level is Level.EAGER:
                return self.target._call_impl(*args, **kwargs)
            return run(*args, **kwargs)
        if first:
            assert uses is not None
            self.record.steps_watched += 1
            uses.watched = True
            return found.watched(run(*args, **kwargs), uses.watching())
        show = zeros_at_pads if uses is None else uses.showing(self._again(args, kwargs), self.record)
        token = _INSIDE.set((self, found))
        self.record.host_seconds += time.perf_counter() - started
        try:
            with self._as_proved():
                outputs = found.outputs(run(**found.arguments), show)
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:  # something that the probe had not seen, such as a cache of another kind
            if self._proving:
                raise
            if is_sharded(self._outer):  # a second forward of this rank alone would gather other weights than its peers
                raise
            _INSIDE.set(None)
            outputs = run(*args, **kwargs)  # raises again where the batch is to blame
            self._shut(str(error) if isinstance(error, CannotPack) else f"{type(error).__name__}: {str(error)[:300]}")
            return outputs
        finally:
            _INSIDE.reset(token)
        self.record.steps_packed += 1
        for side in found.sides:
            self.record.tokens_real += side.num_tokens
            self.record.tokens_padded += side.num_rows * side.num_positions
        return outputs

    def _uses_of(self, kind: Any) -> _Uses:
        """What is done with the outputs of this kind of calls."""
        if kind not in self._uses:
            self._uses[kind] = _Uses(self.record, self.target)
        return self._uses[kind]

    def _again(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Replay | None:
        """This call padded, for whoever looks at pads of its outputs; None where weights are sharded, as a call of one
        rank alone would wait for the others.
        """
        if is_sharded(self._outer):
            return None
        uses = self._uses_of(self._kind_now)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        inputs = [*uses.parameters, *tensors]

        def run(*_: Any) -> tuple[Any]:
            with torch.compiler.set_stance("force_eager"), UserHooks(self.target).silenced():
                return (self.target._call_impl(*args, **kwargs),)

        parameters = range(len(uses.parameters))
        return Replay(run, inputs, parameters=parameters, sampler=uses.sampler, draws=True)

    def _as_proved(self) -> contextlib.AbstractContextManager[Any]:
        """Dynamo calls `forward` of a module itself, and not what stands in place of its call: then nothing compiled
        may run inside, of the model or of its blocks.
        """
        return torch.compiler.set_stance("force_eager") if self._in_eager else contextlib.nullcontext()

    def _pack(
        self, hooks: UserHooks, args: Sequence[Any], kwargs: Mapping[str, Any], uses: _Uses | None = None
    ) -> PackedBatch | Refusal:
        if self._reading is None:
            return Refusal(self._unasked or "; ".join(self.record.declined))
        given = _bound(self.target, args, kwargs)
        if given is None:
            return Refusal("the call's arguments are not the model's")
        if uses is not None and uses.usage.level is not Level.PACKED:
            return Refusal(uses.usage.reason)
        if hooks.refused is not None:
            return Refusal(hooks.refused)
        try:
            found = pack_batch(given, self._reading, self._given.get("labels"))
        except CannotPack as error:
            return Refusal(str(error))
        if isinstance(found, PackedBatch) and not self._proving and found.padding < self._min_padding:
            return Refusal("hardly any padding in the batch")
        return found

    # ------------------------------------------------------------------ finding out

    def _ask(self, given: Mapping[str, Any]) -> Any:
        """Find out how this model reads a batch, or why it cannot be packed; return the kind of call that this holds
        for, or None where nothing was asked. What the batch holds does not matter, and so data-parallel ranks find the
        same, in as many calls.
        """
        strange = {name: value for name, value in given.items() if value is not None and not is_known(name)}
        tensors = [n for n, value in strange.items() if isinstance(value, torch.Tensor) and n not in OF_HEADS]
        familiar = {name: value for name, value in given.items() if name not in strange or name in tensors}
        hooked = UserHooks(self._outer).refused
        self._unasked = hooked or unknown_argument(familiar)
        if hooked is not None and not self._listed and EXPLAINING.get() is None:
            LEDGER.open(self.record)
            self._listed = True
        if self._unasked is not None:  # another call may do without it
            return None
        if strange:  # of a head
            self.target = self._model.base_model
        if not self._listed and EXPLAINING.get() is None:
            LEDGER.open(self.record)
            self._listed = True
        before = replace(self.record, padded_because=dict(self.record.padded_because))
        kind = self._kind(given)
        reason = "more kinds of calls than are proved" if len(self._found_out) >= MANY_KINDS else None
        reason = reason or declined_beforehand(self._outer, self._model)
        if reason is None:
            self._prepare()
            self._proving = True
            try:
                reason = self._prove(given)
            finally:
                self._proving = False
        for name in ("steps_packed", "steps_padded", "tokens_real", "tokens_padded", "padded_because"):
            setattr(self.record, name, getattr(before, name))  # the probes are not steps
        self._found_out[kind] = self._reading if reason is None else None
        if reason is None:
            self.record.outcome = "packed"
            self.record.changes.append("padding stripped at the door: a probe came out the same packed and padded")
            if self._in_eager and EXPLAINING.get() is None:  # blocks that are checkpointed run again in the backward
                autowrap.disarm_inside(self._outer)
            logger.info("%s: padding is stripped", self.record.name)
        else:
            self._shut(reason, all_kinds=False)
        return kind

    def _shut(self, reason: str, *, all_kinds: bool = True) -> None:
        self._reading = None
        if all_kinds:
            self._found_out = dict.fromkeys(self._found_out)
        if not any(self._found_out.values()):
            self.restore()
            self.record.outcome = "declined"
        self.record.declined.append(reason)
        once(logging.INFO, "%s: padding stays: %s", self.record.name, reason)

    @property
    def _packed_model(self) -> Any:
        """The Hugging Face model that gets packed batches."""
        return self._model if self.target is self._outer else self.target

    def _prepare(self) -> None:
        packed_attention.attach(import_module("transformers.modeling_utils"))
        if self.target is not self._outer:
            self.target._compiled_call_impl = _Replaced(self._call_below, self.target)
        self._in_eager = False
        takes_positions = "position_ids" in inspect.signature(self._packed_model.forward).parameters
        of_encoder = set(_encoder_of(self._model).modules()) if self._model.config.is_encoder_decoder else set()
        for module in self._model.modules():
            pooler = module._modules.get("pooler")
            if has_learned_bias(module):
                self._replace(module, call_with_bias)
            elif _is_position_table(module) and not takes_positions:
                self._replace(module, partial(_call_with_positions, self, 0 if module in of_encoder else -1))
            if pooler is not None:
                self._replace(pooler, partial(_call_unpacked, self))

    def _replace(self, module: nn.Module, call: Call) -> None:
        module._compiled_call_impl = _Replaced(call, module)
        self._in_eager = True

    def _prove(self, given: Mapping[str, Any]) -> str | None:
        reasons = []
        tried = list(readings(self._model, self._packed_model))
        kept = Unchanged(self._outer)
        run = self._outer._call_impl
        with UserHooks(self._outer).silenced():
            training = not is_sharded(self._outer)
            if training:
                with quietly(self._outer, training=True):
                    training = is_deterministic(run, given, tried[0])
            weights, precision = small_weights(self._outer), precision_of(self._outer)
            with quietly(self._outer, training=training):
                for reading in tried:
                    self._reading = None
                    reason = prove(run, partial(self._probe, reading), given, reading, weights, precision)
                    if reason is None:
                        break
                    reasons.append(reason)
        changed = kept.put_back()
        if changed is not None:
            return changed
        return reasons[0] if len(reasons) == len(tried) else None

    def _probe(self, reading: Reading, arguments: Mapping[str, Any]) -> tuple[Any, PackedBatch | Refusal | None]:
        self._reading, self._found = reading, None
        return self._through(self._outer._call_impl, (), arguments), self._found


class _Uses:
    """What a script does with the outputs of one kind of calls.

    Ranks that hold parts of one model have to find the same: the first call of each is watched, whatever its batch is,
    and before the second one they tell each other what they saw. A use that comes up later is an error there.
    """

    def __init__(self, record: RegionRecord, model: nn.Module) -> None:
        self.usage = Usage(record.name)
        record.outputs = self.usage.outputs
        self.parameters = list(model.parameters())
        self.sampler = Sampler()
        self._shards = sharding_groups(model)
        self._calls, self.watched = 0, False

    def begins(self) -> bool:
        """Whether a call that begins now is to be watched."""
        self._calls += 1
        if not self._shards:
            return not self.watched
        if self._calls == 2:
            self._agree()
        return self._calls == 1

    def _agree(self) -> None:
        level = torch.tensor(int(self.usage.level), dtype=torch.int32, device=self._device())
        for group in self._shards:
            torch.distributed.all_reduce(level, torch.distributed.ReduceOp.MAX, group)
        if int(level) > self.usage.level:
            self.usage.level = Level(int(level))
            self.usage.reason = "another rank looks at padded positions"

    def _device(self) -> torch.device:
        device = self.parameters[0].device
        return device if device.type != "meta" else torch.device("cpu")

    def watching(self) -> Show:
        """Makes of a padded tensor what a script gets at the first call."""
        family = Family()

        def show(value: torch.Tensor, side: Side, dim: int, name: str, find: Find) -> torch.Tensor:
            tokens = Memo(lambda: Tokens.of(side.place, side.place.take(value))) if dim == 1 else None
            return defer(
                value.shape,
                lambda _: value,
                dtype=value.dtype,
                device=value.device,
                requires_grad=value.requires_grad,
                name=name,
                tokens=tokens,
                usage=self.usage,
                family=family,
                watched=True,
            )

        return show

    def showing(self, again: Replay | None, record: RegionRecord) -> Show:
        """Makes of a packed tensor what a script gets. again: the padded call, if it can be had."""
        family = Family()

        def show(packed: torch.Tensor, side: Side, dim: int, name: str, find: Find) -> torch.Tensor:
            shape = list(packed.shape)
            shape[0], shape[dim] = side.num_rows, side.num_positions

            def padded(_: Any) -> torch.Tensor:
                if again is None:
                    raise DeferredError(
                        f"padded positions of {name!r} are looked at, and this rank alone cannot compute them, as "
                        "weights are sharded; expected them to be looked at in the first step of training, after "
                        "which all ranks compute them. Do so, look at real positions only, or pass "
                        "deepytorch.configure(options={'unpad': False})"
                    )
                known = again.seconds
                found = find(again.outputs(name)[0])
                if not known:
                    record.steps_replayed += 1
                    record.replay_seconds += again.seconds
                return found

            return defer(
                shape,
                padded,
                dtype=packed.dtype,
                device=packed.device,
                requires_grad=packed.requires_grad,
                name=name,
                tokens=Memo(lambda: side.tokens(packed)) if dim == 1 else None,
                usage=self.usage,
                family=family,
            )

        return show


class _Replaced:
    """A call of a module of the model's, where `Module.compile` puts its own: pickles and copies leave it out."""

    def __init__(self, call: Call, module: nn.Module) -> None:
        self._call, self._module = call, module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self._module, *args, **kwargs)


def door_for(module: nn.Module, min_padding: float = 0.0) -> Door | None:
    """The door of a module that trains: a Hugging Face model, or a PeftModel around one. None for any other."""
    pretrained = import_module("transformers.modeling_utils").PreTrainedModel
    if isinstance(module, pretrained):
        return Door(module, module, min_padding)
    if type(module).__module__.startswith("peft."):
        inner = module.get_base_model()  # type: ignore[operator]
        if isinstance(inner, pretrained):
            return Door(module, inner, min_padding)
    return None


def declined_beforehand(outer: nn.Module, model: Any) -> str | None:
    """What of a model a small probe would not show."""
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    biased = any(has_learned_bias(module) for module in model.modules())
    if not (getattr(model, "_supports_flash_attn", False) or biased):
        return f"{type(model).__name__} does not say what its masks mean (transformers gives it no FlashAttention)"
    if type(model).__name__.endswith(AMONG_POSITIONS):
        return "a head that chooses among positions, pads among them, or among rows"
    if getattr(config, "expert_capacity", None) is not None:
        return "experts that take so many tokens of each row"
    if (getattr(config, "max_position_embeddings", None) or SHORTEST) < SHORTEST:
        return f"fewer than {SHORTEST} positions"
    if getattr(model.config, "output_attentions", False):
        return "attention weights are asked for"
    for module in model.modules():
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            return "batch normalisation, whose statistics count pads"
    layers = set(getattr(config, "layer_types", None) or ()) - set(LAYER_TYPES)
    if layers:
        return f"layers of type {', '.join(sorted(layers))}"
    for name in ("rope_parameters", "rope_scaling"):
        kinds = getattr(config, name, None) or {}
        found = {kinds.get("rope_type")} | {each.get("rope_type") for each in kinds.values() if isinstance(each, dict)}
        if found & set(LENGTH_DEPENDENT_ROPE):
            return f"position embeddings that depend on the padded length ({', '.join(map(str, found))})"
    adapters = getattr(outer, "peft_config", None) or {}
    if any(getattr(each, "is_prompt_learning", False) for each in adapters.values()):
        return "virtual tokens of a learned prompt"
    return None


def readings(model: Any, packed: Any) -> Iterator[Reading]:
    """How a model may read its batch, to be tried in turn: the rows it is right for, and how it counts positions.

    packed: what of `model` gets packed batches: itself, or the model below its head.
    """
    parameters = inspect.signature(packed.forward).parameters
    two_sided = bool(model.config.is_encoder_decoder) and "decoder_input_ids" in parameters
    config = model.config.get_text_config() if hasattr(model.config, "get_text_config") else model.config
    ids = model.get_input_embeddings().num_embeddings
    by_token = type(model).__name__.endswith("ForTokenClassification")
    pad_id = getattr(config, "pad_token_id", None)
    by_row = type(model).__name__.endswith(BY_ROW)
    first = Reading(
        positions=None,
        shifted=not two_sided and not by_token and _is_causal_loss(model),
        rows=RowKind.PREFIX,
        two_sided=two_sided,
        decoder_ids=getattr(model, "prepare_decoder_input_ids_from_labels", None) if two_sided else None,
        bounds={
            "input_ids": ids,
            "decoder_input_ids": ids,
            "token_type_ids": getattr(config, "type_vocab_size", None) or 2,
            "labels": config.num_labels if by_token else ids,
        },
        pad_id=pad_id,
        pads_hold_pad_id=by_row and pad_id is not None,
        unsure=packed is not model,
    )
    windowed = getattr(config, "sliding_window", None) is not None  # windows are counted in tokens when packed
    half = next(model.parameters()).dtype in (torch.float16, torch.bfloat16)  # rounding would hide rules of positions
    kinds = (
        [RowKind.PREFIX]
        if half or packed is not model
        else [RowKind.CONTIGUOUS if windowed else RowKind.ANY, RowKind.PREFIX]
    )
    rules: list[Any] = [None]
    if not two_sided and "position_ids" in parameters:
        rules = [columns, counts, *([] if pad_id is None else [ids_counted(pad_id)])]
    shifts = (first.shifted,) if two_sided or packed is not model else (first.shifted, not first.shifted)
    for kind in kinds:
        for shifted in shifts:
            for rule in rules:
                yield replace(first, rows=kind, positions=rule, shifted=shifted)


def _is_causal_loss(model: Any) -> bool:
    losses = import_module("transformers.loss.loss_utils")
    return model.loss_function is losses.ForCausalLMLoss


def _encoder_of(model: Any) -> nn.Module:
    return model.get_encoder()


def _bound(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments of a call by name; None where they do not fit, which the call itself will say."""
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


def _is_position_table(module: nn.Module) -> bool:
    """Whether this is a table of learned positions that makes its positions itself, as Bart's."""
    own = isinstance(module, nn.Embedding) and type(module).forward is not nn.Embedding.forward
    return own and "position_ids" in inspect.signature(module.forward).parameters


def _call_with_positions(door: Door, side: int, module: Any, *args: Any, **kwargs: Any) -> Any:
    inside = _INSIDE.get()
    if inside is not None and inside[0] is door:
        kwargs["position_ids"] = inside[1].sides[side].rows.positions.long()
    return module._call_impl(*args, **kwargs)


def _call_unpacked(door: Door, module: Any, hidden_states: Any, *args: Any, **kwargs: Any) -> Any:
    """A pooler looks at one position of each row."""
    inside = _INSIDE.get()
    if inside is not None and inside[0] is door and hidden_states.shape[:2] == (1, inside[1].main.num_tokens):
        hidden_states = inside[1].main.unpack(hidden_states)
    return module._call_impl(hidden_states, *args, **kwargs)
