"""Accelerate's loop with accumulation; the loss stands outside and counts pads."""

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from tiny import batch, llama, norms

torch.manual_seed(0)
accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer = accelerator.prepare(model, optimizer)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    with accelerator.accumulate(model):
        logits = model(input_ids=ids, attention_mask=mask).logits
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    history.append(loss.item())
history.append(norms(accelerator.unwrap_model(model)))
