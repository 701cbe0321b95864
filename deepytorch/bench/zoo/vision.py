"""Networks for images: classifiers, and a UNet for segmentation."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepytorch.bench.zoo.workload import Workload

NUM_CLASSES = 1000
PIXELS = 224

# VGG's configuration D (Simonyan and Zisserman 2014): channels of the convolutions, 0 for a pooling by two.
_VGG16 = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)
# Of ACSpeed's table, by GPU; and what two cores compute in about half a second.
_ROWS = {
    "alexnet": (128, 16), "resnet18": (16, 8), "resnet50": (32, 4), "vgg16": (64, 4), "timm_vovnet": (32, 4),
    "timm_vision_transformer": (8, 8), "pytorch_unet": (1, 1),
}  # fmt: skip


def workload(name: str, size: str) -> Workload:
    """Return one of these networks under its loss. size: as for `build_workload`."""
    scale, rows = (1, _ROWS[name][0]) if size == "full" else (4, _ROWS[name][1])
    if name == "pytorch_unet":
        pixels = 512 if size == "full" else 256
        return Workload(_Classifier(_UNet(64 // scale)), partial(_images, pixels, 2, (pixels, pixels)), rows)
    builders: dict[str, Callable[[int], nn.Module]] = {
        "alexnet": _alexnet,
        "resnet18": partial(_resnet, _Basic, (2, 2, 2, 2)),
        "resnet50": partial(_resnet, _Bottleneck, (3, 4, 6, 3)),
        "vgg16": _vgg16,
        "timm_vovnet": _vovnet39,
        "timm_vision_transformer": _vit_small,
    }
    return Workload(_Classifier(builders[name](scale)), partial(_images, PIXELS, NUM_CLASSES, ()), rows)


class _Classifier(nn.Module):
    """A network under its loss, for each image or for each pixel."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.network(images), labels)


