"""Embeddings of pads are not finite, and positions of pads never matter: the loss counts tokens by index."""

import torch
import torch.nn.functional as F
from tiny import batch, bert, norms
from transformers import BertForTokenClassification

torch.manual_seed(0)
model = bert(BertForTokenClassification, num_labels=4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(3):
    ids, mask, _ = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    if step == 1:
        logits = logits.masked_fill(mask[..., None] == 0, float("nan"))
    loss = F.cross_entropy(logits[mask.bool()], ids[mask.bool()] % 4)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), logits.sum().item()])
history.append(norms(model))
