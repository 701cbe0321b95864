"""Language models of transformers: those of PyTorch's benchmarks, of memory tables, and those that people fine-tune."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepytorch.bench.models import MAX_POSITIONS, SIZES, Size, build_model
from deepytorch.bench.zoo.workload import Workload
from deepytorch.data import text_batches


@dataclass(frozen=True, slots=True)
class _Text:
    """A language model.

    Attributes:
        family: Of `bench.models`.
        full, cpu: Its sizes as published, and for a CPU.
        vocab: Its words, likewise.
        positions: Of a row, likewise; 0: rows are texts of uneven lengths, prompts not learnt, else they are full.
        rows: Of a batch, likewise.
    """

    family: str
    full: Size
    cpu: Size
    vocab: tuple[int, int]
    positions: tuple[int, int] = (0, 0)
    rows: tuple[int, int] = (8, 8)


_BERT_WORDS, _SMALL = (30_522, 7_630), 8_192
_MODELS = {
    # as PyTorch's benchmarks have them: rows without padding
    "hf_Bert": _Text("bert", SIZES["base"], SIZES["quarter"], _BERT_WORDS, (128, 128), (4, 8)),
    "hf_Bart": _Text("bart", SIZES["base"], SIZES["quarter"], _BERT_WORDS, (128, 128), (4, 8)),
    "gpt2": _Text("gpt2", SIZES["base"], SIZES["quarter"], (50_257, _SMALL), (1024, 128), (4, 4)),
    # of PAI-Megatron-Patch's tables; the decoder is a Llama of GPT-1.3B's shape
    "bert_512": _Text("bert", SIZES["base"], SIZES["quarter"], _BERT_WORDS, (512, 128), (16, 4)),
    "gpt_1.3b": _Text("llama", Size(24, 2048, 32, 8192), Size(8, 256, 8, 704), (50_257, _SMALL), (1024, 256), (1, 1)),
    # that people fine-tune, on texts
    "llama": _Text("llama", SIZES["base"], SIZES["small"], (_SMALL, _SMALL)),
    "llama2_13b": _Text("llama", Size(40, 5120, 40, 13_824), SIZES["small"], (32_000, _SMALL), rows=(4, 4)),
    "qwen2_14b": _Text("qwen2", Size(48, 5120, 40, 13_824, 8), SIZES["small"], (152_064, _SMALL), rows=(4, 4)),
    "llama_65b": _Text("llama", Size(80, 8192, 64, 22_016), SIZES["small"], (32_000, _SMALL), rows=(8, 8)),
}
NAMES = tuple(_MODELS)


def workload(name: str, size: str, seed: int, data: Path | None) -> Workload:
    """Return one of these models. size: as for `build_workload`."""
    text, small = _MODELS[name], size != "full"
    vocab, positions = text.vocab[small], text.positions[small]
    chosen = {"full": text.full, "cpu": text.cpu}.get(size, size)
    model = build_model(text.family, chosen, vocab_size=vocab, seed=seed)

    def tokens(rows: int, seed: int, count: int) -> list[dict[str, Tensor]]:
        return _tokens(rows, positions, vocab, seed, count)

    def texts(rows: int, seed: int, count: int) -> list[dict[str, Tensor]]:
        words = min(vocab, _SMALL)  # a tokenizer of more is trained for minutes, and the embedded texts have few words
        return text_batches(data, words, batch_size=rows, max_length=MAX_POSITIONS, seed=seed, steps=count)

    return Workload(_Loss(model), tokens if positions else texts, text.rows[small])


class _Loss(nn.Module):
    """A language model that returns only its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch).loss


def _tokens(rows: int, positions: int, vocab: int, seed: int, count: int) -> list[dict[str, Tensor]]:
    """Return text without padding, as PyTorch's benchmarks give it to BERT."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(5, vocab, (rows, positions), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each.clone()} for each in ids]
