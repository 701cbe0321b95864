"""Batches of a task: a few rows of uneven lengths, padded on the right, on the left, or on either side."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import torch

from deepytorch.bench.model_classes.catalog import NUM_LABELS

FIRST_ID, LAST_ID = 10, 99  # ids below and above are special to some family
IGNORED = -100
STEPS_BEFORE = 2
_LENGTHS = ((24, 9, 15, 5), (24, 20, 3, 11), (32, 6, 17, 13))  # of the rows of a batch


@dataclass(frozen=True, slots=True)
class Batch:
    """One batch. side: of the pads. mask: (rows, positions), where its outputs are real."""

    side: str
    arguments: dict[str, Any]
    mask: torch.Tensor


def batches_of(task: str, config: Any, accepted: Collection[str]) -> list[Batch]:
    """Return the batches that a model learns from in turn; `accepted` are the arguments of its forward.

    A decoder gets left padding and a mix of both sides too. The first `STEPS_BEFORE` run in eager even of a model that
    packs: a graph may have to be traced, and declined, before the model is packed at its entry, profiled there.
    """
    sides = ("right",) * (STEPS_BEFORE + 2) + (("left", "mixed") if task == "causal" else ())
    generator = torch.Generator().manual_seed(1)
    found = []
    for number, side in enumerate(sides):
        lengths = _LENGTHS[number % len(_LENGTHS)]
        found.append(_batch(task, config, accepted, side, lengths, generator))
    return found


def _batch(
    task: str, config: Any, accepted: Collection[str], side: str, lengths: tuple[int, ...], generator: torch.Generator
) -> Batch:
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    pad = _number(text, "pad_token_id", 0)
    most = (_number(text, "vocab_size", None) or LAST_ID + 2) - 2
    ids, mask = _rows(lengths, side, pad, generator)
    ids = ids.where(~mask, ids.clamp(max=most))
    eos = _number(text, "eos_token_id", None)
    if eos is not None:
        for row in range(len(lengths)):
            ids[row, mask[row].nonzero().max()] = eos  # some classify a row by it
    ids_name = "inputs" if "inputs" in accepted and "input_ids" not in accepted else "input_ids"
    arguments: dict[str, Any] = {ids_name: ids, "attention_mask": mask.long()}
    if "bbox" in accepted:
        corners = torch.randint(0, 50, (*ids.shape, 2), generator=generator)
        arguments["bbox"] = torch.cat([corners, corners + 10], -1)
    if task == "sequence":
        arguments["labels"] = torch.randint(0, NUM_LABELS, (len(lengths),), generator=generator)
    elif task == "question":
        starts = mask.long().argmax(1)
        arguments["start_positions"] = starts + torch.tensor([length // 3 for length in lengths])
        arguments["end_positions"] = starts + torch.tensor([length - 1 for length in lengths])
    elif task == "seq2seq" and config.is_encoder_decoder:  # some that are listed there have a decoder alone
        labels, mask = _rows([max(2, length // 2) for length in lengths], "right", IGNORED, generator)
        arguments["labels"] = labels
        if config.model_type == "fsmt":  # makes no inputs of its decoder from labels
            arguments["decoder_input_ids"] = labels.clamp(min=0).roll(1, 1)
    else:
        labels = torch.randint(0, NUM_LABELS, ids.shape, generator=generator) if task == "token" else ids.clone()
        if task == "masked":
            labels[torch.rand(ids.shape, generator=generator) < 0.6] = IGNORED
        if task == "causal" and side != "right":  # a row's first token is told from a pad, which no pass may leave out
            mask_of_labels = mask & mask.roll(1, 1).index_fill(1, torch.tensor([0]), False)
        else:
            mask_of_labels = mask
        arguments["labels"] = labels.masked_fill(~mask_of_labels, IGNORED)
        if task == "masked" and config.is_encoder_decoder:  # its decoder reads labels
            mask = arguments["labels"] != IGNORED
    kept = {name: value for name, value in arguments.items() if name in accepted or name == "labels"}
    return Batch(side, kept, mask)


def _rows(
    lengths: tuple[int, ...] | list[int], side: str, pad: int | None, generator: torch.Generator
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ids and the mask of rows, both (rows, positions)."""
    width = max(lengths)
    places = torch.arange(width)
    mask = torch.stack([places < length for length in lengths])
    for row, length in enumerate(lengths):
        if side == "left" or (side == "mixed" and row % 2):
            mask[row] = places >= width - length
    ids = torch.randint(FIRST_ID, LAST_ID + 1, (len(lengths), width), generator=generator)
    return ids.masked_fill(~mask, 0 if pad is None else pad), mask


def _number(config: Any, name: str, otherwise: int | None) -> int | None:
    value = getattr(config, name, None)
    first = value[0] if isinstance(value, list | tuple) and value else value
    return first if isinstance(first, int) else otherwise
