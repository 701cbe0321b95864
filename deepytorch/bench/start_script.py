"""The default script of `deepytorch bench start`: a Llama of four layers trains on rows of uneven lengths.

The code is written as any user would write it, under DistributedDataParallel if there are ranks.
"""

from __future__ import annotations

import os

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB, ROWS, LONGEST = 2048, 8, 384


def main() -> None:
    """Train until the process is ended."""
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if ranks > 1:
        torch.distributed.init_process_group("gloo")
    torch.manual_seed(0)
    model: nn.Module = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCAB,
            hidden_size=256,
            intermediate_size=704,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            pad_token_id=0,
            use_cache=False,
        )
    ).train()
    if ranks > 1:
        model = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    generator = torch.Generator().manual_seed(int(os.environ.get("RANK", "0")))
    while True:
        lengths = torch.empty(ROWS).log_normal_(4.4, 0.7, generator=generator).int().clamp(8, LONGEST)
        ids = torch.randint(3, VOCAB, (ROWS, int(lengths.max())), generator=generator)
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        labels = ids.masked_fill(mask == 0, -100)
        loss = model(input_ids=ids * mask, attention_mask=mask, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


if __name__ == "__main__":
    main()
