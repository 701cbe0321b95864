"""R-drop: two forwards of one batch, and the divergence between them (dropout is off, so that it can be compared)."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    one = model(input_ids=ids, attention_mask=mask, labels=labels)
    two = model(input_ids=ids, attention_mask=mask, labels=labels)
    first, second = F.log_softmax(one.logits, -1), F.log_softmax(two.logits.roll(1, 0), -1)
    apart = F.kl_div(first, second, reduction="batchmean", log_target=True)
    apart = apart + F.kl_div(second, first, reduction="batchmean", log_target=True)
    loss = (one.loss + two.loss) / 2 + 0.01 * apart
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), apart.item()])
history.append(norms(model))
