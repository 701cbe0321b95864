"""Accelerate, with one line more: `accelerate launch --cpu examples/hosts/accelerate_loop.py`, or plain python.

`Accelerator(dynamo_backend="deepytorch")` says the same in its own words.
"""

import deepytorch  # the one line

import torch
from accelerate import Accelerator
from text import padded_batches, small_llama

accelerator = Accelerator()
model = small_llama()
model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
for step, batch in enumerate(padded_batches(20, accelerator.process_index)):
    loss = model(**{name: value.to(accelerator.device) for name, value in batch.items()}).loss
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
    accelerator.print(f"step {step}: loss {loss.item():.4f}")
accelerator.print(deepytorch.report())
accelerator.end_training()
