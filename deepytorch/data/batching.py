"""Conversion of rows to padded batches, in the layouts of the usual collators of Hugging Face."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from deepytorch.data.rows import Row, load_rows
from deepytorch.data.tokenizer import BOS_ID, EOS_ID, MASK_ID, PAD_ID, SPECIAL_TOKENS, train_tokenizer
from deepytorch.errors import ConfigError, DataError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

IGNORE_INDEX = -100  # ignored by cross_entropy by default

Kind = Literal["causal", "masked", "seq2seq"]
Order = Literal["random", "length"]
Labels = Literal["response", "all"]
PadSide = Literal["right", "left"]

_MASKED_SHARE = 0.15  # of the tokens, with the 80/10/10 split of BERT (Devlin et al. 2018, section 3.1)


@dataclass(frozen=True, slots=True)
class _Example:
    """The token ids of one row: bos, prompt, response, eos, cut at the right to the longest length."""

    prompt: list[int]
    response: list[int]


def prompt_text(row: Row) -> str:
    """Return the prompt of `row` in the wording of Stanford Alpaca's train.py; the response follows it directly."""
    if row.input:
        return (
            "Below is an instruction that describes a task, paired with an input that provides further context. "
            "Write a response that appropriately completes the request.\n\n"
            f"### Instruction:\n{row.instruction}\n\n### Input:\n{row.input}\n\n### Response:\n"
        )
    return (
        "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
        f"### Instruction:\n{row.instruction}\n\n### Response:\n"
    )


def batches(
    rows: Sequence[Row],
    tokenizer: Tokenizer,
    *,
    batch_size: int,
    max_length: int,
    labels: Labels = "response",
    pad_side: PadSide = "right",
    seed: int = 0,
    kind: Kind = "causal",
    order: Order = "random",
    steps: int | None = None,
) -> Iterator[dict[str, Tensor]]:
    """Yield `steps` batches (None: without end) of rows, each row once before any comes again.

    order: "random", or "length": rows of similar lengths together, as `group_by_length` of transformers' Trainer does
    (at random, then sorted within 50 batches at a time; needs transformers).

    Every batch holds `input_ids`, `attention_mask` (1 at tokens) and `labels`, int64 on the CPU, padded to its longest
    row; `IGNORE_INDEX` stands wherever nothing is to be predicted, at pads always.

    - "causal": all three (batch_size, positions); labels are the ids themselves, unshifted, with the prompt's ignored
      for labels="response".
    - "masked": all three (batch_size, positions); 15 % of the tokens are to be predicted (80 % of them replaced by the
      mask token, 10 % by a random one), and `labels` makes no difference.
    - "seq2seq": ids and mask (batch_size, prompt positions), labels (batch_size, response positions), padded on the
      right, as DataCollatorForSeq2Seq does; `labels` makes no difference. There is no decoder mask: the model makes the
      decoder's ids out of the labels.

    A row whose prompt alone fills `max_length` tokens is left out. Raises `ConfigError` for a bad option, `DataError`
    when too few rows are left.
    """
    _check_options(batch_size, max_length, labels, pad_side, kind, order)
    examples = _examples(rows, tokenizer, max_length, split=kind == "seq2seq")
    if len(examples) < batch_size:
        raise DataError(
            f"{len(examples)} of {len(rows)} rows have a prompt shorter than {max_length} tokens, expected at least "
            f"one batch of {batch_size}. Give more rows, a smaller batch or a larger maximum length."
        )
    return _generate(examples, tokenizer.get_vocab_size(), batch_size, labels, pad_side, seed, kind, order, steps)


def text_batches(data: str | Path | None, vocab_size: int = 8192, **options: Any) -> list[dict[str, Tensor]]:
    """Return batches of the rows of a file (None: the embedded ones), whose tokenizer is trained on all these rows.

    options: of `batches`; `steps` has to be among them.
    """
    rows = load_rows(data)
    return list(batches(rows, train_tokenizer(rows, vocab_size), **options))


def num_positions(batch: dict[str, Tensor], kind: Kind) -> int:
    """Count rows x positions. An encoder-decoder also has those of its decoder, which are the labels' positions."""
    return batch["input_ids"].numel() + (batch["labels"].numel() if kind == "seq2seq" else 0)


def num_tokens(batch: dict[str, Tensor], kind: Kind) -> int:
    """Count the positions that are not pads, on both sides of an encoder-decoder."""
    return int(batch["attention_mask"].sum()) + (num_labels(batch) if kind == "seq2seq" else 0)


def num_labels(batch: dict[str, Tensor]) -> int:
    """Count the labels that are not ignored."""
    return int((batch["labels"] != IGNORE_INDEX).sum())


def _check_options(batch_size: int, max_length: int, labels: str, pad_side: str, kind: str, order: str) -> None:
    for name, value in (("batch_size", batch_size), ("max_length", max_length)):
        if value < 1:
            raise ConfigError(f"{name} is {value}, expected at least 1.")
    for name, text, choices in (
        ("labels", labels, get_args(Labels)),
        ("pad_side", pad_side, get_args(PadSide)),
        ("kind", kind, get_args(Kind)),
        ("order", order, get_args(Order)),
    ):
        if text not in choices:
            raise ConfigError(f'{name} is "{text}", expected one of {", ".join(choices)}.')


