"""Full backward hooks log gradients of activations, and scale those of one layer."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
history = []
for layer in model.model.layers:
    layer.mlp.register_full_backward_hook(lambda module, grads, outer: history.append(outer[0].norm().item()))
model.model.layers[1].mlp.register_full_backward_pre_hook(lambda module, outer: (outer[0] * 0.5,))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    ids, mask, _ = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
