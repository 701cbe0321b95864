"""LBFGS, which calls its closure several times a step."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
history = []
for step in range(3):
    ids, mask, labels = batch(step)

    def closure():
        optimizer.zero_grad()
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)  # noqa: B023
        loss = outputs.loss + 0.05 * outputs.logits.pow(2).mean()
        loss.backward()
        history.append(loss.item())
        return loss

    optimizer.step(closure)
history.append(norms(model))
