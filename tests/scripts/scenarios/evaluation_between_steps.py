"""The same batch is evaluated before and after each step: losses and logits at all positions."""

import torch
from tiny import TIMES, batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []


def judge(inputs):
    model.eval()
    with torch.no_grad():
        outputs = model(**inputs)
    model.train()
    return [outputs.loss.item(), outputs.logits.norm().item()]


for step in range(3 * TIMES):
    ids, mask, labels = batch(step)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    before = judge(inputs)
    outputs = model(**inputs)
    ratio = outputs.logits.detach().norm().item() / before[1]
    optimizer.zero_grad()
    outputs.loss.backward()
    optimizer.step()
    history.append([before, outputs.loss.item(), ratio, judge(inputs)])
history.append(norms(model))
