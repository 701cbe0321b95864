"""Trains a network for images, a quarter as wide as VGG-11, on random images: plain PyTorch, nothing of deepytorch.

`deepytorch run python examples/train_images.py` trains it with deepytorch, as the line `import deepytorch` would, and
`deepytorch bench start --steps 200 examples/train_images.py` shows how such a run starts.
"""

from __future__ import annotations

import argparse
import itertools

import torch
import torch.nn.functional as F
from torch import nn

CHANNELS = (16, "pool", 32, "pool", 64, 64, "pool", 128, 128, "pool", 128, 128, "pool")


def network() -> nn.Module:
    """Return the network; images are 3 x 224 x 224."""
    layers: list[nn.Module] = []
    before = 3
    for each in CHANNELS:
        if isinstance(each, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(before, each, 3, padding=1), nn.BatchNorm2d(each), nn.ReLU(inplace=True)]
            before = each
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), nn.Linear(before * 49, 512), nn.ReLU(),
                         nn.Linear(512, 100))  # fmt: skip


def main() -> None:
    """Train, and print the loss of every tenth step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=None, help="default: until the process is ended")
    parser.add_argument("--batch-size", type=int, default=8)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = network()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, weight_decay=1e-4)
    for step in itertools.islice(itertools.count(), options.steps):
        images, labels = torch.randn(options.batch_size, 3, 224, 224), torch.randint(0, 100, (options.batch_size,))
        loss = F.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step}: loss {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    main()
