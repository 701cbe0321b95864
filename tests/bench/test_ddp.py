"""`deepytorch bench ddp`: what it refuses, what it makes of measured times, and one small run of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from deepytorch.bench import comm_launch
from deepytorch.bench.ddp import DdpResult, line_of, run_ddp
from deepytorch.bench.ddp_worker import Arm, DdpOptions
from deepytorch.bench.results import decoded
from deepytorch.bench.zoo import build_workload
from deepytorch.errors import ConfigError
from deepytorch.torch_internals import inductor_config


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"model": "vgg17"}, "expected one of alexnet, resnet18"),
        ({"size": "huge"}, "expected one of cpu, full"),
        ({"precision": "fp8"}, "expected one of fp32, amp, bf16"),
        ({"arms": ("ddp", "horovod")}, "horovod"),
        ({"arms": ()}, "expected one or more of"),
        ({"arms": ("ddp", "ddp")}, "each once"),
        ({"batch_size": 0}, "expected 1 or more"),
        ({"rate": "200mbit"}, "expected --hosts 2 or more"),
        ({"compress": "fp8"}, "expected one of bf16, fp16"),
        ({"device": "tpu"}, "expected one of cpu, cuda"),
        ({"data": Path("rows.json")}, "expected llama"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DdpOptions(**changes)


def _records(steps: list[float], alone: float, communication: float) -> dict[str, Any]:
    return {
        "steps": [{"forward": 0.1, "backward": step - 0.1, "optimizer": 0.01} for step in steps],
        "alone": [{"forward": 0.1, "backward": alone - 0.1, "optimizer": 0.0}],
        "communication": [communication],
    }


def test_figures_are_those_of_the_measured_times(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        "ranks": [
            {"ddp": _records([0.8, 0.8, 0.8], 0.4, 0.5), "deepytorch": _records([0.6, 0.64, 0.68], 0.4, 0.5)},
            {"ddp": _records([0.8, 0.8, 0.8], 0.4, 0.5), "deepytorch": _records([0.6, 0.64, 0.68], 0.4, 0.5)},
        ],
        "max_grad_rel_diff": {"ddp": 0.0, "deepytorch": 1e-7},
        "bucket_bytes": {"ddp": [100], "deepytorch": [40, 60]},
    }

    def records(*_: Any) -> Any:
        yield {"doing": "something"}
        yield {"done": found}

    monkeypatch.setattr(comm_launch, "run_ranks", records)
    said: list[str] = []
    result = run_ddp(DdpOptions(arms=("ddp", "deepytorch")), said.append)
    assert said == ["something"]
    assert result.ratio_vs_ddp == pytest.approx(0.8 / 0.64)
    assert result.ratio_vs_ddp_compile is None
    assert result.ratio_vs_python_reducer is None
    stock, ours = result.arms
    assert stock.overlap_efficiency == pytest.approx((0.1 + max(0.3, 0.5)) / 0.8)
    assert ours.exposed_comm_seconds == pytest.approx(0.64 - 0.4)
    assert ours.percentile_seconds["p50"] == pytest.approx(0.64)
    assert ours.examples_per_second["p50"] == pytest.approx(8 / 0.64)
    assert "p50:   0.640s" in line_of(ours, 2, 2)
    assert "2 ranks -- 1M/2R" in line_of(ours, 2, 2)
    assert decoded(DdpResult, json.loads(json.dumps(result.to_json()))) == result


@pytest.mark.matrix
@pytest.mark.slow
def test_a_small_run_finds_equal_gradients(tmp_path: Path) -> None:
    options = DdpOptions(
        model="alexnet",
        batch_size=2,
        arms=("ddp", "deepytorch"),
        rounds=1,
        steps=1,
        lowering="aot_eager",
        timeout_s=120,
        timeline=tmp_path / "step.png",
    )
    result = run_ddp(options)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1}
    assert {event["name"] for event in spans if event["cat"] == "compute"} == {"forward", "backward", "optimizer"}
    sent = [event for event in spans if event["cat"] == "communication"]
    assert len(sent) == len(result.arms[1].bucket_bytes)
    assert all(event["pid"] == 1 and event["dur"] > 0 and event["ts"] > 0 for event in sent)
    assert result.max_grad_rel_diff < 1e-5
    assert result.ranks == 2
    assert [arm.name for arm in result.arms] == ["ddp", "deepytorch"]
    ours = result.arms[1]
    weights = sum(parameter.numel() for parameter in build_workload("alexnet").model.parameters())
    assert sum(ours.bucket_bytes) == pytest.approx(4 * weights, rel=0.01)
    assert ours.overlap_efficiency > 0
    json.dumps(result.to_json())


@pytest.mark.parametrize(
    ("name", "overlaps"), [("ddp_compile", True), ("ddp_python_reducer", True), ("deepytorch", False)]
)
def test_stock_arms_are_compiled_with_torchs_own_overlap(name: str, overlaps: bool) -> None:
    arm = Arm.__new__(Arm)
    arm.name, arm._mode, arm.device = name, False, torch.device("cpu")
    before = inductor_config.aten_distributed_optimizations.enable_overlap_scheduling
    with arm._dynamo():
        assert inductor_config.aten_distributed_optimizations.enable_overlap_scheduling is overlaps
    assert inductor_config.aten_distributed_optimizations.enable_overlap_scheduling is before
