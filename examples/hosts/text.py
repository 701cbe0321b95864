"""What the examples of this folder share: a small Llama with random weights, and padded batches of real text."""

from __future__ import annotations

from collections.abc import Iterator

from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, set_seed

from deepytorch.data import PAD_ID, batches, library_rows, train_tokenizer

VOCABULARY = 2048


def small_llama() -> LlamaForCausalLM:
    """Four layers of hidden size 256, the same weights on every rank."""
    set_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=256, intermediate_size=704, num_hidden_layers=4, num_attention_heads=4,
            max_position_embeddings=1024, pad_token_id=PAD_ID, use_cache=False,
        )
    )  # fmt: skip


def padded_batches(steps: int, rank: int = 0, batch_size: int = 8) -> Iterator[dict[str, Tensor]]:
    """ids, mask and labels (rows, positions), padded to the longest row; prompts are not learned."""
    rows = library_rows()
    tokenizer = train_tokenizer(rows, VOCABULARY)
    yield from batches(rows, tokenizer, batch_size=batch_size, max_length=384, seed=rank, steps=steps)
