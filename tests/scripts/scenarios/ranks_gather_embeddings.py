"""Two ranks gather their pooled embeddings for a contrastive loss, without DistributedDataParallel."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import batch, bert, norms

RANKS = 2

dist.init_process_group("gloo")
torch.manual_seed(0)
model = bert()
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(3):
    ids, mask, _ = batch(10 * dist.get_rank() + step)
    mine = F.normalize(model(input_ids=ids, attention_mask=mask).last_hidden_state.mean(1), dim=-1)
    everyone = [torch.empty_like(mine) for _ in range(2)]
    dist.all_gather(everyone, mine.detach())
    everyone[dist.get_rank()] = mine
    scores = mine @ torch.cat(everyone).T / 0.2
    loss = F.cross_entropy(scores, 4 * dist.get_rank() + torch.arange(4).roll(1))
    optimizer.zero_grad()
    loss.backward()
    for weight in model.parameters():
        if weight.grad is not None:
            dist.all_reduce(weight.grad)
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
dist.destroy_process_group()
