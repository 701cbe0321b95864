"""The model's own predictions, as mixtures of embeddings, are its next inputs; gradients go through both calls."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(3):
    ids, mask, labels = batch(step)
    logits = model(input_ids=ids, attention_mask=mask).logits
    soft = F.softmax(logits, dim=-1) @ model.get_input_embeddings().weight
    again = model(inputs_embeds=soft, attention_mask=mask).logits
    size = soft.pow(2).mean()
    loss = F.cross_entropy(again.flatten(0, 1), labels.flatten()) + 10 * size
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), size.item()])
history.append(norms(model))
