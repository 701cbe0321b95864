"""Each parameter is updated as soon as its gradient is there, by an optimizer of its own."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizers = {weight: torch.optim.SGD([weight], lr=0.1) for weight in model.parameters()}


def update(weight):
    optimizers[weight].step()
    optimizers[weight].zero_grad()


for weight in model.parameters():
    weight.register_post_accumulate_grad_hook(update)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    sure = outputs.logits.detach().softmax(-1).amax(-1).mean()
    outputs.loss.backward()
    history.append([outputs.loss.item(), sure.item()])
history.append(norms(model))
