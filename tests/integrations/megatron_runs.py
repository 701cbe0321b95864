"""Small models of Megatron-LM, trained on a CPU with padded batches; for `test_megatron`, in processes of its own.

`stand_in` puts the CPU in the place of the GPU that Megatron-LM asks for by name, and torch's norms in the place of
Apex's, which take part in sequence parallelism.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

VOCABULARY, POSITIONS, ROWS = 64, 16, 4
STEPS = 4


class Tracker:
    """The random states of a GPU: on a CPU there is one generator."""

    def fork(self, *_: Any) -> Any:
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, Any]:
        return {}

    def set_states(self, states: Any) -> None:
        pass

    def is_initialized(self) -> bool:
        return True


def stand_in() -> None:
    """Let Megatron-LM run on a CPU. To be called before its modules are imported."""

    def on_cpu(function: Callable[..., Any]) -> Callable[..., Any]:
        def made(*args: Any, **kwargs: Any) -> Any:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return function(*args, **kwargs)

        return made

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    for name in ("tensor", "zeros", "ones", "empty", "full", "arange"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    kind = torch.Tensor.type
    torch.Tensor.type = lambda each, *to: kind(each, *to) if to else kind(each).replace("torch.", "torch.cuda.")  # type: ignore
    torch.Tensor.cuda = lambda each, *_, **__: each  # type: ignore[method-assign, assignment]
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer import torch_norm

    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = Tracker(), True
    random._get_cuda_rng_state = lambda *_, **__: torch.get_rng_state()
    random._set_cuda_rng_state = lambda state, *_, **__: torch.set_rng_state(state)
    make = torch_norm.WrappedTorchNorm.__new__

    def norm(cls: Any, config: Any, *args: Any, **kwargs: Any) -> Any:
        parallel, config.sequence_parallel = config.sequence_parallel, False
        made = make(cls, config, *args, **kwargs)
        config.sequence_parallel = parallel
        for each in made.parameters():
            each.sequence_parallel = parallel
        return made

    torch_norm.WrappedTorchNorm.__new__ = norm


def begin(tensor_parallel: int = 1, pipeline: int = 1) -> None:
    """Begin the process groups of torch and Megatron-LM: of torchrun's ranks, or of this process alone."""
    torch.set_num_threads(1)
    stand_in()
    from megatron.core import parallel_state

    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
    else:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel(tensor_parallel, pipeline)


LLAMA = {
    "gated_linear_unit": True,
    "add_bias_linear": False,
    "activation_func": torch.nn.functional.silu,
    "normalization": "RMSNorm",
    "num_query_groups": 2,
}


def config_of(**settings: Any) -> Any:
    """The configuration of a small transformer."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    defaults = {
        "num_layers": 2,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "use_cpu_initialization": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "masked_softmax_fusion": False,
    }
    return TransformerConfig(**(defaults | settings))


def gpt(settings: dict[str, Any] | None = None, kind: Any = None, **arguments: Any) -> Any:
    """A GPT of the local specification. kind: a class besides `GPTModel`."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.models.gpt.gpt_model import GPTModel

    config = config_of(**(settings or {}))
    torch.manual_seed(0)
    spec = get_gpt_layer_local_spec(normalization=config.normalization)
    return (kind or GPTModel)(config, spec, vocab_size=VOCABULARY, max_sequence_length=POSITIONS, **arguments)


def bert(settings: dict[str, Any] | None = None, *, head: bool = True, **arguments: Any) -> Any:
    """A BERT of the local specification."""
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel

    torch.manual_seed(0)
    config = config_of(**(settings or {}))
    return BertModel(
        config, 2 if head else 0, bert_layer_local_spec, VOCABULARY, POSITIONS, add_binary_head=head, **arguments
    )


LATER = torch.ones(POSITIONS, POSITIONS, dtype=torch.bool).triu(1)


def rows(kind: str, step: int, num_rows: int = ROWS) -> Tensor:
    """Tokens (rows, positions) bool: padded at the "right", the "left", or "mixed", with holes and a single token."""
    generator = torch.Generator().manual_seed(step)
    lengths = torch.randint(2, POSITIONS, (num_rows, 1), generator=generator)
    right = torch.arange(POSITIONS) < lengths
    if kind == "right":
        right[0] = True
        return right
    if kind == "left":
        return right.flip(1)
    mixed = torch.rand(num_rows, POSITIONS, generator=generator) < 0.6
    mixed[:, 0] = True
    mixed[-1, 1:] = False
    return mixed


