"""The script looks embeddings up itself, adds noise to them (NEFTune), and calls the model with them."""

import torch
from tiny import TIMES, batch, llama, norms

DEFAULT = True
EXPECT = "packed"

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(5 * TIMES):
    ids, mask, labels = batch(step)
    embedded = model.get_input_embeddings()(ids)
    noise = torch.rand(embedded.shape, generator=torch.Generator().manual_seed(step)) - 0.5
    loss = model(inputs_embeds=embedded + 0.1 * noise, attention_mask=mask, labels=labels).loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
