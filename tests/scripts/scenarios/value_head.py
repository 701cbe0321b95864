"""PPO-like: a value head on hidden states, its loss clipped and masked; the policy's loss over tokens."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model, value_head = llama(), torch.nn.Linear(32, 1)
optimizer = torch.optim.SGD([*model.parameters(), *value_head.parameters()], lr=0.05)
history = []
for step in range(4):
    ids, mask, _ = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, output_hidden_states=True)
    values = value_head(outputs.hidden_states[-1]).squeeze(-1)
    logs = outputs.logits[:, :-1].log_softmax(-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    returns = (mask.flip(1).cumsum(1).flip(1) / 16).float()
    advantages = (returns - values.detach())[:, 1:]
    advantages = (advantages - advantages.mean()) / advantages.std()
    policy_loss = -(logs * advantages * mask[:, 1:]).sum() / mask[:, 1:].sum()
    value_loss = ((values - returns).square() * mask).sum() / mask.sum()
    loss = policy_loss + 0.5 * value_loss
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([policy_loss.item(), value_loss.item()])
history.append([norms(model), norms(value_head)])
