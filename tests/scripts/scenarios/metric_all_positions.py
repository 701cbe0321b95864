"""A metric over all positions: how often the pad would be predicted, and how sure the model is on average."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    outputs.loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    guesses = outputs.logits.detach().argmax(dim=-1)
    sure = outputs.logits.detach().softmax(-1).amax(-1).mean()
    history.append([outputs.loss.item(), (guesses == 0).float().mean(), guesses.float().mean(), sure])
history.append(norms(model))
