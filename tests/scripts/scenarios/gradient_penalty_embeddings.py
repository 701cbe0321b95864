"""A penalty on the gradient with respect to the embeddings: autograd.grad with create_graph."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama(attn_implementation="eager")
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    embedded = model.get_input_embeddings()(ids)
    logits = model(inputs_embeds=embedded, attention_mask=mask).logits
    loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    (slope,) = torch.autograd.grad(loss, embedded, create_graph=True)
    loss = loss + slope.pow(2).sum()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