def batch(
    kind: str, step: int, num_rows: int = ROWS, *, causal: bool = True, types: bool = False
) -> tuple[dict[str, Any], Tensor]:
    """The arguments of a call, and the weights (rows, positions) of its losses.

    GPT's masks are of each row, or for "loss mask" causal alone, or for "no mask" the model's own. BERT's are of each
    row. Labels at pads are any ids. types: whether BERT gets token types.
    """
    generator = torch.Generator().manual_seed(1000 + step)
    ids, labels = (torch.randint(0, VOCABULARY, (num_rows, POSITIONS), generator=generator) for _ in range(2))
    by_loss = kind in ("loss mask", "no mask")
    tokens = rows("right" if by_loss else kind, step, num_rows)
    if not causal:
        counted = tokens & (torch.rand(tokens.shape, generator=generator) < 0.5)
        counted |= tokens & ~counted.any()
        given = {"input_ids": ids, "attention_mask": tokens.long(), "lm_labels": labels}
        return (given | {"tokentype_ids": labels % 2} if types else given), counted.float()
    weights = tokens.float()
    given = {"input_ids": ids, "position_ids": torch.arange(POSITIONS).expand(ids.shape), "labels": labels}
    if by_loss:
        weights[:, :2] = 0.0  # a prompt
        weights[:, 1] = (weights.sum(1) == 0).float()
        return {
            **given,
            "attention_mask": LATER[None, None] if kind == "loss mask" else None,
            "loss_mask": weights,
        }, weights
    return {**given, "attention_mask": (LATER | ~tokens[:, None])[:, None]}, weights


def mean_loss(weights: Tensor, outputs: Any) -> tuple[Tensor, Tensor]:
    """The loss of Megatron-LM's scripts, and the losses of tokens that it is made from."""
    losses, pooled = outputs if isinstance(outputs, tuple) else (outputs, None)
    flat, counted = losses.view(-1).float(), weights.view(-1)
    loss = torch.sum(flat * counted) / counted.sum()
    if pooled is not None:
        loss = loss + pooled.float().square().mean()
    return loss, losses[weights.bool()]


