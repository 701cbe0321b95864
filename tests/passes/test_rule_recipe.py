"""A rule for an operator that nobody knows, by CONTRIBUTING's recipe."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from deepytorch.compiler.report import Report
from deepytorch.passes.unpad.layout import is_token
from deepytorch.passes.unpad.program import IndexSet
from deepytorch.passes.unpad.rules import RULES, Layouts, Rule
from tests.compiler.parity import Pair, batches, expect_packed, masked_lm_batch
from tests.compiler.plain_models import DIM, SIZES, VOCAB, Plain, sdpa_bool

LIBRARY = torch.library.Library("deepytorch_toys", "DEF")
LIBRARY.define("rotate_halves(Tensor x, int dim=-1) -> Tensor")


@torch.library.impl(LIBRARY, "rotate_halves", "CompositeExplicitAutograd")
def _rotate_halves(x: torch.Tensor, dim: int = -1) -> torch.Tensor:
    first, second = x.chunk(2, dim)
    return torch.cat([-second, first], dim)


def _keep_dim(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.dim = inputs[1]


def _rotate_back(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
    return -torch.ops.deepytorch_toys.rotate_halves.default(grad, ctx.dim), None


torch.library.register_autograd("deepytorch_toys::rotate_halves", _rotate_back, setup_context=_keep_dim, lib=LIBRARY)
rotate_halves = torch.ops.deepytorch_toys.rotate_halves.default


@dataclass(frozen=True)
class RotateHalves(Rule):
    """The halves of each token's features change places."""

    def admits(self, node: fx.Node, layouts: Layouts, from_batch: Mapping[fx.Node, bool]) -> bool:
        x, dim = layouts.get(node.args[0]), node.args[1] if len(node.args) > 1 else -1
        return x is not None and is_token(x) and dim == -1 and all(isinstance(atom, int) for atom in x[-1])

    def emit(self, node: fx.Node, emitter: Any, entries: IndexSet) -> fx.Node:
        return emitter.call(node.target, (emitter.packed(node.args[0], entries),), {})


def _loss(dim: int) -> Any:
    def loss(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(model.head(rotate_halves(x, dim)).view(-1, VOCAB), labels.view(-1))

    return loss


def _refused(report: Report) -> bool:
    """Whether the report names the operator: what feeds it stays padded, and what stands behind it may be packed."""
    return bool(report.regions) and all(
        any("rotate_halves" in reason for reason in region.declined) for region in report.regions
    )


def test_an_operator_is_packed_once_it_has_a_rule(monkeypatch):
    given = batches(masked_lm_batch, *SIZES)
    assert _refused(Pair(Plain(sdpa_bool, _loss(-1)).train()).train(given))
    torch._dynamo.reset()
    monkeypatch.setitem(RULES, rotate_halves, RotateHalves())
    report = Pair(Plain(sdpa_bool, _loss(-1)).train()).train(given)
    expect_packed(report)
    assert not any(region.declined for region in report.regions)


@pytest.mark.slow
def test_a_rule_is_asked_and_may_refuse(monkeypatch):
    """The same operator along the positions, where a token would see another one."""
    monkeypatch.setitem(RULES, rotate_halves, RotateHalves())
    report = Pair(Plain(sdpa_bool, _loss(1)).train()).train(
        batches(masked_lm_batch, (4, 12, "right"), (3, 8, "left"), (5, 10, "holes"))
    )
    assert _refused(report)


@pytest.mark.parametrize("changed", [0, 3, 5])
def test_a_token_of_the_output_follows_from_its_own_token(changed):
    """What the rule claims: changing one token changes that one, and no other."""
    x = torch.randn(2, 6, DIM)
    before = rotate_halves(x, -1)
    x[1, changed] += 1
    differs = (rotate_halves(x, -1) != before).any(-1)
    assert differs.nonzero().tolist() == [[1, changed]]
