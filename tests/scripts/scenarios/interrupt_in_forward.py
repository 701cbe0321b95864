"""A forward is interrupted from the keyboard, in its first step and in a later one; the script goes on."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
interrupted = False


def interrupt(module, args):
    if interrupted:
        raise KeyboardInterrupt


model.model.layers[1].register_forward_pre_hook(interrupt)
history = []
for step in range(5):
    interrupted = step in (0, 3)
    ids, mask, labels = batch(step)
    try:
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    except KeyboardInterrupt:
        history.append(-1.0)
        continue
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
