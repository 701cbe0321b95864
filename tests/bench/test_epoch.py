"""`deepytorch bench epoch`: the same rows in both orders, fewer pads where they are grouped, every arm measured."""

from __future__ import annotations

import pytest

from deepytorch.bench import epoch
from deepytorch.data import num_positions, num_tokens
from deepytorch.errors import ConfigError


@pytest.mark.slow
def test_grouped_batches_hold_the_same_rows_with_fewer_pads():
    options = epoch.EpochOptions(size="tiny", rows=640, batch_size=4, steps=150)
    found = {order: epoch.epoch_batches(options, order) for order in ("random", "length")}
    assert all(len(batches) == 150 for batches in found.values())
    real = {
        order: sum(num_tokens(each, "causal") for each in batches)
        / sum(num_positions(each, "causal") for each in batches)
        for order, batches in found.items()
    }
    assert real["length"] > 1.2 * real["random"]
    tokens = {order: sum(num_tokens(each, "causal") for each in batches) for order, batches in found.items()}
    assert tokens["length"] == pytest.approx(tokens["random"], rel=0.15)


def test_too_few_rows_are_refused():
    with pytest.raises(ConfigError, match="rows is 10, expected at least 256: 32 batches of 8"):
        epoch.EpochOptions(rows=10)


@pytest.mark.slow
def test_every_arm_is_measured_against_the_first(monkeypatch):
    arms = tuple(("eager" if backend == "inductor" else "aot_eager", order) for backend, order in epoch.ARMS)
    monkeypatch.setattr(epoch, "ARMS", arms)
    result = epoch.run_epoch(epoch.EpochOptions(size="tiny", rows=200, batch_size=4, steps=8, rounds=1, vocab_size=512))
    assert [(arm.backend, arm.order) for arm in result.arms] == list(arms)
    assert result.arms[0].ratio == 1.0
    assert all(arm.tokens_per_s > 0 for arm in result.arms)
    by_order = {arm.order: arm.real_token_fraction for arm in result.arms}
    assert by_order["random"] < by_order["length"] <= 1.0