def _examples(rows: Sequence[Row], tokenizer: Tokenizer, max_length: int, *, split: bool) -> list[_Example]:
    """Tokenise `rows`. `split`: prompt and response are two sequences, each cut on its own; else one."""
    prompts = tokenizer.encode_batch([prompt_text(row) for row in rows], add_special_tokens=False)
    responses = tokenizer.encode_batch([row.output for row in rows], add_special_tokens=False)
    examples = []
    for prompt, response in zip(prompts, responses, strict=True):
        prompt_ids = [BOS_ID, *prompt.ids]
        if len(prompt_ids) < max_length:
            room = max_length if split else max_length - len(prompt_ids)
            examples.append(_Example(prompt_ids, [*response.ids, EOS_ID][:room]))
    return examples


def _generate(
    examples: list[_Example],
    vocab_size: int,
    batch_size: int,
    labels: Labels,
    pad_side: PadSide,
    seed: int,
    kind: Kind,
    order: Order,
    steps: int | None,
) -> Iterator[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    if order == "random":
        drawn = _draws(examples, batch_size, random.Random(seed))
    else:
        drawn = _by_length(examples, batch_size, seed)
    for step, chosen in enumerate(drawn):
        if step == steps:
            return
        if kind == "causal":
            yield _causal(chosen, labels, pad_side)
        elif kind == "masked":
            yield _masked(chosen, pad_side, vocab_size, generator)
        else:
            yield _seq2seq(chosen, pad_side)


def _draws(examples: list[_Example], batch_size: int, draw: random.Random) -> Iterator[list[_Example]]:
    """Yield batches without end. An epoch's last rows that do not fill a batch start the next epoch's first."""
    waiting: list[_Example] = []
    while True:
        waiting += draw.sample(examples, len(examples))
        while len(waiting) >= batch_size:
            yield waiting[:batch_size]
            waiting = waiting[batch_size:]


def _by_length(examples: list[_Example], batch_size: int, seed: int) -> Iterator[list[_Example]]:
    """Yield batches without end, with rows of similar lengths together.

    Rows that do not fill a batch at an epoch's end are left out.
    """
    from transformers.trainer_pt_utils import get_length_grouped_indices

    lengths = [len(example.prompt) + len(example.response) for example in examples]
    generator = torch.Generator().manual_seed(seed)
    while True:
        indices = get_length_grouped_indices(lengths, batch_size, generator=generator)
        for start in range(0, len(indices) - batch_size + 1, batch_size):
            yield [examples[index] for index in indices[start : start + batch_size]]


def _causal(chosen: list[_Example], labels: Labels, pad_side: PadSide) -> dict[str, Tensor]:
    ids = [example.prompt + example.response for example in chosen]
    if labels == "all":
        targets = ids
    else:
        targets = [[IGNORE_INDEX] * len(example.prompt) + example.response for example in chosen]
    return _with_mask(ids, pad_side) | {"labels": _pad(targets, IGNORE_INDEX, pad_side)}


def _masked(
    chosen: list[_Example], pad_side: PadSide, vocab_size: int, generator: torch.Generator
) -> dict[str, Tensor]:
    batch = _with_mask([example.prompt + example.response for example in chosen], pad_side)
    ids = batch["input_ids"]
    candidates = (ids >= len(SPECIAL_TOKENS)).flatten().nonzero().squeeze(1)
    num_picked = max(1, round(_MASKED_SHARE * candidates.numel()))
    picked = candidates[torch.randperm(candidates.numel(), generator=generator)[:num_picked]]
    targets = torch.full_like(ids, IGNORE_INDEX)
    targets.view(-1)[picked] = ids.view(-1)[picked]
    fate = torch.rand(picked.numel(), generator=generator)
    others = torch.randint(len(SPECIAL_TOKENS), vocab_size, (picked.numel(),), generator=generator)
    replaced = torch.where(fate < 0.8, MASK_ID, torch.where(fate < 0.9, others, ids.view(-1)[picked]))
    ids.view(-1)[picked] = replaced
    return batch | {"labels": targets}


def _seq2seq(chosen: list[_Example], pad_side: PadSide) -> dict[str, Tensor]:
    batch = _with_mask([example.prompt for example in chosen], pad_side)
    return batch | {"labels": _pad([example.response for example in chosen], IGNORE_INDEX, "right")}


def _with_mask(ids: list[list[int]], pad_side: PadSide) -> dict[str, Tensor]:
    return {
        "input_ids": _pad(ids, PAD_ID, pad_side),
        "attention_mask": _pad([[1] * len(row) for row in ids], 0, pad_side),
    }


def _pad(ids: list[list[int]], value: int, pad_side: PadSide) -> Tensor:
    """Return (rows, longest row) int64 with `value` at the pads."""
    longest = max(map(len, ids))
    padded = torch.full((len(ids), longest), value, dtype=torch.int64)
    for row, filled in zip(ids, padded, strict=True):
        start = longest - len(row) if pad_side == "left" else 0
        filled[start : start + len(row)] = torch.tensor(row)
    return padded
