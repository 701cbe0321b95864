"""DistributedDataParallel on two ranks with find_unused_parameters: heads are used by turns."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import TIMES, batch, bert, norms
from torch.nn.parallel import DistributedDataParallel

RANKS = 2


class TwoHeads(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder = bert()
        self.heads = torch.nn.ModuleList([torch.nn.Linear(32, 3), torch.nn.Linear(32, 3)])

    def forward(self, ids, mask, which):
        return self.heads[which](self.encoder(input_ids=ids, attention_mask=mask).last_hidden_state)


dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(TwoHeads(), find_unused_parameters=True)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
history = []
for step in range(4 * TIMES):
    ids, mask, _ = batch(10 * dist.get_rank() + step)
    logits = model(ids, mask, step % 2)
    loss = F.cross_entropy(logits.mean(1), ids[:, 1] % 3) + F.cross_entropy(logits[:, 0], ids[:, 1] % 3)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    history.append(loss.item())
history.append(norms(model))
dist.destroy_process_group()
