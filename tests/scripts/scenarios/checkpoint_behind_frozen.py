"""Reentrant checkpoints around blocks behind a frozen embedding, whose weights then get no gradient."""

import torch
from tiny import VOCAB, batch, bert, norms
from torch.utils.checkpoint import checkpoint


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.encoder = torch.nn.Embedding(VOCAB, 32), bert()
        self.head = torch.nn.Linear(32, VOCAB)
        self.embedding.requires_grad_(False)

    def forward(self, ids, mask):
        def encode(x, mask):
            return self.encoder(inputs_embeds=x, attention_mask=mask).last_hidden_state

        return self.head(checkpoint(encode, self.embedding(ids), mask, use_reentrant=True))


torch.manual_seed(0)
model = Model()
optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=0.05)
history = []
for step in range(6):
    if step == 4:  # from here on, all weights are trained
        model.embedding.requires_grad_(True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    ids, mask, labels = batch(step)
    loss = torch.nn.functional.cross_entropy(model(ids, mask).flatten(0, 1), labels.flatten())
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
    history.append(sum(each.grad is not None for each in model.parameters()))
history.append(norms(model))
