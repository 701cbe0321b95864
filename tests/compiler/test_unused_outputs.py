"""Weights behind outputs that no loss used have no gradient, as in eager: with zeros an optimizer would move them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

Function = Callable[..., Any]


class Net(nn.Module):
    """A function of its weights `a`, `b`, `c`, a buffer `kept` and an input."""

    def __init__(self, function: Function) -> None:
        super().__init__()
        self.function = function
        for name in "abc":
            self.register_parameter(name, nn.Parameter(torch.randn(4, 4)))
        self.register_buffer("kept", torch.ones(4, 4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: torch.Tensor) -> Any:
        return self.function(self, x)


def counts(m: Any, x: torch.Tensor) -> Any:
    m.kept.add_(1.0)
    m.count += 1
    return x @ m.a, x @ m.b


def reads_what_it_counts(m: Any, x: torch.Tensor) -> Any:
    m.kept.mul_(0.9)
    return x @ m.a + m.kept, x @ m.b


def averages(m: Any, x: torch.Tensor) -> Any:
    hidden = x @ m.a
    with torch.no_grad():
        m.kept.mul_(0.9).add_(hidden, alpha=0.1)
    return hidden, x @ m.b * m.kept


def averages_detached(m: Any, x: torch.Tensor) -> Any:
    hidden = x @ m.a
    m.kept.lerp_(hidden.detach(), 0.1)
    return hidden, (x @ m.b) * m.kept


def writes_a_view_of_the_buffer(m: Any, x: torch.Tensor) -> Any:
    hidden = x @ m.a
    m.kept[1] = hidden[0].detach()
    return hidden, x @ m.b


def codebook(m: Any, x: torch.Tensor) -> Any:
    hidden = x @ m.a
    nearest = torch.cdist(hidden, m.kept).argmin(1)
    with torch.no_grad():
        m.kept.index_add_(0, nearest, hidden * 0.1)
    return hidden + (m.kept[nearest] - hidden).detach(), x @ m.b


def adds_in_place(m: Any, x: torch.Tensor) -> Any:
    one, two = x @ m.a, x @ m.b
    one += x
    two[:, 0] = 0
    two.relu_()
    return F.relu(one, inplace=True), two


def writes_a_weight_into_a_view(m: Any, x: torch.Tensor) -> Any:
    one, two = x @ m.a, x @ m.b
    row = one[0]
    row.copy_(m.c[1])
    return one, two


def writes_through_a_view_made_before(m: Any, x: torch.Tensor) -> Any:
    one = x @ m.a
    flat = one.view(-1)
    one.mul_((x @ m.b).sigmoid())
    return flat, x @ m.c


def writes_beneath_a_detached_name(m: Any, x: torch.Tensor) -> Any:
    one = x @ m.a
    one.detach().mul_(2.0)
    return one, x @ m.b


def writes_without_gradients_and_goes_on(m: Any, x: torch.Tensor) -> Any:
    one = x @ m.a
    with torch.no_grad():
        same = one.mul_(2.0)
    return same + 1, x @ m.b


def overwrites_all(m: Any, x: torch.Tensor) -> Any:
    one = torch.zeros(4, 4)
    one[:2] = (x @ m.a)[:2]
    one[2:] = (x @ m.b)[2:]
    return one, x @ m.c


def of_a_detached_tower(m: Any, x: torch.Tensor) -> Any:
    hidden = x @ m.a
    return hidden @ m.b, hidden.detach() @ m.c


def views_of_one(m: Any, x: torch.Tensor) -> Any:
    one = (x @ m.a).tanh()
    return one.t(), one[1:], x @ m.b


def keeps_what_has_gradients(m: Any, x: torch.Tensor) -> Any:
    m.kept.copy_(x @ m.a)
    return x @ m.b, x @ m.c


def reads_what_has_gradients(m: Any, x: torch.Tensor) -> Any:
    given = x * 2
    given.mul_((x @ m.a).sigmoid())
    return given @ m.b, x @ m.c


def writes_into_lists(m: Any, x: torch.Tensor) -> Any:
    one, two = x @ m.a, x @ m.b
    torch._foreach_add_([one], [x @ m.c])
    return one, two


def writes_a_constant(m: Any, x: torch.Tensor) -> Any:
    one = x @ m.a
    one.add_(torch.tensor([1.0, 2.0, 3.0, 4.0])).mul_(m.c)
    return x @ m.b, one


def batch_norms(m: Any, x: torch.Tensor) -> Any:
    one = F.batch_norm(x @ m.a, m.kept[0], m.kept[1], training=True)
    return one, x @ m.b


def checkpointed(m: Any, x: torch.Tensor) -> Any:
    def part(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        made = x @ weight
        made += 1
        return made.tanh()

    return (
        torch.utils.checkpoint.checkpoint(part, x, m.a, use_reentrant=False),
        torch.utils.checkpoint.checkpoint(part, x, m.b, use_reentrant=False),
    )


FUNCTIONS = [
    counts, reads_what_it_counts, averages, averages_detached, writes_a_view_of_the_buffer, codebook, adds_in_place,
    writes_a_weight_into_a_view, writes_through_a_view_made_before, writes_beneath_a_detached_name,
    writes_without_gradients_and_goes_on, overwrites_all, of_a_detached_tower, views_of_one, writes_into_lists,
    keeps_what_has_gradients, reads_what_has_gradients, writes_a_constant, batch_norms, checkpointed,
]  # fmt: skip


def gradients(call: Any, model: nn.Module, used: int) -> dict[str, Any]:
    torch.manual_seed(0)
    for _ in range(2):
        model.zero_grad()
        call(torch.randn(4, 4))[used].square().sum().backward()
    return {name: each.grad for name, each in model.named_parameters()}


def test_weights_behind_what_became_of_an_input_have_its_gradient() -> None:
    """The region writes into an input that is used afterwards, and no output is."""

    class Writes(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4, 4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.add_(self.a.sigmoid())
            return x.detach() @ self.b

    def slopes(call: Any, model: nn.Module) -> list[Any]:
        given = torch.ones(4, 4, requires_grad=True)
        model.zero_grad()
        written = given + 0
        output = call(written)
        written.sum().backward()
        first = [given.grad, model.a.grad, model.b.grad]
        output.sum().backward()
        return [*first, model.b.grad]

    model = Writes()
    other = copy.deepcopy(model)
    call = torch.compile(other, backend="deepytorch", options={"lowering": "aot_eager"}, fullgraph=True)
    expected = slopes(model, model)
    assert expected[2] is None
    torch.testing.assert_close(slopes(call, other), expected)


@pytest.mark.parametrize("function", FUNCTIONS, ids=lambda each: each.__name__)
def test_weights_of_unused_outputs_have_no_gradient(function: Function) -> None:
    torch.manual_seed(0)
    model = Net(function)
    outputs = len(copy.deepcopy(model)(torch.randn(4, 4)))
    other = copy.deepcopy(model)
    call = torch.compile(other, backend="deepytorch", options={"lowering": "aot_eager"}, fullgraph=True)
    for used in range(outputs):
        eager = copy.deepcopy(model)
        other.load_state_dict(model.state_dict())
        expected, found = gradients(eager, eager, used), gradients(call, other, used)
        torch.testing.assert_close(found, expected)
        torch.testing.assert_close(other.state_dict(), eager.state_dict())
