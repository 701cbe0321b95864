"""torch.optim.swa_utils: an averaged model, its learning rate, and an evaluation by it."""

import torch
from tiny import batch, llama, norms
from torch.optim.swa_utils import SWALR, AveragedModel

torch.manual_seed(0)
model = llama()
average = AveragedModel(model)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
schedule = SWALR(optimizer, swa_lr=0.05, anneal_epochs=2)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    schedule.step()
    average.update_parameters(model)
    with torch.no_grad():
        judged = average(input_ids=ids, attention_mask=mask, labels=labels)
    history.append([loss.item(), judged.loss.item(), judged.logits.mean().item()])
history.append([norms(model), norms(average)])
