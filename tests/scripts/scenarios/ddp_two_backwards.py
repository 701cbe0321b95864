"""DistributedDataParallel on two ranks: two losses of one forward, each with a backward of its own."""

import torch
import torch.distributed as dist
from tiny import batch, llama, norms
from torch.nn.parallel import DistributedDataParallel

RANKS = 2

dist.init_process_group("gloo")
torch.manual_seed(0)
model = DistributedDataParallel(llama())
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
history = []
for step in range(3):
    ids, mask, labels = batch(10 * dist.get_rank() + step)
    outputs = model(input_ids=ids, attention_mask=mask, labels=labels)
    extra = 0.1 * outputs.logits.pow(2).mean()
    optimizer.zero_grad()
    with model.no_sync():
        outputs.loss.backward(retain_graph=True)
    extra.backward()
    for weight in model.parameters():
        dist.all_reduce(weight.grad)
    optimizer.step()
    history.append([outputs.loss.item(), extra.item()])
history.append(norms(model))
dist.destroy_process_group()
