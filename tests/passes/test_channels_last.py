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
    """Runs a graph and notes the memory formats of the images that convolutions get."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.last: list[bool] = []

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        if target in CONVOLUTIONS:
            self.last.append(args[0].is_contiguous(memory_format=torch.channels_last))
        return super().call_function(target, args, kwargs)


@pytest.mark.parametrize("name", [name for name in VISION if name != "timm_vision_transformer"])
def test_networks_have_the_numbers_of_eager(name: str) -> None:
    workload = build_workload(name)
    model = workload.model.double()
    [batch] = workload.batches(2, 0, 1)
    batch = {
        key: value[..., ::2, ::2].contiguous().to(torch.float64) if value.dim() == 4 else value
        for key, value in batch.items()
    }
    if name == "pytorch_unet":
        batch["labels"] = batch["labels"][:, ::2, ::2].contiguous()
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
    assert len(layouts.last) >= 5
    assert all(layouts.last)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=0.0)
    for one, other in zip(
        *(torch.autograd.grad(loss, list(weights.values())) for loss in (expected, found)), strict=True
    ):
        torch.testing.assert_close(other, one, rtol=1e-9, atol=1e-12)
        assert other.shape == one.shape
    for key, value in theirs.items():
        torch.testing.assert_close(ours[key], value, rtol=1e-10, atol=1e-14)


IMAGE, WEIGHT = torch.randn(2, 3, 8, 8), nn.Parameter(torch.randn(3, 3, 3, 3))


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


@pytest.mark.parametrize(
    ("call", "words"),
    [
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
