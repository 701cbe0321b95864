"""A T5 student follows a frozen teacher at all positions of the decoder, beside its own loss."""

import torch
import torch.nn.functional as F
from tiny import batch, norms, t5

torch.manual_seed(0)
student, teacher = t5(), t5().eval().requires_grad_(False)
optimizer = torch.optim.SGD(student.parameters(), lr=0.01)
history = []
for step in range(3):
    ids, mask, _ = batch(step)
    _, _, labels = batch(step + 50, length=10)
    outputs = student(input_ids=ids, attention_mask=mask, labels=labels)
    with torch.no_grad():
        expected = teacher(input_ids=ids, attention_mask=mask, labels=labels).logits
    apart = F.mse_loss(outputs.logits, expected)
    loss = outputs.loss + 0.1 * apart
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), apart.item()])
history.append(norms(student))
