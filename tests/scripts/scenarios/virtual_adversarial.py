"""Virtual adversarial training: the divergence between clean and disturbed logits, at all positions."""

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(3):
    ids, mask, labels = batch(step)
    embedded = model.get_input_embeddings()(ids)
    outputs = model(inputs_embeds=embedded, attention_mask=mask, labels=labels)
    clean = outputs.logits.detach()
    noise = (torch.randn(4, 16, 32) * 0.05).requires_grad_()
    disturbed = model(inputs_embeds=embedded.detach() + noise, attention_mask=mask).logits
    apart = F.kl_div(disturbed.log_softmax(-1), clean.softmax(-1), reduction="batchmean")
    (slope,) = torch.autograd.grad(apart, noise)
    noise = (noise + slope / (slope.abs().max() + 1e-6)).detach()
    disturbed = model(inputs_embeds=embedded + noise, attention_mask=mask).logits
    apart = F.kl_div(disturbed.log_softmax(-1), clean.softmax(-1), reduction="batchmean")
    loss = outputs.loss + 0.1 * apart
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), apart.item()])
history.append(norms(model))
