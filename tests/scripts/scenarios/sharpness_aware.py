"""SAM: a step uphill, a second forward and backward, and the step down from where it was."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    loss = model(**inputs).loss
    loss.backward()
    with torch.no_grad():
        size = torch.stack([weight.grad.norm() for weight in model.parameters()]).norm()
        moves = [weight.grad * (0.05 / size) for weight in model.parameters()]
        for weight, move in zip(model.parameters(), moves, strict=True):
            weight.add_(move)
    optimizer.zero_grad()
    outputs = model(**inputs)
    (outputs.loss + 0.1 * outputs.logits.pow(2).mean()).backward()
    with torch.no_grad():
        for weight, move in zip(model.parameters(), moves, strict=True):
            weight.sub_(move)
    optimizer.step()
    optimizer.zero_grad()
    history.append([loss.item(), outputs.loss.item()])
history.append(norms(model))
