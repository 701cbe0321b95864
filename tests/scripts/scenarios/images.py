"""A network for images, changed midway while the forms that it may run in take turns."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from tiny import TIMES, case, chosen, norms
from torch import nn
from torch.nn.parallel import DistributedDataParallel


class Network(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 12, 3, padding=1), nn.BatchNorm2d(12), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(12, 12, 3, padding=1), nn.GroupNorm(3, 12), nn.SiLU(), nn.AvgPool2d(2),
        )  # fmt: skip
        self.dropout, self.head = nn.Dropout(dropout), nn.Linear(12 * 16, 10)

    def forward(self, images, labels):
        found = self.body(images)
        return F.cross_entropy(self.head(self.dropout(found.view(len(images), -1))), labels)


def batch(number, rows=8):
    generator = torch.Generator().manual_seed(number)
    return torch.randn(rows, 3, 16, 16, generator=generator), torch.randint(0, 10, (rows,), generator=generator)


def train(model, network, seed=0, steps=8, freezes=True):
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    history, seen = [], []
    for number in range(steps * TIMES):
        if number == 3 * TIMES:
            hook = network.body[4].register_forward_hook(
                lambda module, inputs, output: seen.append(output.mean().item())
            )
        if number == 4 * TIMES:
            hook.remove()
            network.body[0].weight.requires_grad_(not freezes)
        if number == 5 * TIMES:
            network.body[0].weight.requires_grad_(True)
        if number % TIMES == 0:
            network.eval()
            with torch.no_grad():
                seen.append(network(*batch(999)).item())
            network.train()
        optimizer.zero_grad()
        loss = model(*batch(100 * number + seed, rows=5 if number % TIMES == TIMES - 1 else 8))
        loss.backward()
        optimizer.step()
        history.append([loss.item()])
    statistics = [buffer.double().norm().item() for buffer in network.buffers()]
    return [*history, seen, norms(network), statistics]


@case
def images():
    network = Network()
    return train(network, network)


@case
def images_with_dropout():
    network = Network(dropout=0.3)
    return train(network, network, steps=3)


@case(ranks=2)
def ddp_images():
    dist.init_process_group("gloo")
    network = Network()
    # DistributedDataParallel does not take weights that are frozen later.
    history = train(DistributedDataParallel(network), network, seed=dist.get_rank(), freezes=False)
    dist.destroy_process_group()
    return history


torch.manual_seed(0)
history = chosen()()
