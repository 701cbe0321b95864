"""`deepytorch bench ddp`: what it refuses, what it makes of measured times, and one small run of it."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from deepytorch.bench.ddp import Ddp, DdpOptions, grad_rel_diff
from deepytorch.bench.overlap import projected
from deepytorch.bench.parallel import trainer
from deepytorch.bench.run import run_benchmark
from deepytorch.bench.zoo import build_workload
from deepytorch.errors import ConfigError
from deepytorch.torch_internals import inductor_config
from tests.bench.trained import results


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"models": ("vgg17",)}, "expected one of alexnet, resnet18"),
        ({"size": "huge"}, "expected one of cpu, full"),
        ({"precision": "fp8"}, "expected one of fp32, mixed"),
        ({"setups": ("ddp", "horovod")}, "horovod"),
        ({"setups": ()}, "expected one or more of"),
        ({"setups": ("ddp", "ddp")}, "each once"),
        ({"batch_size": 0}, "expected 1 or more"),
        ({"rate": "200mbit"}, "expected --hosts 2 or more"),
        ({"hosts": 2, "rate": "fast"}, "fast"),
        ({"compress": "fp8"}, "expected one of bf16, fp16"),
        ({"compress": "bf16", "backend": "gloo"}, "found backend gloo"),
        ({"device": "tpu"}, "expected one of cpu, cuda"),
        ({"data": Path("rows.json")}, "expected llama"),
        ({"models": ("vgg16", "alexnet"), "timeline": Path("step.png")}, "expected one"),
    ],
)
def test_options_that_make_no_sense_are_refused(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        DdpOptions(**changes)


def test_setups_are_what_their_names_say() -> None:
    [cell] = Ddp().cells(DdpOptions(compress="bf16", hosts=2, rate="200mbit"))
    assert (cell.place.hosts, cell.place.rate, cell.impossible) == (2, "200mbit", None)
    eager, compiled, traced, ours = cell.setups
    assert [setup.job.parallel.compile for setup in cell.setups] == ["", "inductor", "inductor", ""]
    assert [setup.imports for setup in cell.setups] == [False, False, False, True]
    assert [setup.job.compress for setup in cell.setups] == [None, None, None, "bf16"]
    assert (compiled.job.python_reducer, traced.job.python_reducer) == (False, True)
    assert replace(eager.job, compress="bf16") == ours.job
    [alone] = Ddp().cells(DdpOptions(ranks=1))
    assert alone.impossible == "one rank has nothing to reduce"
    [stock] = Ddp().cells(DdpOptions(backend="gloo"))
    assert stock.setups[-1].job.stock_group


@pytest.mark.parametrize(("name", "overlaps"), [("ddp", False), ("ddp_compile", True), ("deepytorch", False)])
def test_stock_is_compiled_with_torchs_own_overlap(name: str, overlaps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    [cell] = Ddp().cells(DdpOptions(setups=(name,)))
    parallel = replace(cell.setups[0].job.parallel, sharding="none")
    before = inductor_config.get_config_copy()
    monkeypatch.setattr("torch.distributed.is_initialized", lambda: True)
    monkeypatch.setattr("torch.distributed.get_world_size", lambda: 1)
    try:
        trainer(nn.Linear(2, 2), parallel, optimizer=partial(torch.optim.SGD, lr=0.1), device=torch.device("cpu"))
        assert inductor_config.aten_distributed_optimizations.enable_overlap_scheduling is overlaps
    finally:
        inductor_config.load_config(before)


def rank(steps: list[float], gradient: float = 3.0) -> dict[str, Any]:
    """What a rank finds whose compute alone takes 0.4 s, a quarter of it forward, and communication alone 0.5 s."""
    return {
        "seconds": steps,
        "parts": [{"forward": 0.1, "backward": step - 0.1, "optimizer": 0.01} for step in steps],
        "alone": [{"forward": 0.1, "backward": 0.3, "optimizer": 0.0}],
        "communication": [0.5],
        "rows": 8,
        "losses": [2.0, gradient],
        "process_mb": 100.0,
        "bucket_bytes": [40, 60],
        "gradients": {"weight": [3.0, gradient, 0.0], "tiny": [0.0, 0.0, 0.0]},
        "plan": "compiled",
        "fallbacks": [],
        "spans": [],
    }


def test_figures_are_those_of_the_measured_times() -> None:
    options = DdpOptions(setups=("ddp", "deepytorch"))
    [cell] = Ddp().cells(options)
    ours = [0.6, 0.64, 0.68]
    found = {"ddp": [rank([0.8] * 3), rank([0.8] * 3)], "deepytorch": [rank(ours, 3.03), rank(ours, 3.03)]}
    rows = Ddp().rows(options, cell, found)
    stock, fast = rows
    assert stock.figures["ratio"] == pytest.approx(0.8 / 0.64)
    assert "ratio" not in fast.figures
    assert stock.figures["overlap_efficiency"] == pytest.approx((0.1 + max(0.3, 0.5)) / 0.8)
    assert fast.figures["exposed_s"] == pytest.approx(0.64 - 0.4)
    assert fast.figures["p50_s"] == pytest.approx(0.64)
    assert fast.figures["examples_per_s"] == pytest.approx(8 / 0.64)
    assert fast.figures["max_grad_rel_diff"] == pytest.approx(0.01)
    assert fast.figures["loss_rel_diff"] == pytest.approx(0.01)
    assert fast.series["bucket_bytes"] == [40, 60]
    [_, line] = Ddp().lines(rows)
    assert "p50:   0.640s     12/s" in line
    assert "2 ranks -- 1M/2R" in line
    [table] = Ddp().tables(results("ddp", rows))
    assert [dict(zip(table.columns, row, strict=True))["ratio"] for row in table.rows] == ["1.25x", ""]


def gradients(scale: float, **changes: float) -> dict[str, list[float]]:
    model = nn.Linear(300, 40)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        parameter.grad = scale * torch.randn(parameter.shape, generator=generator)
    model.weight.grad[0] += changes.get("weight", 0.0)  # type: ignore[index]
    if changes.get("bias") == 0.0:
        model.bias.grad = None
    return projected(model)


def test_differences_of_gradients_are_estimated_from_projections() -> None:
    expected = gradients(1.0)
    assert grad_rel_diff(expected, gradients(1.0)) == 0.0
    assert grad_rel_diff(expected, gradients(1.01)) == pytest.approx(0.01, rel=0.7)
    assert grad_rel_diff(expected, gradients(1.0, weight=0.1)) == pytest.approx((0.01 / 40) ** 0.5, rel=0.7)
    assert grad_rel_diff(expected, gradients(1.0, bias=0.0)) == 1.0
    assert grad_rel_diff(expected, gradients(float("nan"))) == 1e9


@pytest.mark.matrix
@pytest.mark.slow
def test_a_small_run_finds_equal_gradients(tmp_path: Path) -> None:
    setups = ("ddp", "ddp_compile", "ddp_python_reducer", "deepytorch")
    options = DdpOptions(models=("alexnet",), batch_size=2, steps=2, setups=setups, timeline=tmp_path / "step.png")
    results = run_benchmark(Ddp(), options, tmp_path / "ddp.json")
    assert [(row.key["setup"], row.failed) for row in results.rows] == [(name, "") for name in setups]
    assert max(row.figures["max_grad_rel_diff"] for row in results.rows) < 1e-5
    assert max(row.figures["loss_rel_diff"] for row in results.rows) < 1e-5
    assert min(row.figures["overlap_efficiency"] for row in results.rows) > 0
    weights = sum(parameter.numel() for parameter in build_workload("alexnet").model.parameters())
    ours = results.rows[-1].series["bucket_bytes"]
    assert sum(ours) == pytest.approx(4 * weights, rel=0.01)
    assert (tmp_path / "step.png").read_bytes().startswith(b"\x89PNG")
    events = json.loads((tmp_path / "step.json").read_text())["traceEvents"]
    spans = [event for event in events if event["ph"] == "X"]
    assert {event["pid"] for event in spans} == {0, 1, 2, 3}
    assert {event["name"] for event in spans if event["cat"] == "compute"} == {"forward", "backward", "optimizer"}
    sent = [event for event in spans if event["cat"] == "communication"]
    assert all(event["pid"] == 3 and event["dur"] > 0 and event["ts"] > 0 for event in sent)
    assert len(sent) in (0, len(ours))  # where eager was the fastest, DDP's own reducer sends
