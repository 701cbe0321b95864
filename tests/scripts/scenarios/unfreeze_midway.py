"""Only the head is trained at first; after two steps everything is."""

import torch
from tiny import batch, llama, norms

torch.manual_seed(0)
model = llama().requires_grad_(False)
model.lm_head.requires_grad_(True)
optimizer = torch.optim.SGD(model.lm_head.parameters(), lr=0.1)
history = []
for step in range(4):
    if step == 2:
        model.requires_grad_(True)
        rest = [weight for name, weight in model.named_parameters() if "lm_head" not in name]
        optimizer.add_param_group({"params": rest, "lr": 0.05})
    ids, mask, labels = batch(step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    loss = outputs.loss + 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append([loss.item(), sum(weight.grad is not None for weight in model.parameters())])
history.append(norms(model))
