"""The model generates between steps, in training mode and in evaluation mode."""

import torch
from tiny import TIMES, batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4 * TIMES):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    optimizer.zero_grad()
    outputs.loss.backward()
    optimizer.step()
    model.train(step % 2 == 0)
    left, left_mask, _ = batch(step, side="left", length=8)
    said = model.generate(input_ids=left, attention_mask=left_mask, max_new_tokens=4, do_sample=False)
    model.train()
    history.append([outputs.loss.item(), said])
history.append(norms(model))
