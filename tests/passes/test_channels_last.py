"""Convolutions with the channels of their images last: the same numbers, and every layout that leaves the graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from deepytorch.bench.zoo import VISION, build_workload
from deepytorch.passes.base import Context, GraphInput, Role
from deepytorch.passes.channels_last import CONVOLUTIONS, ChannelsLast

aten = torch.ops.aten


def traced(call: Callable[..., Any], *arguments: Any) -> fx.GraphModule:
    """The graph of a call, whose inputs have their roles."""
    found = make_fx(call, pre_dispatch=True, tracing_mode="fake")(*arguments)
    module = fx.GraphModule(found, found.graph)
    inputs = [node for node in module.graph.nodes if node.op == "placeholder"]
    for node, value in zip(inputs, tree_leaves(arguments), strict=True):
        node.meta["input"] = GraphInput(node.name, Role.PARAMETER if value.requires_grad else Role.BATCH)
    return module


def rewritten(call: Callable[..., Any], *arguments: Tensor) -> tuple[fx.GraphModule, Any]:
    """The graph of a call after the pass, and what the pass says."""
    module = traced(call, *arguments)
    rewrite = ChannelsLast().rewrite(module, Context())
    module.graph.lint()
    module.recompile()
    return module, rewrite


class Layouts(fx.Interpreter):
    """Runs a graph and notes the memory formats of images.

    large, small: of those that convolutions get, with as many numbers as the weight or fewer: whether the channels are
    last. copies: the copies of images that calls of `contiguous` have made.
    """

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.large, self.small = list[bool](), list[bool]()
        self.copies = 0

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in CONVOLUTIONS and args[1].shape[2:] != (1, 1):
            noted = self.large if args[0].numel() >= args[1].numel() else self.small
            noted.append(args[0].is_contiguous(memory_format=torch.channels_last))
        found = super().call_function(target, args, kwargs)
        if target is aten.contiguous.default and found.data_ptr() != args[0].data_ptr():
            self.copies += 1
        return found


@pytest.mark.parametrize("name", [name for name in VISION if name != "timm_vision_transformer"])
def test_networks_have_the_numbers_of_eager(name: str) -> None:
    workload = build_workload(name)
    model = workload.model.double()
    [batch] = workload.batches(2, 0, 1)
    each = 1 if name == "alexnet" else 2  # pixel is taken: half of AlexNet's images are smaller than its weights
    batch = {
        key: value[..., ::each, ::each].contiguous().to(torch.float64) if value.dim() == 4 else value
        for key, value in batch.items()
    }
    if name == "pytorch_unet":
        batch["labels"] = batch["labels"][:, ::each, ::each].contiguous()
    weights = dict(model.named_parameters())
    statistics = {key: value.clone() for key, value in model.named_buffers()}

    def run(given: dict[str, Tensor], kept: dict[str, Tensor], values: dict[str, Tensor]) -> Tensor:
        return torch.func.functional_call(model, {**given, **kept}, (), values)

    module = traced(run, weights, statistics, batch)
    assert ChannelsLast().rewrite(module, Context()).fired
    module.recompile()
    theirs, ours = ({key: value.clone() for key, value in statistics.items()} for _ in range(2))
    expected = run(weights, theirs, batch)
    layouts = Layouts(module)
    found = layouts.run(*tree_leaves((weights, ours, batch)))
    assert len(layouts.large) >= 2
    assert all(layouts.large)
    assert not any(layouts.small)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    for one, other in zip(
        *(torch.autograd.grad(loss, list(weights.values())) for loss in (expected, found)), strict=True
    ):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)
        assert other.shape == one.shape
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-10, atol=1e-14)


class Block(nn.Module):
    """The blocks of a diffusion UNet: attention over the positions of an image between two convolutions."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.norm, self.keys = nn.GroupNorm(4, 8), nn.Linear(8, 8)

    def forward(self, image: Tensor) -> Tensor:
        found = self.first(image)
        rows, channels, height, width = found.shape
        tokens = self.norm(found).permute(0, 2, 3, 1).reshape(rows, height * width, channels)
        query, key = (each.view(rows, -1, 2, 4).transpose(1, 2) for each in (tokens, self.keys(tokens)))
        seen = F.scaled_dot_product_attention(query, key, key).transpose(1, 2).reshape(rows, height, width, channels)
        return self.second(found + seen.permute(0, 3, 1, 2).contiguous()).square().mean()


def test_attention_between_convolutions_copies_no_image() -> None:
    block, image = Block().double(), torch.randn(2, 4, 16, 16, dtype=torch.float64)
    weights = dict(block.named_parameters())
    module = traced(lambda given, value: torch.func.functional_call(block, given, (value,)), weights, image)
    assert ChannelsLast().rewrite(module, Context()).fired
    module.recompile()
    layouts = Layouts(module)
    expected, found = block(image), layouts.run(*tree_leaves((weights, image)))
    assert layouts.large == [True, True]
    assert layouts.copies == 1  # the batch's image
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    for one, other in zip(
        *(torch.autograd.grad(loss, list(weights.values())) for loss in (expected, found)), strict=True
    ):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)


