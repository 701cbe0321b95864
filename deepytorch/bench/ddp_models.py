"""Models of the data-parallel benchmark, with random weights, and batches for them: nothing is downloaded."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepytorch.bench.models import MAX_POSITIONS, build_model
from deepytorch.data import text_batches

NUM_CLASSES = 1000
PIXELS = 224
SIZES = ("cpu", "full")
MODELS = ("resnet50", "vgg16", "alexnet", "hf_Bert", "llama")

# VGG's configuration D (Simonyan and Zisserman 2014): channels of the convolutions, 0 for a pooling by two.
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


@dataclass(frozen=True, slots=True)
class Workload:
    """A model whose forward returns its loss, and a maker of batches for it.

    batches: called with (examples of a batch, seed, number of batches); each batch holds the forward's arguments by
    name.
    """

    model: nn.Module
    batches: Callable[[int, int, int], list[dict[str, Tensor]]]


def build_workload(name: str, size: str = "cpu", seed: int = 0, data: Path | None = None) -> Workload:
    """Return the model `name`, one of `MODELS`. `size`: "full" as published, "cpu" with a quarter of the width.

    data: a file in Alpaca layout that llama learns from; None: the documentation of installed libraries.
    """
    scale = 1 if size == "full" else 4
    if name == "hf_Bert":
        vocab = 30_522 // scale
        text = build_model("bert", "base" if size == "full" else "quarter", vocab_size=vocab, seed=seed)
        return Workload(_Loss(text), lambda rows, seed, count: _tokens(rows, 128, vocab, seed, count))
    if name == "llama":
        text = build_model("llama", "base" if size == "full" else "small", vocab_size=8_192, seed=seed)

        def texts(rows: int, seed: int, count: int) -> list[dict[str, Tensor]]:  # of uneven lengths, prompts not learnt
            return text_batches(data, batch_size=rows, max_length=MAX_POSITIONS, seed=seed, steps=count)

        return Workload(_Loss(text), texts)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        builders: dict[str, Callable[[int], nn.Module]] = {"resnet50": _resnet50, "vgg16": _vgg16, "alexnet": _alexnet}
        model = _Classifier(builders[name](scale))
    return Workload(model.train(), lambda rows, seed, count: _images(rows, seed, count))


class _Loss(nn.Module):
    """A language model that returns only its loss."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, **batch: Tensor) -> Any:
        return self.model(**batch).loss


class _Classifier(nn.Module):
    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(images), labels)


def _tokens(rows: int, positions: int, vocab: int, seed: int, count: int) -> list[dict[str, Tensor]]:
    """Return text without padding, as PyTorch's benchmarks give it to BERT."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(5, vocab, (rows, positions), generator=generator) for _ in range(count)]
    return [{"input_ids": each, "attention_mask": torch.ones_like(each), "labels": each.clone()} for each in ids]


def _images(rows: int, seed: int, count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "images": torch.randn(rows, 3, PIXELS, PIXELS, generator=generator),
            "labels": torch.randint(0, NUM_CLASSES, (rows,), generator=generator),
        }
        for _ in range(count)
    ]


def _vgg16(scale: int) -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width in _VGG16:
        if width == 0:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width // scale, 3, padding=1), nn.ReLU()]
        channels = width // scale
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *_head(channels * 49, 4096 // scale))


def _alexnet(scale: int) -> nn.Module:
    """Return the network of Krizhevsky 2014, "One weird trick", in the form of one tower."""
    c1, c2, c3, c4 = (width // scale for width in (64, 192, 384, 256))
    return nn.Sequential(
        nn.Conv2d(3, c1, 11, stride=4, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1),
        nn.Conv2d(c1, c2, 5, padding=2), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1),
        nn.Conv2d(c2, c3, 3, padding=1), nn.ReLU(),
        nn.Conv2d(c3, c4, 3, padding=1), nn.ReLU(),
        nn.Conv2d(c4, c4, 3, padding=1), nn.ReLU(),
        nn.AdaptiveAvgPool2d(6), nn.Flatten(), *_head(c4 * 36, 4096 // scale),
    )  # fmt: skip


def _head(inputs: int, hidden: int) -> list[nn.Module]:
    return [nn.Linear(inputs, hidden), nn.ReLU(), nn.Linear(hidden, hidden), nn.ReLU(), nn.Linear(hidden, NUM_CLASSES)]


def _resnet50(scale: int) -> nn.Module:
    """Return the network of He et al. 2015, with the stride in the 3x3 convolution."""
    width = 64 // scale
    layers: list[nn.Module] = [
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]  # fmt: skip
    channels = width
    for stage, depth in enumerate((3, 4, 6, 3)):
        inner = width << stage
        for block in range(depth):
            layers.append(_Bottleneck(channels, inner, 2 if stage > 0 and block == 0 else 1))
            channels = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, NUM_CLASSES))


class _Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, 4 * inner, 1, bias=False), nn.BatchNorm2d(4 * inner),
        )  # fmt: skip
        same = stride == 1 and channels == 4 * inner
        self.shortcut: nn.Module = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(channels, 4 * inner, 1, stride=stride, bias=False), nn.BatchNorm2d(4 * inner)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))
