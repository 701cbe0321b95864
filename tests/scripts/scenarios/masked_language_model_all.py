"""BERT with a loss outside over all positions, pads among them."""

import torch
import torch.nn.functional as F
from tiny import batch, bert, norms
from transformers import BertForMaskedLM

torch.manual_seed(0)
model = bert(BertForMaskedLM)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    loss = F.cross_entropy(logits.transpose(1, 2), ids)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
