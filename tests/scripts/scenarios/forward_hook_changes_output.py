"""A hook steers the model: it adds a learned vector to the first layer's output."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
steering = torch.nn.Parameter(torch.randn(32))
model.model.layers[0].mlp.register_forward_hook(lambda module, args, output: output + 0.1 * steering)
model.register_forward_pre_hook(
    lambda module, args, kwargs: (args, {**kwargs, "input_ids": kwargs["input_ids"].clamp(max=90)}), with_kwargs=True
)
optimizer = torch.optim.SGD([*model.parameters(), steering], lr=0.1)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), steering.detach().norm().item()])
history.append(norms(model))
