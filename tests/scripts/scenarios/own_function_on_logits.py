"""A custom autograd function computes the loss from logits and writes their gradient itself."""

import torch
from tiny import batch, llama, norms


class CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, targets):
        chances = logits.softmax(-1)
        ctx.save_for_backward(chances, targets)
        return -chances.gather(-1, targets[..., None]).log().mean()

    @staticmethod
    def backward(ctx, grad):
        chances, targets = ctx.saved_tensors
        slope = chances.scatter_add(-1, targets[..., None], -torch.ones_like(chances[..., :1]))
        return grad * slope / targets.numel(), None


torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = CrossEntropy.apply(logits[:, :-1], ids[:, 1:])
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
