"""Waiting until deepytorch has chosen what a model runs as."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest

from deepytorch.bench import settling
from deepytorch.compiler.report import RegionRecord


@dataclass
class Training:
    """A training whose steps take a second each, with one region.

    compiled_at: the number of steps until its code is there. tried_at: until that was tried, too.
    """

    compiled_at: int
    tried_at: int
    steps: int = 0
    region: RegionRecord = field(default_factory=lambda: RegionRecord("region 0/0", "declined", "inductor"))

    def step(self) -> None:
        self.steps += 1
        self.region.forms_untried = int(self.steps < self.tried_at)
        self.region.on_trial = "compiled" if self.compiled_at <= self.steps < self.tried_at else ""
        if self.steps == self.tried_at:
            self.region.trials.append("compiled: 1.30 times as fast as eager, used from now on")

    def is_compiling(self) -> bool:
        return self.steps < self.compiled_at

    def settle(self, patch: pytest.MonkeyPatch, limit_s: float) -> int:
        patch.setattr(settling, "LEDGER", SimpleNamespace(report=lambda: SimpleNamespace(regions=[self.region])))
        patch.setattr(settling, "background", SimpleNamespace(is_working=self.is_compiling))
        patch.setattr(settling, "REST_S", 0.0)
        patch.setattr(settling.time, "perf_counter", lambda: float(self.steps))
        settling.settle(self.step, limit_s)
        return self.steps


def test_it_ends_some_steps_after_the_choice(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Training(compiled_at=10, tried_at=20).settle(monkeypatch, 100.0)
    assert 20 < steps < 40


def test_code_that_comes_at_the_limit_is_tried_before_steps_are_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(compiled_at=101, tried_at=140)
    assert training.settle(monkeypatch, 100.0) >= 140
    assert settling.plan_of([training.region]) == "compiled"


def test_a_form_that_is_never_tried_ends_it_at_thrice_the_limit_and_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    training = Training(compiled_at=10, tried_at=10_000)
    training.region.trials.append("channels last: 0.95 times as fast as eager, not used")
    assert 300 <= training.settle(monkeypatch, 100.0) <= 302
    assert settling.plan_of([training.region]) == "eager, forms untried"


def test_code_that_is_not_there_at_thrice_the_limit_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(TimeoutError, match="give --settle more"):
        Training(compiled_at=10_000, tried_at=10_001).settle(monkeypatch, 100.0)
