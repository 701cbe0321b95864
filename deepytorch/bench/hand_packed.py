"""The baseline of packing by hand: the same model on one packed row, in eager, with deepytorch's attention operator.

The collator would have to pack (labels shifted first, positions counted anew in every row), and the attention would
have to be registered with transformers. Only decoders accept a packed row without further changes.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepytorch.bench.training_step import Arm, Batch
from deepytorch.data import IGNORE_INDEX

ATTENTION_NAME = "deepytorch_varlen"


def pack(batch: Batch) -> Batch:
    """Return the batch as one row of tokens, as a collator would make it.

    `batch` holds ids, mask and labels of shape (rows, positions). The result holds `input_ids` and `position_ids` (1,
    tokens), `shift_labels` (tokens,), `cu_seqlens` (rows + 1,) int32 and `max_length`. Labels are shifted inside their
    row first: the last token of a row predicts nothing.
    """
    mask = batch["attention_mask"].bool()
    lengths = mask.sum(1)
    cu_seqlens = F.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)
    shifted = F.pad(batch["labels"], (0, 1), value=IGNORE_INDEX)[:, 1:]
    positions = mask.long().cumsum(1) - 1
    return {
        "input_ids": batch["input_ids"][mask][None],
        "position_ids": positions[mask][None],
        "shift_labels": shifted[mask],
        "cu_seqlens": cu_seqlens,
        "max_length": int(lengths.max()),
    }


def hand_packed_arm(name: str, model: nn.Module) -> Arm:
    """Return an arm that runs packed batches (see `pack`) through `model`, built with `ATTENTION_NAME`, in eager.

    As transformers does, the head and the loss run on every token, in fp32 from the logits on.
    """

    def loss(batch: Batch) -> Tensor:
        lengths = {"cu_seqlens": batch["cu_seqlens"], "max_seqlen": batch["max_length"]}
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"], **lengths).logits
        return F.cross_entropy(logits[0].float(), batch["shift_labels"], ignore_index=IGNORE_INDEX)

    return Arm(name, model, loss)


def register_attention() -> None:
    """Register `ATTENTION_NAME` with transformers, for models built after this call."""
    from transformers import AttentionInterface

    AttentionInterface.register(ATTENTION_NAME, _attention)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    cu_seqlens: Tensor,
    max_seqlen: int,
    scaling: float | None = None,
    dropout: float = 0.0,
    **_: Any,
) -> tuple[Tensor, None]:
    """Compute causal attention as transformers calls it.

    The shapes are (1, heads, tokens, head_dim) for the arguments and (1, tokens, heads, head_dim) for the result.
    """
    from deepytorch.passes.ops.varlen_attention import varlen_attention

    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    lengths = (cu_seqlens, cu_seqlens, max_seqlen, max_seqlen)
    output = varlen_attention(q, k, v, *lengths, scale=scaling, window_right=0, dropout_p=dropout)
    return output[None], None
