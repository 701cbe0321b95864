"""A network for images in the default mode: forms take turns in training steps, and its numbers stay eager's."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deepytorch.compiler.report import LEDGER, RegionRecord


class Network(nn.Module):
    """Convolutions, norms whose statistics a step changes, a pooling and a view."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(3, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Conv2d(16, 16, 3, padding=1), nn.BatchNorm2d(16), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.head = nn.Linear(16 * 64, 10)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(self.head(self.body(images).view(len(images), -1)), labels)


def train(network: nn.Module, call: nn.Module, steps: int, pause: float = 0.0) -> list[float]:
    generator, losses = torch.Generator().manual_seed(1), []
    optimizer = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9)
    for _ in range(steps):
        images = torch.randn(8, 3, 32, 32, generator=generator)
        labels = torch.randint(0, 10, (8,), generator=generator)
        optimizer.zero_grad()
        loss = call(images, labels)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        time.sleep(pause)  # for the compile process; the losses do not depend on it
    return losses


def records() -> list[RegionRecord]:
    return [each for each in LEDGER.report().regions if each.outcome == "declined"]


@pytest.fixture
def network() -> Network:
    torch.manual_seed(0)
    torch._dynamo.reset()
    LEDGER.forget()
    return Network()


def compiled(network: nn.Module, **options: object) -> nn.Module:
    return torch.compile(network, backend="deepytorch", options={"wait": False, **options})  # type: ignore[return-value]


@pytest.mark.slow
def test_the_fastest_form_runs_and_has_the_numbers_of_eager(network: Network) -> None:
    theirs = copy.deepcopy(network)
    expected = train(theirs, theirs, 40)
    found = train(network, compiled(network), 40)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(expected), rtol=1e-3, atol=1e-4)
    for (name, one), (_, other) in zip(theirs.named_buffers(), network.named_buffers(), strict=True):
        torch.testing.assert_close(other, one, rtol=1e-3, atol=1e-4, msg=name)
    assert all(weight.is_contiguous() for weight in network.parameters())
    [record] = records()
    assert record.trials[0].startswith("channels last: ")
    assert record.trials[0].endswith(("used from now on", "not used"))
    assert not record.fallbacks
    deadline = time.monotonic() + 240.0
    while len(record.trials) < 2 and time.monotonic() < deadline:  # compiled code, too
        train(network, compiled(network), 10, pause=0.05)
        [record] = records()
    assert record.trials[1].startswith("compiled: ")


@pytest.mark.parametrize("reason", ["option", "deterministic"])
def test_no_time_decides_where_that_is_not_wanted(network: Network, reason: str) -> None:
    torch.use_deterministic_algorithms(reason == "deterministic")
    try:
        train(network, compiled(network, tune=reason != "option"), 3)
    finally:
        torch.use_deterministic_algorithms(False)
    assert [each.trials for each in records()] == [[]]
    assert [each.forms_compared for each in records()] == [0]


def test_activations_that_a_checkpoint_drops_are_not_kept(network: Network) -> None:
    pooling = network.body[3].forward
    network.body[3].forward = lambda images: checkpoint(pooling, images, use_reentrant=False)
    train(network, compiled(network), 3)
    [record] = records()
    assert record.trials == []
    assert record.forms_compared == 0
    assert any("computed again in the backward" in reason for reason in record.declined)
