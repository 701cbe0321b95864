"""`deepytorch bench sharded`: what it refuses, what it makes of measured times, and one small run of it."""

from __future__ import annotations

import json
from typing import Any

import pytest

from deepytorch.bench import comm_launch
from deepytorch.bench.results import decoded
from deepytorch.bench.sharded import ShardedResult, run_sharded
from deepytorch.bench.sharded_worker import ShardedOptions
from deepytorch.errors import ConfigError


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"size": "huge"}, "expected one of tiny, quarter"),
        ({"arms": ("exact", "int4")}, 'arms has "int4", expected one of gloo, exact, int8, fp8'),
        ({"arms": ()}, "expected one or more of"),
        ({"arms": ("int8", "int8")}, "each once"),
        ({"hosts": 1}, "hosts is 1; expected 2 or more"),
        ({"steps": 2}, "steps is 2; expected 3 or more"),
        ({"batch_size": 0}, "expected 1 or more"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        ShardedOptions(**changes)


def test_figures_are_those_of_the_measured_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "exact": {"seconds": [9.0, 9.0, 2.0, 1.0, 3.0], "losses": [5.0, 4.0, 3.0, 2.0, 1.0]},
        "int8": {"seconds": [9.0, 9.0, 1.0, 1.0, 4.0], "losses": [5.0, 4.0, 3.0, 2.0, 1.3]},
    }

    def records(*_: Any) -> Any:
        yield {"doing": "something"}
        yield {"done": found}

    monkeypatch.setattr(comm_launch, "run_ranks", records)
    said: list[str] = []
    result = run_sharded(ShardedOptions(steps=5), said.append)
    assert said == ["something"]
    exact, rounded = result.arms
    assert exact.step_seconds == 2.0  # the first two are not timed
    assert rounded.speedup == 2.0
    assert rounded.last_loss == pytest.approx(15.3 / 5)
    assert rounded.loss_ratio == pytest.approx(15.3 / 15)
    assert decoded(ShardedResult, json.loads(json.dumps(result.to_json()))) == result


@pytest.mark.matrix
@pytest.mark.lab
@pytest.mark.slow
def test_a_small_run_trains_alike() -> None:
    options = ShardedOptions(size="tiny", arms=("gloo", "exact", "int8"), steps=4, rate="1gbit", timeout_s=120)
    gloo, exact, rounded = run_sharded(options).arms
    assert exact.losses == pytest.approx(gloo.losses, rel=1e-5)
    assert rounded.losses != exact.losses
    assert rounded.losses == pytest.approx(exact.losses, rel=0.02)
    assert min(arm.step_seconds for arm in (gloo, exact, rounded)) > 0
