"""Packing at the entry of Megatron-LM's GPT and BERT: see [Note: pads of Megatron-LM].

[Note: packed steps of Megatron-LM]
The model runs on one row, its tokens one after another, as a batch of one sequence: hidden states are (tokens, 1,
hidden), attention is `varlen_attention`, and all that lies between works on each token. Before the first packed call
the model is run on a probe, packed and padded, as a Hugging Face model is (`entry_proof`).

With tensor parallelism several ranks run one model together. Sizes of their collectives are those of the packed row,
so in every call they tell each other how they would run it, and run it padded unless all of them say the same. Sequence
parallelism divides the row among them, so it is filled up to a multiple of their number. Stages of a pipeline pack
inside (`megatron_pipeline`). Data-parallel ranks need not agree on anything.
"""

from __future__ import annotations

import contextlib
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any

import torch
from torch import Tensor, nn

from deepytorch import autowrap
from deepytorch.compiler.report import LEDGER, RegionRecord
from deepytorch.compiler.step.agreement import precision_of
from deepytorch.compiler.step.batch_facts import Refusal
from deepytorch.compiler.step.outputs.replay import Replay
from deepytorch.compiler.step.route import Route, State, route
from deepytorch.errors import CommunicationError
from deepytorch.integrations.entry_proof import Unchanged, prove, quietly, small_weights
from deepytorch.integrations.entry_uses import OutputUses, Peers, with_weights
from deepytorch.integrations.megatron_batch import pack_batch, reading_packed, row_kind, unknown_argument
from deepytorch.integrations.megatron_pipeline import LEFT_OUT, OUTSIDE, Stage, stage_of
from deepytorch.integrations.packed_attention import decode_mask
from deepytorch.integrations.packed_batch import PackedBatch, Reading, RowKind, Show, zeros_at_pads
from deepytorch.integrations.padded_hooks import UserHooks
from deepytorch.library_code import is_of_libraries
from deepytorch.log import logger, once
from deepytorch.passes.ops.varlen_attention import varlen_attention
from deepytorch.training_calls import RepeatedDraws, is_ours_to_run

Forward = Callable[..., Any]  # a model's own, given the model and its arguments

# Modules that are known: all of them work on each position by itself, but attention, the position embeddings and the
# pooler. Mixtures of experts, state spaces and predictions of several tokens are not among them.
MODULES = frozenset(
    (
        "BertLMHead", "BertModel", "ColumnParallelLinear", "DotProductAttention", "FusedLayerNorm",
        "FusedScaleMaskSoftmax", "GPTModel", "IdentityFuncOp", "IdentityOp", "L2Norm", "LanguageModelEmbedding", "MLP",
        "Pooler", "RotaryEmbedding", "RowParallelLinear", "SelfAttention", "TransformerBlock", "TransformerLayer",
        "VocabParallelEmbedding",
    )
)  # fmt: skip
# Settings of the configuration under which a model stays padded, with the values that are allowed.
SETTINGS: Mapping[str, tuple[Any, ...]] = {
    "context_parallel_size": (1,),
    "cpu_offloading": (False,),
    "cuda_graph_impl": (None, "none"),
    "defer_embedding_wgrad_compute": (False,),
    "enable_cuda_graph": (None, False),
    "external_cuda_graph": (None, False),
    "fine_grained_activation_offloading": (None, False),
    "fp4": (None, False),
    "fp8": (None, False),
    "mtp_num_layers": (None, 0),
    "multi_latent_attention": (False,),
    "num_moe_experts": (None,),
    "softmax_type": ("vanilla",),
    "window_size": (None,),
}
POSITIONS = ("learned_absolute", "none", "rope")


@dataclass(frozen=True)
class _Asked:
    """The properties that `route` asks of a call."""

    refusal: str | None
    real_share: float
    is_forward_mode: bool = False
    is_recomputed: bool = False
    is_searched: bool = False


