"""The model is frozen for a call on embeddings that are trained, and thawed before its logits are first used."""

import torch
from tiny import TIMES, batch, llama, norms

torch.manual_seed(0)
model, prompt = llama(), torch.nn.Embedding(96, 32)
optimizer = torch.optim.SGD([*model.parameters(), *prompt.parameters()], lr=0.05)
history = []
for step in range(6 * TIMES):
    ids, mask, labels = batch(step)
    model.requires_grad_(False)
    outputs = model(inputs_embeds=prompt(ids), attention_mask=mask, labels=labels)
    model.requires_grad_(True)
    loss = outputs.loss
    if step == 3 * TIMES:
        loss = loss + 0.1 * outputs.logits[mask.bool()].pow(2).mean()
    if step >= 4 * TIMES:
        loss = loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    history.append(
        [loss.item(), *[-1 if w.grad is None else w.grad.norm() for w in model.parameters()], prompt.weight.grad.norm()]
    )
    optimizer.step()
history.append(norms(model) + norms(prompt))
