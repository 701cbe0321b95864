"""FGM: the embedding weights are moved along their gradient, a second backward adds to the first, and they go back."""

import torch
from tiny import batch, bert, norms
from transformers import BertForSequenceClassification

torch.manual_seed(0)
model = bert(BertForSequenceClassification, num_labels=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
weight = model.bert.embeddings.word_embeddings.weight
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids[:, 1] % 2}
    optimizer.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    backup = weight.data.clone()
    weight.data.add_(weight.grad / weight.grad.norm() * 0.5)
    attacked = model(**inputs).loss
    attacked.backward()
    weight.data = backup
    optimizer.step()
    history.append([loss.item(), attacked.item()])
history.append(norms(model))
