"""One dropout goes from nothing to everything after two steps (both can be compared)."""

import torch
from tiny import batch, bert, norms
from transformers import BertForMaskedLM

torch.manual_seed(0)
model = bert(BertForMaskedLM)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(4):
    if step == 2:
        model.bert.encoder.layer[1].output.dropout.p = 1.0
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
