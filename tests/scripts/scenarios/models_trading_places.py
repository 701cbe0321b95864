"""Co-distillation: two models teach each other, by turns."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
models = [llama(), llama()]
optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
history = []
for step in range(4):
    learner, teacher = step % 2, 1 - step % 2
    ids, mask, labels = batch(step)
    with torch.no_grad():
        expected = models[teacher](input_ids=ids, attention_mask=mask).logits.softmax(-1)
    outputs = models[learner](input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + F.kl_div(outputs.logits.log_softmax(-1), expected, reduction="none").sum(-1).mean()
    optimizers[learner].zero_grad()
    loss.backward()
    optimizers[learner].step()
    history.append(loss.item())
history.append([norms(models[0]), norms(models[1])])
