"""The model's forward is replaced on the instance after two steps."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
forward = model.forward


def louder(*args, **kwargs):
    outputs = forward(*args, **kwargs)
    outputs.loss = outputs.loss * 2 + 0.1 * outputs.logits.pow(2).mean()
    return outputs


history = []
for step in range(4):
    if step == 2:
        model.forward = louder
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    optimizer.zero_grad()
    outputs.loss.backward()
    optimizer.step()
    history.append([outputs.loss.item(), outputs.logits.mean().item()])
history.append(norms(model))
