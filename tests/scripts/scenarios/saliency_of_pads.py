"""The gradient of a loss over all positions with respect to the embeddings of pads is recorded."""

import torch
import torch.nn.functional as F
from tiny import batch, bert, norms
from transformers import BertForTokenClassification

torch.manual_seed(0)
model = bert(BertForTokenClassification, num_labels=5)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    embedded = model.get_input_embeddings()(ids)
    embedded.retain_grad()
    logits = model(inputs_embeds=embedded, attention_mask=mask).logits
    loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten() % 5)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), embedded.grad.norm(dim=-1)])
history.append(norms(model))
