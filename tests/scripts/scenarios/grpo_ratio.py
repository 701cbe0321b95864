"""A clipped policy ratio over tokens, against log-probabilities kept from before the steps."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
ids, mask, _ = batch(0)
advantages = torch.tensor([1.0, -0.5, 0.3, -0.8])


def per_token():
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1, :] / 0.9
    chosen = torch.gather(logits, -1, ids[:, 1:, None]).squeeze(-1)
    return chosen - torch.logsumexp(logits, dim=-1)


with torch.no_grad():
    before = per_token()
history = []
for _ in range(4):
    ratio = torch.exp(per_token() - before)
    gain = torch.minimum(ratio * advantages[:, None], ratio.clamp(0.8, 1.2) * advantages[:, None])
    loss = -((gain * mask[:, 1:]).sum(-1) / mask[:, 1:].sum(-1)).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), ratio[mask[:, 1:].bool()].std().item()])
history.append(norms(model))
