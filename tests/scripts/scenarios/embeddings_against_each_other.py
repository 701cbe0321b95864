"""Domain-adversarial training: a gradient reversal stands between the encoder and a second head."""

import torch
import torch.nn.functional as F
from tiny import batch, bert, norms


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        return inputs.view_as(inputs)

    @staticmethod
    def backward(ctx, grad):
        return -0.5 * grad


torch.manual_seed(0)
model, task, domain = bert(), torch.nn.Linear(32, 2), torch.nn.Linear(32, 2)
optimizer = torch.optim.SGD([*model.parameters(), *task.parameters(), *domain.parameters()], lr=0.05)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    hidden = model(input_ids=ids, attention_mask=mask).last_hidden_state
    loss = F.cross_entropy(task(hidden[:, 0]), ids[:, 1] % 2)
    loss = loss + F.cross_entropy(domain(Reverse.apply(hidden)).flatten(0, 1), ids.flatten() % 2)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append([norms(model), norms(domain)])
