"""DPO: log-probabilities of chosen and rejected rows under the model and under a frozen reference."""

import copy

import torch
import torch.nn.functional as F
from tiny import batch, llama, norms

torch.manual_seed(0)
policy = llama()
reference = copy.deepcopy(policy).eval().requires_grad_(False)
optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-2)


def log_probs(model, ids, mask, labels):
    logits = model(input_ids=ids, attention_mask=mask).logits[:, :-1]
    targets = labels[:, 1:].clone()
    counted = targets != -100
    targets[~counted] = 0
    per_token = torch.gather(logits.log_softmax(-1), 2, targets.unsqueeze(2)).squeeze(2)
    return (per_token * counted).sum(-1)


history = []
for step in range(4):
    ids, mask, labels = batch(step)
    labels[:, :2] = -100  # the prompt
    chosen, rejected = log_probs(policy, ids, mask, labels).chunk(2)
    with torch.no_grad():
        chosen_before, rejected_before = log_probs(reference, ids, mask, labels).chunk(2)
    margin = (chosen - chosen_before) - (rejected - rejected_before)
    loss = -F.logsigmoid(0.1 * margin).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), margin.tolist()])
history.append(norms(policy))
