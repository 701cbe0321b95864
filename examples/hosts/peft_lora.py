"""PEFT's LoRA, with one line more: `python examples/hosts/peft_lora.py`."""

import deepytorch  # the one line

import torch
from peft import LoraConfig, get_peft_model
from text import padded_batches, small_llama

model = get_peft_model(small_llama(), LoraConfig(r=8, target_modules=["q_proj", "v_proj"]))
optimizer = torch.optim.AdamW((each for each in model.parameters() if each.requires_grad), lr=1e-3)
for step, batch in enumerate(padded_batches(20)):
    loss = model(**batch).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"step {step}: loss {loss.item():.4f}")
print(deepytorch.report())
