"""The training loop of Megatron-LM in `deepytorch bench hosts`: its own GPT, schedule and DistributedDataParallel."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from deepytorch.bench.host_loops import Batch, OwnLoop

IGNORED = -100


class _Generators:
    """The random states that Megatron-LM keeps for a GPU; the model here has no dropout."""

    def fork(self, *_: Any) -> Any:
        return contextlib.nullcontext()

    def get_states(self) -> dict[str, Tensor]:
        return {}

    def set_states(self, states: dict[str, Tensor]) -> None:
        pass


def _run_on_cpu() -> None:
    """Let Megatron-LM run in this process without a GPU, by whose name it asks for the device of its buffers."""
    from megatron.core.tensor_parallel import random

    def on_cpu(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def made(*args: Any, **kwargs: Any) -> Tensor:
            if str(kwargs.get("device", "")).startswith("cuda"):
                kwargs["device"] = "cpu"
            return make(*args, **kwargs)

        return made

    torch.cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment, return-value]
    for name in ("empty", "full", "ones", "tensor", "zeros"):
        setattr(torch, name, on_cpu(getattr(torch, name)))
    random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = _Generators(), True


class Megatron(OwnLoop):
    """Megatron-LM's GPT of a Llama's sizes, with its schedule and its DistributedDataParallel.

    Its attention mask is causal alone, and the loss mask says which losses count, as in its own fine-tuning.
    """

    def __init__(self, model: Any, batches: Sequence[Batch], folder: Path) -> None:
        _run_on_cpu()
        from megatron.core import parallel_state
        from megatron.core.distributed import (
            DistributedDataParallel,
            DistributedDataParallelConfig,
            finalize_model_grads,
        )
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.models.gpt.gpt_model import GPTModel
        from megatron.core.transformer.transformer_config import TransformerConfig

        dist.init_process_group("gloo")
        parallel_state.initialize_model_parallel()
        llama = model.config
        config = TransformerConfig(
            num_layers=llama.num_hidden_layers,
            hidden_size=llama.hidden_size,
            ffn_hidden_size=llama.intermediate_size,
            num_attention_heads=llama.num_attention_heads,
            num_query_groups=llama.num_key_value_heads,
            gated_linear_unit=True,
            activation_func=nn.functional.silu,
            add_bias_linear=False,
            normalization="RMSNorm",
            hidden_dropout=0.0,
            attention_dropout=0.0,
            masked_softmax_fusion=False,
            use_cpu_initialization=True,
            finalize_model_grads_func=finalize_model_grads,
        )
        torch.manual_seed(0)
        self._gpt = GPTModel(
            config,
            get_gpt_layer_local_spec(normalization="RMSNorm"),
            vocab_size=llama.vocab_size,
            max_sequence_length=llama.max_position_embeddings,
            position_embedding_type="rope",
        )
        wrapped = DistributedDataParallel(config, DistributedDataParallelConfig(overlap_grad_reduce=True), self._gpt)
        config.no_sync_func = wrapped.no_sync
        super().__init__(wrapped, batches, folder)

    def step(self, batch: Batch) -> Tensor:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        self.model.zero_grad_buffer()
        rows, positions = batch["input_ids"].shape
        [found] = get_forward_backward_func()(
            forward_step_func=_forward_step,
            data_iterator=iter([batch]),
            model=[self.model],
            num_microbatches=1,
            seq_length=positions,
            micro_batch_size=rows,
            forward_only=False,
        )
        for each in self._gpt.parameters():
            each.grad = each.main_grad  # type: ignore[attr-defined]
        self.optimizer.step()
        return found["loss"]

    def _inner(self) -> nn.Module:
        return _WithoutExtraState(self._gpt)


class _WithoutExtraState(nn.Module):
    """The state of a model as tensors alone: layers of Megatron-LM add other objects to theirs."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._of: Callable[[], nn.Module] = lambda: model

    def state_dict(self, *_: Any, **__: Any) -> dict[str, Any]:  # type: ignore[override]
        return {name: value for name, value in self._of().state_dict().items() if isinstance(value, Tensor)}

    def load_state_dict(self, state_dict: Any, *_: Any, **__: Any) -> Any:
        return self._of().load_state_dict(state_dict, strict=False)


def _forward_step(batches: Iterator[Batch], model: Any) -> tuple[Tensor, Callable[[Tensor], Any]]:
    batch = next(batches)
    ids = batch["input_ids"]
    labels = nn.functional.pad(batch["labels"], (0, 1), value=IGNORED)[:, 1:]
    loss_mask = (labels != IGNORED).float()
    positions = ids.shape[1]
    causal = torch.ones(1, 1, positions, positions, dtype=torch.bool).triu(1)
    columns = torch.arange(positions).expand(ids.shape)
    losses = model(ids, columns, causal, labels=labels.clamp(min=0), loss_mask=loss_mask)
    return losses, partial(_mean, loss_mask)


def _mean(loss_mask: Tensor, losses: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    loss = torch.sum(losses.view(-1).float() * loss_mask.view(-1)) / loss_mask.sum()
    return loss, {"loss": loss.detach().clone()}
