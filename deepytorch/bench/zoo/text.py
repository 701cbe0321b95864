"""Language models of transformers: BERT, BART and Llama."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from deepytorch.bench.models import MAX_POSITIONS, build_model
from deepytorch.bench.zoo.workload import Workload
from deepytorch.data import text_batches


def workload(name: str, size: str, seed: int, data: Path | None) -> Workload:
    """Return one of these models. BERT and BART learn full rows, as in PyTorch's benchmarks; Llama learns real text."""
    full = size == "full"
    vocab = 30_522 if full else 7_630
    if name != "llama":
        model = build_model(name[3:].lower(), "base" if full else "quarter", vocab_size=vocab, seed=seed)

        def tokens(rows: int, seed: int, count: int) -> list[dict[str, Tensor]]:
            return _tokens(rows, 128, vocab, seed, count)

        return Workload(_Loss(model), tokens, 4 if full else 8)
    model = build_model("llama", "base" if full else "small", vocab_size=8_192, seed=seed)

    def texts(rows: int, seed: int, count: int) -> list[dict[str, Tensor]]:  # of uneven lengths, prompts not learnt
        return text_batches(data, batch_size=rows, max_length=MAX_POSITIONS, seed=seed, steps=count)

    return Workload(_Loss(model), texts, 8)


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
