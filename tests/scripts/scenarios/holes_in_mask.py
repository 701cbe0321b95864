"""Single tokens inside of rows are masked as well."""

import torch
from tiny import batch, norms
from tiny import bert as encoder
from transformers import BertForMaskedLM

torch.manual_seed(0)
model = encoder(BertForMaskedLM)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    if step % 2:
        mask[:, 1] = 0
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + outputs.logits.mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
