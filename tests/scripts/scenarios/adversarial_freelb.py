"""FreeLB: several steps of noise on the embeddings, gradients of the weights accumulated over them."""

import torch
from tiny import batch, bert, norms
from transformers import BertForSequenceClassification

torch.manual_seed(0)
model = bert(BertForSequenceClassification, num_labels=2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(3):
    ids, mask, _ = batch(step)
    noise = torch.empty(4, 16, 32).uniform_(-0.1, 0.1) * mask[..., None]
    optimizer.zero_grad()
    losses = []
    for _ in range(2):
        noise = noise.detach().requires_grad_()
        embedded = model.bert.embeddings.word_embeddings(ids) + noise
        loss = model(inputs_embeds=embedded, attention_mask=mask, labels=ids[:, 1] % 2).loss / 2
        loss.backward()
        noise = noise + 0.1 * noise.grad / noise.grad.flatten(1).norm(dim=1).clamp(min=1e-8)[:, None, None]
        losses.append(loss.item())
    optimizer.step()
    history.append([losses, noise.norm().item()])
history.append(norms(model))
