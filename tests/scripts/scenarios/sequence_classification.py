"""BERT's classifier with its own loss, and an accuracy from its logits."""

import torch
from tiny import batch, bert, norms
from transformers import BertForSequenceClassification

torch.manual_seed(0)
model = bert(BertForSequenceClassification, num_labels=3)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    labels = ids[:, 1] % 3
    outputs = model(input_ids=ids, attention_mask=mask, token_type_ids=torch.zeros_like(ids), labels=labels)
    optimizer.zero_grad()
    outputs.loss.backward()
    optimizer.step()
    history.append([outputs.loss.item(), (outputs.logits.argmax(-1) == labels).float().mean()])
history.append(norms(model))
