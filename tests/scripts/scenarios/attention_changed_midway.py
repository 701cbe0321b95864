"""The implementation of attention is changed after two steps, and attention weights are read from then on."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    if step == 2:
        model.set_attn_implementation("eager")
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, output_attentions=step >= 2)
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    if step >= 2:
        loss = loss + outputs.attentions[0].max(-1).values.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
