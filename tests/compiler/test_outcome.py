"""Whoever calls a model is told what came of each graph that was compiled in the call, and of no other."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from deepytorch.compiler.code import lower_region
from deepytorch.compiler.outcome import Outcome, outcomes
from deepytorch.compiler.report import LEDGER
from tests.compiler.parity import batches, masked_lm_batch
from tests.compiler.plain_models import DIM, Plain, sdpa_bool

OPTIONS = {"lowering": "aot_eager"}


def compiled(module: nn.Module) -> Any:
    return torch.compile(module, backend="deepytorch", options=OPTIONS)


@pytest.fixture(autouse=True)
def nothing_compiled_yet() -> None:
    torch._dynamo.reset()


class Broken(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.one(x)
        torch._dynamo.graph_break()
        return self.other(x)


def test_a_graph_that_is_packed_and_graphs_that_are_not() -> None:
    (batch,) = batches(masked_lm_batch, (4, 11, "right"))
    with outcomes() as found:
        compiled(Plain(sdpa_bool, layers=1).train())(**batch)
    assert found == [Outcome.PACKED]
    with outcomes() as found:
        compiled(Broken())(torch.ones(2, DIM))
    assert found == [Outcome.DECLINED, Outcome.DECLINED]


def test_a_graph_that_cannot_be_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("on purpose")

    monkeypatch.setattr(lower_region, "lower", fail)
    with outcomes() as found:
        compiled(nn.Linear(DIM, DIM))(torch.ones(2, DIM))
    assert found == [Outcome.EAGER]


def test_what_was_compiled_before_is_not_told_again_and_the_report_has_no_part_in_it() -> None:
    model = compiled(Broken())
    model(torch.ones(2, DIM))
    LEDGER.forget()
    with outcomes() as found:
        model(torch.ones(2, DIM))
    assert found == []


def test_a_call_inside_of_a_call_is_told_to_both() -> None:
    with outcomes() as outer:
        compiled(nn.Linear(DIM, DIM))(torch.ones(2, DIM))
        with outcomes() as inner:
            compiled(Broken())(torch.ones(2, DIM))
    assert (len(outer), len(inner)) == (3, 2)
