"""A plan is a value: equal decisions, equal digest, in any process."""

from __future__ import annotations

import json
from dataclasses import FrozenInstanceError, replace

import pytest

from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.manager import passes_for
from deepytorch.compiler.plan import Plan
from deepytorch.passes.fuse_linear_loss import FuseLinearLoss
from deepytorch.passes.unpad.strip_padding import StripPadding
from tests.cold import run_cold


def make(**options) -> Plan:
    return Plan.initial("forward", CompilerConfig.parse(options=options))


def test_plan_is_frozen_and_hashable():
    plan = make()
    with pytest.raises(FrozenInstanceError):
        plan.region = "other"
    assert {plan: 1}[make()] == 1


def test_json_holds_every_decision():
    plan = make(min_padding=0.1)
    assert json.loads(json.dumps(plan.to_json())) == {
        "region": "forward",
        "config": plan.config.to_json(),
        "passes": ["StripPadding", "FuseLinearLoss"],
    }


def test_digest_tells_plans_apart():
    plan = make()
    plans = [
        plan,
        replace(plan, region="other"),
        replace(plan, passes=()),
        make(loss_rows=False),
        make(epilogue_fusion=False),
    ]
    assert len({each.digest() for each in plans}) == len(plans)


def test_digest_does_not_depend_on_where_graphs_are_dumped():
    assert make(dump_graphs="/tmp/a").digest() == make().digest()


@pytest.mark.slow
def test_digest_is_the_same_in_another_process():
    code = (
        "from deepytorch.compiler.plan import Plan; from deepytorch.compiler.config import CompilerConfig;"
        "print(Plan.initial('forward', CompilerConfig.parse(options={'max_autotune': True})).digest())"
    )
    assert run_cold(code).stdout.strip() == make(max_autotune=True).digest()


def test_the_manager_makes_the_passes_of_the_plan():
    assert passes_for(make()) == [StripPadding(), FuseLinearLoss(least_bytes=None)]
    assert passes_for(make(fuse_loss=False)) == [StripPadding()]
    assert passes_for(make(loss_rows=False, defer_outputs=False, fuse_loss=True)) == [
        StripPadding(loss_rows=False, defer_outputs=False),
        FuseLinearLoss(),
    ]
    assert passes_for(make(unpad=False, fuse_loss=False)) == []


def test_the_manager_refuses_a_plan_that_it_cannot_carry_out():
    with pytest.raises(AssertionError, match="Nonsense"):
        passes_for(replace(make(), passes=("Nonsense",)))
