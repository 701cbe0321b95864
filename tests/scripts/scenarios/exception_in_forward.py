"""A forward fails in the middle of a layer; the script goes on with the next batch."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
failing = False


def fail(module, args, output):
    if failing:
        raise ValueError("out of memory, or so")


model.model.layers[1].mlp.register_forward_hook(fail)
history = []
for step in range(4):
    failing = step == 2
    ids, mask, labels = batch(step)
    try:
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    except ValueError:
        history.append(-1.0)
        continue
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
