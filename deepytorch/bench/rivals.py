"""Baselines of a good user without deepytorch, measured next to it if they can run; otherwise the reason is reported.

Grouped: stock torch.compile on batches whose rows have similar lengths, as Trainer's `group_by_length` makes them: the
same rows in as many batches, so that the times of all of them compare. Hand-packed: transformers' collator without
padding, and deepytorch's attention over its row, which has to be registered with transformers; in eager, and for
decoders only. Flattened: the same collator, flash attention and Liger's kernels, under torch.compile.
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn

from deepytorch.bench.jobs import TrainingJob
from deepytorch.bench.model_parts import inner
from deepytorch.bench.training_step import Batch, Precision
from deepytorch.bench.zoo.workload import Workload
from deepytorch.data import IGNORE_INDEX, PAD_ID
from deepytorch.data.batching import Kind
from deepytorch.errors import ConfigError

_FLASH = "flash_attention_2"  # as transformers names it
OWN_ATTENTION = "deepytorch_varlen"

_PACKAGES = {"flash_attn": "flash-attn", "liger_kernel": "liger-kernel"}
_PADS = {"input_ids": PAD_ID, "attention_mask": 0, "labels": IGNORE_INDEX}


def grouped(data: Sequence[Batch], kind: Kind) -> list[Batch]:
    """Return as many batches of the same rows, sorted by their lengths and padded to the longest of each.

    An epoch's groups are sorted within 50 batches at a time; fewer are sorted as a whole. data: padded on the right, as
    `deepytorch.data.batches` gives them.
    """
    rows, size = sorted(_rows_of(data, kind), key=_length, reverse=True), len(data[0]["input_ids"])
    return [_padded(rows[begin : begin + size]) for begin in range(0, len(rows), size)]


def _rows_of(data: Sequence[Batch], kind: Kind) -> list[Batch]:
    """Return all rows, cut to the positions that are in use, on each side of an encoder-decoder."""
    rows = []
    for row in ({name: each[name][at] for name in _PADS} for each in data for at in range(len(each["input_ids"]))):
        spans = dict.fromkeys(_PADS, int(row["attention_mask"].sum()))
        if kind == "seq2seq":
            spans["labels"] = int((row["labels"] != IGNORE_INDEX).sum())
        rows.append({name: row[name][: spans[name]] for name in _PADS})
    return rows


def _length(row: Batch) -> int:
    return len(row["input_ids"])


def _padded(rows: Sequence[Batch]) -> Batch:
    return {
        name: nn.utils.rnn.pad_sequence([row[name] for row in rows], batch_first=True, padding_value=pad)
        for name, pad in _PADS.items()
    }


def flattened_unavailable(kind: Kind, loss: str, model: str, precision: Precision) -> str | None:
    """Return why the flattening collator with flash attention and Liger cannot run here; None if it can."""
    if kind != "causal" or loss != "model":
        return "rows are flattened for decoders with a loss of their own"
    missing = [name for package, name in _PACKAGES.items() if find_spec(package) is None]
    if missing:
        return f"{' and '.join(missing)} not installed"
    if precision.device.type != "cuda":
        return "flash attention needs a CUDA device"
    if precision.dtype == torch.float32:
        return "flash attention takes bf16 or fp16"
    return None if _liger(model) is not None else f"Liger has no kernels for {model}"


def flatten(batch: Batch) -> Batch:
    """Return the batch as transformers' `DataCollatorWithFlattening` makes it: one row of all tokens, on the host.

    `input_ids`, `position_ids` and `labels` (1, tokens), `cu_seq_lens_q` and `cu_seq_lens_k` (rows + 1,) int32,
    `max_length_q` and `max_length_k`.
    """
    from transformers import DataCollatorWithFlattening

    features = []
    for ids, mask, labels in zip(batch["input_ids"], batch["attention_mask"], batch["labels"], strict=True):
        on = mask.bool()
        features.append({"input_ids": ids[on].tolist(), "labels": labels[on].tolist()})
    collate = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    made: Batch = dict(collate(features, return_tensors="pt"))
    return made


def register_attention() -> None:
    """Register `OWN_ATTENTION` with transformers, for models built after this call."""
    from transformers import AttentionInterface

    AttentionInterface.register(OWN_ATTENTION, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seq_lens_q: Tensor,
    max_length_q: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention as transformers calls it.

    The shapes are (1, heads, tokens, head_dim) for the arguments and (1, tokens, heads, head_dim) for the result.
    sliding_window: how many keys a query sees, its own included. s_aux: (heads,), attention sinks.
    """
    from deepytorch.passes.ops.varlen_attention import varlen_attention

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    lengths = (cu_seq_lens_q, cu_seq_lens_q, max_length_q, max_length_q)
    output = varlen_attention(
        *(q, k, v, *lengths),
        sinks=s_aux,
        scale=scaling,
        window_left=-1 if sliding_window is None else sliding_window - 1,
        window_right=0,
        dropout_p=dropout,
        softcap=softcap or 0.0,
    )
    return output[None], None


def with_kernels(model: nn.Module, kernels: str, name: str) -> nn.Module:
    """Return a language model with the kernels of others: "liger", "flash" (attention), "flattened" (both), or "".

    Liger's rotary embedding is left out: it would replace that of every model in this process.
    """
    language_model = inner(model)
    if kernels in ("flash", "flattened"):
        language_model.set_attn_implementation(_FLASH)
    if kernels in ("liger", "flattened"):
        patch = _liger(language_model.config.model_type)
        if patch is None:
            raise ConfigError(f"Liger has no kernels for {name}; expected llama or another model that it knows.")
        patch(model=language_model, rope=False)
    return model


def ordered(workload: Workload, job: TrainingJob, replica: int, replicas: int, count: int) -> list[Batch]:
    """Return the micro-batches of one replica as the job asks for them, on the host.

    The rows are the same ones in any order. Sampled as transformers' Trainer does by its `train_sampling_strategy`:
    "group_by_length" for grouped, "batch_rebalance" for balanced.
    """
    rows = job.rows or workload.rows
    batches = workload.batches(rows, replica, count)
    if job.data == "grouped":
        batches = grouped(batches, "causal")
    elif job.data == "balanced":
        drawn = [batch for each in range(replicas) for batch in workload.batches(rows, each, count)]
        batches = _balanced(drawn, replica, replicas, job.parallel.accumulate)
    return batches


def arranged(batches: list[Batch], job: TrainingJob) -> list[Batch]:
    """Return batches as the job's kernels take them: rows laid end to end for flash attention."""
    return [flatten(batch) for batch in batches] if job.kernels in ("flash", "flattened") else batches


def _balanced(drawn: Sequence[Batch], replica: int, replicas: int, accumulate: int) -> list[Batch]:
    from transformers.trainer_pt_utils import BatchRebalanceSampler

    rows = _rows_of(drawn, "causal")
    together = len(drawn[0]["input_ids"]) * replicas * accumulate
    lengths = [_length(row) for row in rows]
    dealt = BatchRebalanceSampler(lengths, together, replicas, accumulate, shuffle=False, rank=replica)
    return [_padded([rows[at] for at in chosen]) for chosen in dealt]


def _liger(family: str) -> Any:
    from liger_kernel import transformers

    return getattr(transformers, f"apply_liger_kernel_to_{family}", None)
