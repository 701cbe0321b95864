"""A padded batch of Megatron-LM's GPT or BERT, packed into one row.

[Note: pads of Megatron-LM]
Which positions of a batch are pads follows from the model's own arguments, and is looked at in every call:

- BERT's attention mask (rows, positions) is 1 at tokens. Its attention looks to both sides, so all of them are kept.
- GPT's attention is causal. Its mask, (rows or 1, 1, positions, positions) bool, hides where it is true. A position
  that its mask hides from itself is a pad. For the positions that are kept the mask is compared with its only meaning
  that is taken: hidden is what comes later, or is a pad. Most batches for GPT have no more than this causal mask, and
  say by the `loss_mask` which losses count: nothing that counts sees a position behind a row's last loss that does.
  So the rest of the row is left out, as pads are, whatever its ids are.

The model gives the losses of all positions, and the script takes those that count. That is no assumption: outputs are
deferred, as of any packed model, and a use that looks at the others has them computed (docs/outputs.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepytorch.compiler.step.batch_facts import Refusal, count_true, cumulative, places_of
from deepytorch.device_reads import send
from deepytorch.integrations.packed_attention import Rows, encode_mask
from deepytorch.integrations.packed_batch import PackedBatch, RowKind, Side

BY_TOKEN = ("input_ids", "position_ids", "labels", "tokentype_ids", "lm_labels")  # (rows, positions)
READ_ONLY = ("attention_mask", "loss_mask")  # from which pads are known
AS_GIVEN = ("runtime_gather_output",)

Checks = list[tuple[str, Tensor]]  # reasons against packing, each with a tensor that is true where it holds


def unknown_argument(given: Mapping[str, Any]) -> str | None:
    """Return a reason not to pack for the arguments of a call; None if all are known, and of the expected shapes."""
    for name, value in given.items():
        if value is not None and name not in (*BY_TOKEN, *READ_ONLY, *AS_GIVEN):
            return f"the argument {name} is given"
    ids = given.get("input_ids")
    if not isinstance(ids, Tensor) or ids.dim() != 2:
        return "no ids (rows, positions) are given"
    for name in (*BY_TOKEN, "loss_mask"):
        value = given.get(name)
        if value is not None and (type(value) is not Tensor or value.shape != ids.shape):
            return f"{name} is not a tensor of the shape of input_ids"
    mask = given.get("attention_mask")
    if mask is not None and type(mask) is not Tensor:
        return "the attention mask is not a tensor"
    return None


def row_kind(given: Mapping[str, Any], *, causal: bool, ignores_mask: bool, pools: bool) -> RowKind:
    """Return the positions of a row at which tokens may stand.

    Under a causal mask for all rows, and by a fused softmax that ignores the mask (`ignores_mask`), pads are hidden by
    standing behind the tokens only. A pooler (`pools`) reads the first position of each row.
    """
    mask = given.get("attention_mask")
    hides_pads = mask is not None and (not causal or (mask.shape[0] > 1 and not ignores_mask))
    return RowKind.ANY if hides_pads and not pools else RowKind.PREFIX


def pack_batch(given: Mapping[str, Any], *, causal: bool, kind: RowKind, multiple: int) -> PackedBatch | Refusal:
    """Pack the arguments of a call, for which `unknown_argument` has found nothing; or return a `Refusal`.

    This takes one synchronisation with the device.

    Args:
        given: Arguments of the model's forward, by name.
        causal: Whether the model is GPT, and not BERT.
        kind: The positions of a row at which tokens may stand.
        multiple: The number of entries of the packed row is a multiple of this: dummies fill it up, in a row of their
            own whose outputs nobody gets.
    """
    ids = given["input_ids"]
    found = _tokens_of_gpt(given) if causal else _tokens_of_bert(given)
    if isinstance(found, Refusal):
        return found
    tokens, checks = found
    checks.append((f"{kind.value}, which the model was not proved for", kind.violations(tokens)))
    [lengths, *violated] = count_true([tokens, *(violation for _, violation in checks)])
    for (reason, _), count in zip(checks, violated, strict=True):
        if any(count):
            return Refusal(reason)
    if min(lengths) < 1:
        return Refusal("a row without a token")
    if sum(lengths) == ids.numel():
        return Refusal("hardly any padding in the batch")
    num_tokens, width = sum(lengths), ids.shape[1]
    dummies = -num_tokens % multiple
    indices = send(places_of(tokens.reshape(-1), num_tokens), ids.device)
    columns = F.pad((indices % width).to(torch.int32), (0, dummies))
    starts = send(cumulative([*lengths, dummies] if dummies else lengths), ids.device)
    side = Side(Rows(starts, columns, width), indices, *ids.shape)
    arguments = {name: given[name] for name in AS_GIVEN if given.get(name) is not None}
    arguments |= {name: None for name in ("position_ids",) if name in given}
    arguments |= {name: F.pad(side.pack(given[name]), (0, dummies)) for name in BY_TOKEN if given.get(name) is not None}
    arguments["attention_mask"] = encode_mask(side.rows)
    return PackedBatch(arguments, side, None)


def _tokens_of_gpt(given: Mapping[str, Any]) -> tuple[Tensor, Checks] | Refusal:
    """Return the tokens that GPT needs, (rows, positions) bool, and what speaks against packing."""
    ids, mask, loss_mask = given["input_ids"], given.get("attention_mask"), given.get("loss_mask")
    positions = ids.shape[1]
    tokens, checks = torch.ones_like(ids, dtype=torch.bool), []
    if mask is not None:
        if mask.dtype != torch.bool or mask.shape not in ((each, 1, positions, positions) for each in (1, len(ids))):
            return Refusal("the attention mask is not bool (rows or 1, 1, positions, positions)")
        tokens = tokens & ~mask[:, 0].diagonal(dim1=1, dim2=2)
    if loss_mask is not None:
        tokens = tokens & (loss_mask != 0).flip(1).cummax(1).values.flip(1)
    if mask is not None:
        hidden = mask[:, 0].diagonal(dim1=1, dim2=2)[:, None]
        later = torch.ones(positions, positions, dtype=torch.bool, device=ids.device).triu(1)
        strange = (mask[:, 0] != (hidden | later)) & tokens[:, :, None]
        checks.append(("the attention mask hides more, or less, than pads and what comes later", strange.sum()[None]))
    return tokens, checks


def _tokens_of_bert(given: Mapping[str, Any]) -> tuple[Tensor, Checks] | Refusal:
    """Return the tokens of a batch for BERT, (rows, positions) bool, and what speaks against packing."""
    mask = given.get("attention_mask")
    if mask is None or mask.shape != given["input_ids"].shape:
        return Refusal("the attention mask is not one of 0 and 1 for each position")
    tokens = mask == 1
    return tokens, [("a mask holds numbers besides 0 and 1", ~tokens & (mask != 0))]


@contextmanager
def reading_packed(model: Any, batch: PackedBatch) -> Iterator[None]:
    """Let a model's own work on positions know the places of a packed row's entries, inside of the block.

    That is: rotary embeddings, BERT's positions and its extended mask, and its pooler. Everything else but attention
    works on each entry by itself.
    """
    side = batch.main
    changed: list[tuple[nn.Module, str]] = []

    def put(module: nn.Module | None, name: str, make: Callable[[Any], Callable[..., Any]]) -> None:
        if module is not None and hasattr(module, name):
            vars(module)[name] = make(getattr(module, name))
            changed.append((module, name))

    places = side.rows.positions.long()
    try:
        put(getattr(model, "rotary_pos_emb", None), "forward", lambda original: _rotary(original, side, places))
        put(model, "bert_position_ids", lambda _: lambda token_ids: places[None])
        put(model, "bert_extended_attention_mask", lambda _: lambda attention_mask: attention_mask)
        put(getattr(model, "pooler", None), "forward", lambda original: _pooler(original, side))
        yield
    finally:
        for module, name in changed:
            del vars(module)[name]


def _rotary(original: Callable[..., Tensor], side: Side, places: Tensor) -> Callable[..., Tensor]:
    def forward(max_seq_len: int, *args: Any, **kwargs: Any) -> Tensor:
        return original(side.num_positions, *args, **kwargs)[places]

    return forward


def _pooler(original: Callable[..., Tensor], side: Side) -> Callable[..., Tensor]:
    """Return the pooler's forward, which reads the first position of each row, for hidden states (tokens, 1, ...)."""

    def forward(hidden_states: Tensor, sequence_index: int = 0) -> Tensor:
        starts = side.rows.cu_seqlens[: side.num_rows].long()
        return original(hidden_states[starts, 0][None], sequence_index)

    return forward
