"""BERT fills masked tokens; the loss stands outside and counts only these."""

import torch
import torch.nn.functional as F
from tiny import batch, bert, norms
from transformers import BertForMaskedLM

torch.manual_seed(0)
model = bert(BertForMaskedLM)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    hidden = torch.rand(ids.shape) < 0.3
    hidden[:, 1] = True
    logits = model(input_ids=ids.masked_fill(hidden, 2), attention_mask=mask).logits
    loss = F.cross_entropy(logits.transpose(1, 2), labels.masked_fill(~hidden, -100))
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