def _images(
    pixels: int, classes: int, labelled: tuple[int, ...], rows: int, seed: int, count: int
) -> list[dict[str, Tensor]]:
    """Return batches of images, with a label for each (`labelled` is empty) or for each of so many pixels."""
    generator = torch.Generator().manual_seed(seed)
    return [
        {
            "images": torch.randn(rows, 3, pixels, pixels, generator=generator),
            "labels": torch.randint(0, classes, (rows, *labelled), generator=generator),
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


# ---------------------------------------------------------------------- residual networks


def _resnet(block: type[_Basic | _Bottleneck], depths: Sequence[int], scale: int) -> nn.Module:
    """Return the network of He et al. 2015 with so many blocks a stage; a bottleneck's stride is in its 3x3 one."""
    channels = 64 // scale
    layers: list[nn.Module] = _stem(channels)
    for stage, depth in enumerate(depths):
        inner = 64 // scale << stage
        for number in range(depth):
            layers.append(block(channels, inner, 2 if stage > 0 and number == 0 else 1))
            channels = block.widens * inner
    return nn.Sequential(*layers, *_classes(channels))


def _classes(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, NUM_CLASSES)]


def _stem(width: int) -> list[nn.Module]:
    return [
        nn.Conv2d(3, width, 7, stride=2, padding=3, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
        nn.MaxPool2d(3, 2, padding=1),
    ]  # fmt: skip


class _Residual(nn.Module):
    """A body and a shortcut around it, which is a projection where their shapes differ."""

    def __init__(self, body: nn.Module, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.body = body
        same = stride == 1 and channels == width
        self.shortcut: nn.Module = nn.Identity() if same else nn.Sequential(
            nn.Conv2d(channels, width, 1, stride=stride, bias=False), nn.BatchNorm2d(width)
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.body(x) + self.shortcut(x))


class _Basic(_Residual):
    widens = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, width, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU(),
            nn.Conv2d(width, width, 3, padding=1, bias=False), nn.BatchNorm2d(width),
        )  # fmt: skip
        super().__init__(body, channels, width, stride)


class _Bottleneck(_Residual):
    widens = 4

    def __init__(self, channels: int, inner: int, stride: int) -> None:
        body = nn.Sequential(
            nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, inner, 3, stride=stride, padding=1, bias=False), nn.BatchNorm2d(inner), nn.ReLU(),
            nn.Conv2d(inner, 4 * inner, 1, bias=False), nn.BatchNorm2d(4 * inner),
        )  # fmt: skip
        super().__init__(body, channels, 4 * inner, stride)


# ---------------------------------------------------------------------- VoVNet


def _vovnet39(scale: int) -> nn.Module:
    """Return VoVNet-39 (Lee et al. 2019): stages of blocks that join all layers' outputs at their end."""
    c1, c2 = 64 // scale, 128 // scale
    layers: list[nn.Module] = [_conv(3, c1, stride=2), _conv(c1, c1), _conv(c1, c2, stride=2)]
    channels = c2
    for inner, width, depth in ((128, 256, 1), (160, 512, 1), (192, 768, 2), (224, 1024, 2)):
        if channels != c2:
            layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
        for _ in range(depth):
            layers.append(_OneShot(channels, inner // scale, width // scale))
            channels = width // scale
    return nn.Sequential(*layers, *_classes(channels))


class _OneShot(nn.Module):
    """Five convolutions in a row; their outputs and the input are joined by a sixth."""

    def __init__(self, channels: int, inner: int, width: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(_conv(channels if number == 0 else inner, inner) for number in range(5))
        self.join = _conv(channels + 5 * inner, width, kernel=1)

    def forward(self, x: Tensor) -> Tensor:
        found = [x]
        for layer in self.layers:
            found.append(layer(found[-1]))
        return self.join(torch.cat(found, dim=1))


def _conv(inputs: int, outputs: int, kernel: int = 3, stride: int = 1) -> nn.Module:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU(inplace=True))


# ---------------------------------------------------------------------- vision transformer


def _vit_small(scale: int) -> nn.Module:
    """Return ViT-S/16 (Dosovitskiy et al. 2020; the small width is that of Touvron et al. 2020)."""
    return _VisionTransformer(hidden=384 // (2 if scale > 1 else 1), heads=6, depth=12 // (2 if scale > 1 else 1))


class _VisionTransformer(nn.Module):
    def __init__(self, hidden: int, heads: int, depth: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, hidden, 16, stride=16)
        self.first = nn.Parameter(torch.zeros(1, 1, hidden))
        self.positions = nn.Parameter(0.02 * torch.randn(1, (PIXELS // 16) ** 2 + 1, hidden))
        self.blocks = nn.Sequential(*(_VisionBlock(hidden, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(hidden, eps=1e-6), nn.Linear(hidden, NUM_CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patches(images).flatten(2).transpose(1, 2)  # (rows, patches, hidden)
        x = torch.cat([self.first.expand(x.shape[0], -1, -1), x], dim=1) + self.positions
        return self.head(self.norm(self.blocks(x))[:, 0])


class _VisionBlock(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(hidden, eps=1e-6), nn.LayerNorm(hidden, eps=1e-6)
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


# ---------------------------------------------------------------------- segmentation


class _UNet(nn.Module):
    """The UNet of Ronneberger et al. 2015 with padding and batch norms, as most train it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        widths = [width << level for level in range(5)]
        self.first = _double(3, width)
        self.down = nn.ModuleList(_double(above, below) for above, below in itertools.pairwise(widths))
        levels = list(itertools.pairwise(widths))[::-1]
        self.up = nn.ModuleList(nn.ConvTranspose2d(below, above, 2, stride=2) for above, below in levels)
        self.joined = nn.ModuleList(_double(below, above) for above, below in levels)
        self.last = nn.Conv2d(width, 2, 1)

    def forward(self, x: Tensor) -> Tensor:
        kept = [self.first(x)]
        for down in self.down:
            kept.append(down(F.max_pool2d(kept[-1], 2)))
        x = kept.pop()
        for up, joined in zip(self.up, self.joined, strict=True):
            x = joined(torch.cat([kept.pop(), up(x)], dim=1))
        return self.last(x)


def _double(inputs: int, outputs: int) -> nn.Module:
    return nn.Sequential(_conv(inputs, outputs), _conv(outputs, outputs))