def packed_and_padded(make: Callable[[], Any], given: Callable[[int], tuple[dict[str, Any], Tensor]]) -> Any:
    """Train a model with the import, and the same in eager; compare them in every step. Returns the model's record."""
    import deepytorch

    model, other = make(), make()
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-3) for each in (model, other)]
    for step in range(STEPS):
        arguments, weights = given(step)
        found, expected = [], []
        for each, values, block in (
            (model, found, contextlib.nullcontext()),
            (other, expected, deepytorch.paused()),
        ):
            with block:
                loss, losses = mean_loss(weights, each(**arguments))
                loss.backward()
            values += [loss.detach(), losses.detach()]
        assert torch.isfinite(found[0])
        for one, two in zip(found, expected, strict=True):
            torch.testing.assert_close(one, two, rtol=2e-5, atol=2e-6)
        for (name, one), two in zip(model.named_parameters(), other.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None), name
            if one.grad is not None:
                torch.testing.assert_close(one.grad, two.grad, rtol=2e-4, atol=2e-7, msg=lambda m, n=name: f"{n}: {m}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-3, atol=2e-5)
    return record_of(model)


def record_of(model: Any) -> Any:
    """The record of a model's packing."""
    return vars(model)["_deepytorch_entry"].record


# ------------------------------------------------------------------ ranks

RECOMPUTED = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
RANKS: dict[str, dict[str, Any]] = {
    "tensor parallel": {"tensor": 2},
    "sequence parallel": {"tensor": 2, "sequence": True, "ddp": True},
    "data parallel": {"ddp": True},
    "distributed optimizer": {"ddp": True, "distributed": True},
    "pipeline": {"pipeline": 2, "micro_batches": 4},
    "shared embeddings": {"pipeline": 2, "micro_batches": 3, "ddp": True, "shared": True},
    "freed outputs": {"pipeline": 2, "settings": {"deallocate_pipeline_outputs": True} | RECOMPUTED},
    "masked rows": {"pipeline": 2, "kind": "mixed"},
    "BERT": {"pipeline": 2, "kind": "right", "bert": True},
    "half precision": {"pipeline": 2, "half": True},
    "one stage looks": {"pipeline": 2, "looks": True},
    "unlike batches": {"tensor": 2, "unlike": True},
    "late": {"tensor": 2, "late": True},
}


def train_ranks(name: str, path: str) -> None:
    """Train as one of two ranks, by Megatron-LM's own schedule; write losses, gradients and weights of each step."""
    from deepytorch.errors import DeferredError

    case = RANKS[name]
    begin(case.get("tensor", 1), case.get("pipeline", 1))
    from megatron.core import parallel_state
    from megatron.core.pipeline_parallel import get_forward_backward_func

    sequence, pipeline = case.get("sequence", False), case.get("pipeline", 1)
    settings = LLAMA | {"tensor_model_parallel_size": case.get("tensor", 1), "sequence_parallel": sequence}
    arguments = {"position_embedding_type": "rope"}
    if pipeline > 1:
        torch.cuda.synchronize = lambda *_: None
        settings |= {"pipeline_model_parallel_size": pipeline, "pipeline_dtype": torch.float32}
        arguments |= {
            "pre_process": parallel_state.is_pipeline_first_stage(),
            "post_process": parallel_state.is_pipeline_last_stage(),
            "share_embeddings_and_output_weights": case.get("shared", False),
        }
    if case.get("half"):
        settings |= {"bf16": True, "params_dtype": torch.bfloat16, "pipeline_dtype": torch.bfloat16}
    make = bert if case.get("bert") else gpt
    model = make(settings | case.get("settings", {}), **arguments)
    inner, (model, optimizer) = model, _wrapped(model, case)
    shown = {"causal": not case.get("bert"), "types": bool(case.get("bert"))}
    rank, number = dist.get_rank(), parallel_state.get_data_parallel_rank()
    micro_batches = case.get("micro_batches", 2)
    written: list[Any] = []
    told: list[str] = []

    def forward_step(batches: Iterator[Any], model: Any) -> Any:
        arguments, weights = next(batches)
        if case.get("unlike") and rank == 1:
            arguments["loss_mask"] = torch.ones_like(weights)
        outputs = model(**arguments)
        if case.get("looks") and not inner.post_process:
            written.append((outputs.detach().sum(),))
        return outputs, partial(loss_func, weights)

    def loss_func(weights: Tensor, outputs: Tensor) -> Any:
        loss, losses = mean_loss(weights, outputs)
        written.append((loss.detach().clone(), losses.detach().clone()))
        if case.get("late") and step == STEPS - 1:
            try:
                outputs.mean()
            except DeferredError as error:
                told.append(str(error))
        return loss, {}

    for step in range(STEPS):
        for each in (optimizer, *([model] if case.get("ddp") else [])):
            getattr(each, "zero_grad_buffer", each.zero_grad)()
        seeds = [1000 * number + micro_batches * step + micro for micro in range(micro_batches)]
        get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter([batch(case.get("kind", "loss mask"), seed, **shown) for seed in seeds]),
            model=[model],
            num_microbatches=micro_batches,
            seq_length=POSITIONS,
            micro_batch_size=ROWS,
            forward_only=False,
        )
        written.append([getattr(each, "main_grad", each.grad).clone() for each in inner.parameters()])
        optimizer.step()
    written.append([each.detach().clone() for each in inner.parameters()])
    entry = vars(inner).get("_deepytorch_entry")
    backend = dist.distributed_c10d._get_default_group()._get_backend(torch.device("cpu"))
    report = {
        "packed": 0 if entry is None else entry.record.steps_packed,
        "padded": {} if entry is None else entry.record.padded_because,
        "ours": hasattr(backend, "inner_cpu"),
        "told": told,
    }
    torch.save((written, report), f"{path}.{rank}")
    dist.destroy_process_group()


def _wrapped(model: Any, case: dict[str, Any]) -> tuple[Any, Any]:
    """The model as its case wraps it, and its optimizer."""
    if case.get("half"):
        from megatron.core.transformer.module import Float16Module

        return Float16Module(model.config, model), torch.optim.SGD(model.parameters(), 1e-2)
    if not case.get("ddp"):
        return model, torch.optim.AdamW(model.parameters(), 1e-3)
    from megatron.core.distributed import (
        DistributedDataParallel,
        DistributedDataParallelConfig,
        finalize_model_grads,
    )
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer

    distributed = case.get("distributed", False)
    settings = DistributedDataParallelConfig(
        use_distributed_optimizer=distributed,
        overlap_grad_reduce=True,
        overlap_param_gather=distributed,
        bucket_size=4000,
    )
    wrapped = DistributedDataParallel(model.config, settings, model)
    model.config.finalize_model_grads_func = finalize_model_grads
    model.config.no_sync_func = wrapped.no_sync
    optimizer = OptimizerConfig(
        optimizer="adam", lr=1e-3, use_distributed_optimizer=distributed, overlap_param_gather=distributed
    )
    return wrapped, get_megatron_optimizer(optimizer, [wrapped])
