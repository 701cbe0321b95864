"""Fine-tune a small random-weight Llama on text of uneven lengths, with the padding stripped.

    pip install -e '.[hf]' && python examples/finetune_llama.py

The one line that is ours is the one with `backend=`. Swap in your own model, collator and data: nothing else changes.
"""

from __future__ import annotations

import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import deepytorch
from deepytorch.data import batches, load_rows, train_tokenizer

VOCAB_SIZE = 4096
NUM_STEPS = 8


def main() -> None:
    """Train for a few steps and print what was saved."""
    torch.manual_seed(0)
    rows = load_rows()
    tokenizer = train_tokenizer(rows, VOCAB_SIZE)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=256,
        intermediate_size=704,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=512,
    )
    model = LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    step = torch.compile(model, backend="deepytorch")

    for index, batch in enumerate(batches(rows, tokenizer, batch_size=8, max_length=512, steps=NUM_STEPS)):
        start = time.perf_counter()
        loss = step(**batch).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        seconds = time.perf_counter() - start
        real = batch["attention_mask"].float().mean().item()
        print(f"step {index}: loss {loss.item():.4f}, {seconds:.2f} s, {real:.0%} of the positions are tokens")

    print(deepytorch.report())


if __name__ == "__main__":
    main()
