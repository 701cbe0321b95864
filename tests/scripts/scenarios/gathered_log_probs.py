"""Log-probabilities of the next tokens are gathered at all positions, and summed without a mask."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    logs = torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits, dim=-1)
    loss = -logs[:, :-1].gather(2, ids[:, 1:, None]).squeeze(-1).sum(-1).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
