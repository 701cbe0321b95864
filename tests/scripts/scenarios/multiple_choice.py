"""Multiple choice: batches of three dimensions."""

import torch
from tiny import batch, bert, norms
from transformers import BertForMultipleChoice

torch.manual_seed(0)
model = bert(BertForMultipleChoice)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(4):
    ids, mask, _ = batch(step, rows=6)
    outputs = model(input_ids=ids.view(2, 3, 16), attention_mask=mask.view(2, 3, 16))
    loss = torch.nn.functional.cross_entropy(outputs.logits, torch.tensor([step % 3, 0]))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
