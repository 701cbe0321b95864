"""Autocast to bfloat16 with a gradient scaler; the model's own loss, and a z-loss on its logits."""

import torch
from tiny import batch, llama, norms

PRECISION = "bfloat16"

torch.manual_seed(0)
model = llama()
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
history = []
for step in range(4):
    ids, mask, labels = batch(step)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
        loss = outputs.loss + 1e-2 * outputs.logits.float().logsumexp(-1).pow(2).mean()
    optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    size = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    history.append([loss.item(), size.item(), scaler.get_scale()])
history.append(norms(model))
