"""Attention weights are asked for, and their entropy is a part of the loss."""

import torch
from tiny import batch, bert, norms
from transformers import BertForMaskedLM

torch.manual_seed(0)
model = bert(BertForMaskedLM, attn_implementation="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels, output_attentions=True)
    entropy = -sum((each * (each + 1e-9).log()).sum(-1).mean() for each in outputs.attentions)
    loss = outputs.loss - 0.1 * entropy
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), entropy.item()])
history.append(norms(model))
