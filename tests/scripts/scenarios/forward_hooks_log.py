"""Forward hooks log the mean size of activations, and change nothing."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
history = []
for layer in model.model.layers:
    layer.register_forward_hook(
        lambda module, args, output: history.append(
            (output[0] if isinstance(output, tuple) else output).abs().mean().item()
        )
    )
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    ids, mask, labels = batch(step)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
