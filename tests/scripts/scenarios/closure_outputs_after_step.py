"""SGD with a closure; the logits of its tokens, which nobody read in other steps, are read after the step."""

import torch
from tiny import batch, llama, norms

DEFAULT = True

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
outputs = None


def evaluated(given):
    global outputs
    optimizer.zero_grad()
    outputs = model(**given)
    outputs.loss.backward()
    return outputs.loss


for step in range(4):
    ids, mask, labels = batch(step)
    given = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    history.append(optimizer.step(lambda given=given: evaluated(given)).item())
    if step == 2:
        history.append(outputs.logits.detach()[mask.bool()].mean())
history.append(norms(model))