def test_images_smaller_than_their_weights_stay_as_they_are() -> None:
    image, weight = torch.randn(1, 16, 3, 3), nn.Parameter(torch.randn(16, 16, 3, 3))
    module, rewrite = rewritten(lambda one, other: F.conv2d(F.conv2d(one, other, padding=1), other), image, weight)
    assert not rewrite.fired
    [decline] = rewrite.declined
    assert "smaller than the weights" in decline.reason
    assert not any(node.target is aten.contiguous.default for node in module.graph.nodes)


# In float64: sums of float32 in another order differ by what assert_close takes for wrong.
IMAGE = torch.randn(2, 3, 8, 8, dtype=torch.float64)
WEIGHT = nn.Parameter(torch.randn(3, 3, 3, 3, dtype=torch.float64))


def test_an_image_that_leaves_the_graph_has_the_layout_of_eager() -> None:
    def call(image: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        found = F.conv2d(F.conv2d(image, weight), weight)
        return found, found.sum()

    module, rewrite = rewritten(call, IMAGE, WEIGHT)
    assert rewrite.fired
    image, _ = module(IMAGE, WEIGHT)
    assert image.is_contiguous()
    torch.testing.assert_close(image, call(IMAGE, WEIGHT)[0])


def test_a_view_of_an_image_is_what_it_is_in_eager() -> None:
    def call(image: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(F.conv2d(image, weight), weight).view(2, -1).cumsum(1)

    module, rewrite = rewritten(call, IMAGE, WEIGHT)
    assert rewrite.fired
    torch.testing.assert_close(module(IMAGE, WEIGHT), call(IMAGE, WEIGHT))


def test_dropout_draws_what_it_draws_in_eager() -> None:
    def call(image: Tensor, weight: Tensor) -> Tensor:
        return F.conv2d(F.dropout(F.conv2d(image, weight), 0.5), weight).sum((1, 2, 3))

    module, rewrite = rewritten(call, IMAGE, WEIGHT)
    assert rewrite.fired
    torch.manual_seed(3)
    expected = call(IMAGE, WEIGHT)
    torch.manual_seed(3)
    torch.testing.assert_close(module(IMAGE, WEIGHT), expected)


def test_a_write_into_what_is_no_copy_in_eager_is_seen() -> None:
    def call(image: Tensor, weight: Tensor) -> Tensor:
        found = F.conv2d(image, weight)
        found.contiguous().mul_(2.0)
        return F.conv2d(found, weight).sum()

    module, rewrite = rewritten(call, IMAGE, WEIGHT)
    assert rewrite.fired
    torch.testing.assert_close(module(IMAGE, WEIGHT), call(IMAGE, WEIGHT))


def strided(image: Tensor, weight: Tensor) -> Tensor:
    found = F.conv2d(F.conv2d(image, weight), weight)
    return found.as_strided((2, 4), (48, 1)).sum()


_LIBRARY = torch.library.Library("of_a_script_with_images", "FRAGMENT")
_LIBRARY.define("in_memory_order(Tensor image) -> Tensor")
_LIBRARY.impl("in_memory_order", lambda image: image.as_strided((image.numel(),), (1,)).cumsum(0), "CPU")
_LIBRARY.impl("in_memory_order", lambda image: image.new_empty(image.numel()), "Meta")


def of_the_script(image: Tensor, weight: Tensor) -> Tensor:
    """Reads memory in its order, as kernels do that take images for contiguous."""
    with torch.no_grad():
        found = torch.ops.of_a_script_with_images.in_memory_order(F.conv2d(image, weight))
    return F.conv2d(F.conv2d(image, weight), weight).sum() * found.mean()


def written_view(image: Tensor, weight: Tensor) -> Tensor:
    found = F.conv2d(image, weight)
    flat = found.view(2, -1)
    flat.mul_(2.0)
    return F.conv2d(found, weight).sum()


def transposed_output(image: Tensor, weight: Tensor) -> Tensor:
    return F.conv2d(F.conv2d(image, weight), weight).flatten(2).transpose(1, 2)


def output_and_view(image: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    found = F.conv2d(F.conv2d(image, weight), weight)
    return found, found.flatten(2)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (output_and_view, "it shares its memory with another output"),
        (strided, "depends on the layout in memory"),
        (of_the_script, "is an operator of the script's"),
        (written_view, "is of memory that is written to"),
        (transposed_output, "an output has a layout of its own"),
    ],
)
def test_graphs_to_which_memory_matters_stay_as_they_are(call: Callable[..., Any], words: str) -> None:
    module, rewrite = rewritten(call, IMAGE, WEIGHT)
    assert not rewrite.fired
    [decline] = rewrite.declined
    assert words in decline.reason
    assert not any(node.kwargs.get("memory_format") is torch.channels_last for node in module.graph.nodes)
    torch.testing.assert_close(module(IMAGE, WEIGHT), call(IMAGE, WEIGHT))


def test_one_convolution_is_not_enough() -> None:
    assert not ChannelsLast().concerns(traced(F.conv2d, IMAGE, WEIGHT))