class MegatronEntry:
    """The packing at the entry of one model of Megatron-LM.

    model: A `GPTModel` or `BertModel`. forward: The original forward of its class.
    """

    def __init__(self, model: Any, forward: Forward) -> None:
        self._model, self._forward = model, forward
        self._signature = inspect.signature(model.forward)
        self._causal = hasattr(model, "decoder")
        self._pools = getattr(model, "binary_head", None) is not None
        self.record = RegionRecord(f"model entry of {type(model).__name__}", "declined", "eager")
        self._uses: dict[Any, OutputUses] = {}  # by kind of call
        self._found_out: dict[Any, str | None] = {}  # by kind of call: why it cannot be packed
        self._declined = _declined(model)
        device = next(model.parameters()).device
        self._peers, self._draws = Peers([], device), RepeatedDraws(device)
        self._is_stage = not (model.pre_process and model.post_process)
        if self._declined is None:
            config = model.config
            self._ignores_mask = bool(config.masked_softmax_fusion and (config.fp16 or config.bf16))
            self._multiple = config.tensor_model_parallel_size if config.sequence_parallel else 1
            if config.tensor_model_parallel_size > 1:
                self._peers = Peers([model.pg_collection.tp], device)
        self._is_alone = not (self._peers or self._is_stage)  # which can run the model once more
        LEDGER.open(self.record)

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any], min_padding: float) -> Any:
        """Run a training call of the model, packed if that is possible. min_padding: the least share of pads for it."""
        stage = stage_of(self._model)
        if stage is not None:
            stage.entry = self
        if self._declined is not None:
            return self._padded(self._declined, args, kwargs)
        with self._draws:
            return self._call(args, kwargs, min_padding)

    def _call(self, args: Sequence[Any], kwargs: Mapping[str, Any], min_padding: float) -> Any:
        started = time.perf_counter()
        try:
            given = dict(self._signature.bind(*args, **kwargs).arguments)
        except TypeError:
            return self._forward(self._model, *args, **kwargs)  # which raises
        kind = _kind(given)
        stage = stage_of(self._model) if self._is_stage else None
        outside = OUTSIDE if stage is None else stage.why_padded
        if self._is_stage and outside is not None:
            return self._padded(outside, args, kwargs)
        found = self._pack(given, kind, min_padding, stage)
        uses = self._uses.setdefault(kind, OutputUses(self.record, self._model, None, can_replay=self._is_alone))
        places = _sum_of_places(found.main.indices) if self._peers and isinstance(found, PackedBatch) else None
        if self._peers and not self._peers.all_say(_told(kind, found, uses.events.state), places):
            return self._padded("tensor-parallel ranks would run this batch differently", args, kwargs)
        if isinstance(found, PackedBatch) and kind not in self._found_out:
            self._ask(kind, given)
        refusal = found.reason if isinstance(found, Refusal) else self._found_out[kind]
        real = 1 - found.padding if isinstance(found, PackedBatch) else 1.0
        chosen, why = route(uses.events.state, _Asked(refusal, real))
        if stage is not None:
            if chosen is Route.PACKED and kind not in stage.kinds:
                chosen, why = Route.PADDED, "the stages of the pipeline have not agreed yet"
            stage.compare(found.main if isinstance(found, PackedBatch) and chosen is Route.PACKED else None, why)
        if chosen in (Route.PADDED, Route.EAGER) or isinstance(found, Refusal):
            return self._padded(why, args, kwargs)
        uses.begin()
        self.record.route = chosen.value
        if chosen is Route.PROFILED:
            self.record.steps_profiled += 1
            uses.profiled()
            if stage is not None and stage.gives:
                return stage.give(self._forward(self._model, *args, **kwargs), None, uses)
            return _as_given(found.profiled(self._as_tuple(args, kwargs), uses.profiling()))
        again = self._again(uses, args, kwargs)
        self.record.host_seconds += time.perf_counter() - started
        try:
            outputs = self._packed(found, self._show(stage, uses, again))
        except (torch.OutOfMemoryError, KeyboardInterrupt):
            raise
        except Exception as error:
            if again is None:  # this rank alone cannot run it again
                raise
            again.rewind()
            uses.buffers.put_back()
            self._found_out[kind] = reason = f"{type(error).__name__}: {str(error)[:300]}"
            once(logging.INFO, "%s: padding stays: %s", self.record.name, reason)
            return self._padded(reason, args, kwargs)
        self.record.steps_packed += 1
        self.record.tokens_real += found.main.num_tokens
        self.record.tokens_padded += found.main.num_rows * found.main.num_positions
        return _as_given(outputs)

    def _padded(self, why: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        self.record.route = Route.PADDED.value
        self.record.steps_padded += 1
        self.record.padded_because[why] = self.record.padded_because.get(why, 0) + 1
        if not self._found_out:
            once(logging.INFO, "%s: padding stays: %s", self.record.name, why)
        return self._forward(self._model, *args, **kwargs)

    def _show(self, stage: Stage | None, uses: OutputUses, again: Replay | None) -> Show:
        """Return the function that makes a script's output from a packed tensor."""
        if stage is None or not stage.gives:
            return uses.showing(again, self.record)
        return lambda packed, side, dim, name, find: stage.give(packed, side, uses)

    def packs(self) -> frozenset[Any] | None:
        """Return the kinds of calls that this stage of a pipeline can pack now; None if it will never pack."""
        states = [self._uses[kind].events.state for kind in self._found_out]
        never = any(reason is not None for reason in self._found_out.values())
        if self._declined is not None or self._draws.found or never or any(each.uses or each.broken for each in states):
            return None
        if not is_ours_to_run() or autowrap.least_padding() is None or UserHooks(self._model).refused:
            return frozenset()
        return frozenset(self._found_out if all(each.knows_uses for each in states) else ())

    def _as_tuple(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        return _tuple(self._forward(self._model, *args, **kwargs))

    def _pack(
        self, given: Mapping[str, Any], kind: Any, min_padding: float, stage: Stage | None
    ) -> PackedBatch | Refusal:
        """Pack the batch of a call; return it, or a refusal."""
        refused = unknown_argument(given) or self._found_out.get(kind) or UserHooks(self._model).refused
        if self._draws.found and not (stage is not None and stage.kinds):  # stages tell each other at the next step
            refused = "the script has set a random generator back, so that calls are to draw the same numbers"
        if refused is not None:
            return Refusal(refused)
        found = self._pack_rows(given, self._row_kind(given))
        if isinstance(found, PackedBatch) and found.padding < min_padding:
            return Refusal("hardly any padding in the batch")
        return found

    def _row_kind(self, given: Mapping[str, Any]) -> RowKind:
        return row_kind(given, causal=self._causal, ignores_mask=self._ignores_mask, pools=self._pools)

    def _pack_rows(self, given: Mapping[str, Any], rows: RowKind) -> PackedBatch | Refusal:
        if self._pools and given["input_ids"].shape[0] < 2:  # the pooler's output could be taken for one by token
            return Refusal("a batch of one row")
        return pack_batch(given, causal=self._causal, kind=rows, multiple=self._multiple)

    def _packed(self, batch: PackedBatch, show: Show) -> tuple[Any, ...]:
        """Run the model on a packed batch; return its outputs as a padded run would give them."""
        stage = stage_of(self._model) if self._is_stage else None
        hidden = None if stage is None else stage.packed(batch.main)
        with reading_packed(self._model, batch), autowrap.paused(), _taking(stage, hidden):
            found = self._rows_first(_tuple(self._forward(self._model, **batch.arguments)))
        entries = batch.main.rows.positions.shape[0]
        cut = [_without_dummies(each, entries, batch.main.num_tokens) for each in found]
        return batch.outputs(tuple(cut), show)  # type: ignore[no-any-return]

    def _rows_first(self, outputs: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return a model's outputs (rows, positions, ...): hidden states that a stage sends on begin with positions."""
        return outputs if self._model.post_process else tuple(each.transpose(0, 1) for each in outputs)

    def _again(self, uses: OutputUses, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Replay | None:
        """Return the padded replay of this call; None if this rank alone cannot run the model."""
        if not self._is_alone:
            return None
        uses.buffers.keep()
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
        modes = uses.modes()

        def run(*given: Any) -> tuple[Any]:
            pairs = zip(uses.parameters, given, strict=False)
            changed = {id(weight): then for weight, then in pairs if then is not weight}
            with with_weights(self._model, changed), uses.in_modes(modes):
                return (self._as_tuple(args, kwargs),)

        inputs, parameters = [*uses.parameters, *tensors], range(len(uses.parameters))
        return Replay(run, inputs, parameters=parameters, sampler=uses.sampler, draws=True)

    # ------------------------------------------------------------------ finding out

    def _ask(self, kind: Any, given: Mapping[str, Any]) -> None:
        """Find out whether the model computes the same packed as padded, in this kind of call."""
        reason = self._prove(given)
        if self._peers and self._one_failed(reason) and reason is None:
            reason = "the probe failed on another tensor-parallel rank"
        self._found_out[kind] = reason
        if reason is None:
            self.record.outcome = "packed"
            self.record.changes.append("padding stripped at model entry: a probe came out the same packed and padded")
            logger.info("%s: padding is stripped", self.record.name)
        else:
            self.record.declined.append(reason)
            once(logging.INFO, "%s: padding stays: %s", self.record.name, reason)

    def _one_failed(self, reason: str | None) -> bool:
        """Return whether the probe has failed on any tensor-parallel rank. reason: why it has on this one."""
        try:
            return self._peers.highest(reason is not None)[0] > 0
        except Exception as error:
            if reason is None:
                raise
            raise CommunicationError(
                f"{self.record.name}: {reason}; tensor-parallel ranks were not at one place then: {error}. Expected "
                "the probe to end alike on all of them. Mend what fails, or pass "
                "deepytorch.configure(options={'unpad': False})"
            ) from error

    def _prove(self, given: Mapping[str, Any]) -> str | None:
        """Return why a probe came out different packed and padded; None if it came out the same."""
        vocabulary = self._model.vocab_size
        rows = self._row_kind(given)
        reading = Reading(
            positions=None,
            shifted=False,
            rows=rows,
            two_sided=False,
            decoder_ids=None,
            bounds=dict.fromkeys(("input_ids", "labels", "lm_labels"), vocabulary),
            pad_id=None,
            pads_hold_pad_id=False,
            unsure=False,
        )
        probed = {name: value for name, value in given.items() if name not in ("attention_mask", "loss_mask")}
        probed["attention_mask"] = torch.ones_like(given["input_ids"])

        model, stage, embedding = self._model, stage_of(self._model) if self._is_stage else None, None
        if stage is not None and stage.takes:  # what it is sent is here an embedding of the ids, and one more weight
            embedding = _embedding(model)

        def sent(arguments: Mapping[str, Any]) -> contextlib.AbstractContextManager[None]:
            return _taking(stage, None if embedding is None else embedding[arguments["input_ids"]].transpose(0, 1))

        def padded(**arguments: Any) -> tuple[Any, ...]:
            with sent(arguments):
                return self._rows_first(self._as_tuple((), self._as_given(given, arguments)))

        def packed(arguments: Mapping[str, Any]) -> tuple[Any, PackedBatch | Refusal]:
            batch = self._pack_rows(self._as_given(given, arguments), rows)
            with sent(arguments):
                return (None if isinstance(batch, Refusal) else self._packed(batch, zeros_at_pads)), batch

        if isinstance(getattr(model, "rotary_pos_emb", None), nn.Module):
            model.rotary_pos_emb(1)  # moves its frequencies to the device, as in any first call
        kept = Unchanged(model)
        # Of weights on parts of a row each rank has a part of the gradient, and these parts are others in a packed row.
        weights = [each for each in small_weights(model) if not getattr(each, "sequence_parallel", False)]
        weights += [] if embedding is None else [embedding]
        with quietly(model, training=True, gradients=True), _gradients_by_autograd(model), _draws_kept():
            reason = prove(padded, packed, probed, reading, weights, precision_of(model.parameters()))
        return kept.put_back() or reason

    def _as_given(self, given: Mapping[str, Any], probe: Mapping[str, Any]) -> dict[str, Any]:
        """Return a probe's arguments, with masks like those of the call `given`."""
        arguments, tokens = dict(probe), probe["attention_mask"] != 0
        for name in ("labels", "lm_labels"):
            if name in arguments:
                arguments[name] = arguments[name].clamp(min=0)
        if not self._causal:
            arguments["attention_mask"] = probe["attention_mask"].to(given["attention_mask"].dtype)
            return arguments
        if given.get("loss_mask") is not None:
            arguments["loss_mask"] = tokens.to(given["loss_mask"].dtype)
        mask = given.get("attention_mask")
        if mask is not None:
            positions = tokens.shape[1]
            later = torch.ones(positions, positions, dtype=torch.bool, device=tokens.device).triu(1)
            mask = later[None] if mask.shape[0] == 1 and len(given["input_ids"]) > 1 else later | ~tokens[:, None]
            mask = mask[:, None]
        arguments["attention_mask"] = mask
        return arguments


def attend_packed(core: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """Compute the attention of a `DotProductAttention` on a packed row; return (tokens, 1, heads * head_dim).

    core: The module. query, key, value: (tokens, 1, heads or groups, head_dim). mask: A mask of `encode_mask`.
    """
    random = import_module("megatron.core.tensor_parallel.random")
    rows, _ = decode_mask(mask, query.shape[0], key.shape[0])
    dropout = core.attention_dropout.p if core.training else 0.0
    # Ranks that divide the heads among them draw different numbers, in a state of the generator that they keep for it.
    draws = dropout > 0 and not core.config.sequence_parallel
    with random.get_cuda_rng_tracker().fork() if draws else contextlib.nullcontext():
        output = varlen_attention(
            query[:, 0],
            key[:, 0],
            value[:, 0],
            rows.cu_seqlens,
            rows.cu_seqlens,
            rows.extent,
            rows.extent,
            scale=core.softmax_scale * (core.scale_mask_softmax.scale or 1.0),
            window_right=0 if _is_causal(core) else -1,
            dropout_p=dropout,
        )
    return output.flatten(1)[:, None]


def _is_causal(core: Any) -> bool:
    return core.attn_mask_type.name == "causal"


def _declined(model: Any) -> str | None:
    """Return why a model stays padded for what it is made of; None if nothing speaks against packing it."""
    config = model.config
    for name, allowed in SETTINGS.items():
        value = getattr(config, name, allowed[0])
        if value not in allowed:
            return f"{name} is {value}"
    if not (model.pre_process and model.post_process):
        if config.tensor_model_parallel_size > 1:
            return "a stage of a pipeline that is tensor parallel as well"
        if config.pipeline_dtype not in LEFT_OUT:
            return f"a stage of a pipeline that sends hidden states of type {config.pipeline_dtype}"
    if model.position_embedding_type not in POSITIONS:
        return f"position embeddings of the kind {model.position_embedding_type}"
    if getattr(model, "return_embeddings", False):
        return "return_embeddings is True"
    for module in model.modules():
        kind = type(module)
        if kind.__module__.startswith("megatron.") and kind.__name__ in MODULES:
            continue
        if not kind.__module__.startswith("torch.nn.modules."):
            return f"modules of type {kind.__name__}, of which it is not known what they look at"
    cores = [each for each in model.modules() if type(each).__name__ == "DotProductAttention"]
    expected = "causal" if hasattr(model, "decoder") else "padding"
    if not cores or any(each.attn_mask_type.name != expected for each in cores):
        return "attentions whose masks have another meaning than the model's"
    if not is_of_libraries(model):
        return "functions of the script's own on its modules"
    return None


def _taking(stage: Stage | None, hidden: Tensor | None) -> contextlib.AbstractContextManager[None]:
    """Have the model take these hidden states inside of the block, if it is sent any."""
    return contextlib.nullcontext() if stage is None else stage.sent(hidden)


def _embedding(model: Any) -> Tensor:
    """Return hidden states (ids, hidden) for the probe of a stage that is sent some."""
    weight = next(model.parameters())
    drawn = torch.randn(model.vocab_size, model.config.hidden_size, generator=torch.Generator().manual_seed(1))
    return drawn.to(weight.device, model.config.pipeline_dtype).requires_grad_()


def _kind(given: Mapping[str, Any]) -> Any:
    """Return the kind of a call, of which one proof holds: the arguments that are given, and the mask's form."""
    mask = given.get("attention_mask")
    names = frozenset(
        (name, value if isinstance(value, bool) else None) for name, value in given.items() if value is not None
    )
    return names, isinstance(mask, Tensor) and mask.shape[0] > 1


def _told(kind: Any, found: PackedBatch | Refusal, state: State) -> str:
    """Return the text by which tensor-parallel ranks agree on a call."""
    names, per_row = kind
    how = found.reason if isinstance(found, Refusal) else found.main.rows.cu_seqlens.tolist()
    return f"{sorted(map(str, names))} {per_row} {how} {state.uses} {state.knows_uses}"


def _sum_of_places(indices: Tensor) -> Tensor:
    """Return a number that tells the places of tokens from others of as many tokens in each row."""
    return (((indices + 1) * 0x5851_F42D_4C95_7F2D) >> 33).sum()


def _tuple(outputs: Any) -> tuple[Any, ...]:
    return outputs if isinstance(outputs, tuple) else (outputs,)


def _as_given(outputs: tuple[Any, ...]) -> Any:
    """Undo `_tuple`: GPT gives one tensor, BERT two."""
    return outputs[0] if len(outputs) == 1 else outputs


def _without_dummies(value: Any, entries: int, tokens: int) -> Any:
    is_by_token = isinstance(value, Tensor) and value.dim() > 1 and value.shape[:2] == (1, entries)
    return value[:, :tokens] if is_by_token else value


@contextlib.contextmanager
def _gradients_by_autograd(model: nn.Module) -> Iterator[None]:
    """Have layers return the gradients of their weights inside of the block, and not add them to `main_grad`."""
    fused = [each for each in model.modules() if getattr(each, "gradient_accumulation_fusion", False)]
    for each in fused:
        each.gradient_accumulation_fusion = False  # type: ignore[assignment]
    try:
        yield
    finally:
        for each in fused:
            each.gradient_accumulation_fusion = True  # type: ignore[assignment]


@contextlib.contextmanager
def _draws_kept() -> Iterator[None]:
    """Restore the states of Megatron-LM's own generators behind the block."""
    tracker = import_module("megatron.core.tensor_parallel.random").get_cuda_rng_tracker()
    states = tracker.get_states()
    try:
        yield
    finally:
        tracker.set_states(states)
