"""Ranks that share a GPU: started, compared and ended, by a stand-in for the kernels on the CPU."""

from __future__ import annotations

import sys

import pytest
import torch

from deepytorch.bench import ranks_of_one_gpu
from deepytorch.bench.launch import RankError
from deepytorch.bench.ranks_of_one_gpu import OneGpuFound, OneGpuPlan, WrongSum, compare_sums, many_calls, run_one_gpu
from deepytorch.gpu_check.checks import ranks as checks
from deepytorch.gpu_check.outcome import Failed

CPU = torch.device("cpu")


def alone(name, tensor, average):
    """The all-reduce of one rank."""


def test_ranks_meet_compare_and_end():
    told = []
    found = run_one_gpu(OneGpuPlan("cpu", calls=150, timeout_s=90.0), ranks=2, notify=told.append)
    assert (found.ranks, found.compared, found.calls) == (2, 90, 150)
    assert found.seconds > 0
    assert "2 ranks on one device: 100 calls" in told


def test_no_more_calls_than_there_is_time_for():
    asked = []
    assert many_calls(alone, 0, 1, CPU, 1000, lambda number: asked.append(number) or number < 200) == 200
    assert asked == [100, 200]
    assert many_calls(alone, 0, 1, CPU, 130, lambda number: True) == 130


@pytest.mark.parametrize("algorithm", ranks_of_one_gpu.NAMES)
def test_a_wrong_bit_is_found_and_named(monkeypatch, algorithm):
    monkeypatch.setattr(ranks_of_one_gpu, "_SIZES", (8, 40))

    def wrong(name, tensor, average):
        if name == algorithm and tensor.dtype == torch.bfloat16 and average:
            tensor.view(torch.int16)[-1] ^= 1

    assert compare_sums(alone, 0, 1, CPU) == 36
    with pytest.raises(WrongSum, match=f"{algorithm}: 1 bytes of the average of 8 values of torch.bfloat16"):
        compare_sums(wrong, 0, 1, CPU)


def test_one_wrong_value_among_many_calls_is_found():
    calls = []

    def wrong(name, tensor, average):
        calls.append(name)
        if len(calls) == 170:
            tensor[-1] += 1

    with pytest.raises(WrongSum, match="1 values of calls number 100 to 199 are wrong"):
        many_calls(wrong, 0, 1, CPU, 1000, lambda number: True)
    assert set(calls) == set(ranks_of_one_gpu.NAMES)


@pytest.mark.parametrize(
    ("script", "words"),
    [("import time; time.sleep(60)", "stood still for 1 s"), ("raise SystemExit(3)", "ended with exit status 3")],
    ids=["a rank that hangs", "a rank that fails"],
)
def test_a_deadline_ends_ranks_and_failures_are_told(script, words):
    with pytest.raises(RankError, match=words):
        run_one_gpu(OneGpuPlan("cpu", timeout_s=1.0), ranks=2, worker=(sys.executable, "-c", script))


def test_gpu_check_tells_what_ranks_found(monkeypatch):
    gpu = torch.device("cuda")
    plans = []

    def all_right(plan):
        plans.append(plan)
        return OneGpuFound(4, 60, 500, 0.05)

    def hangs(plan):
        raise RankError("The ranks [2] stood still for 120 s at: 400 calls.")

    monkeypatch.setattr(ranks_of_one_gpu, "run_one_gpu", all_right)
    found = checks.all_reduces(gpu)
    assert "60 kinds and 500 calls have the right bits, 100 us a call" in found.said
    assert found.figures == {"call_us": pytest.approx(100.0), "calls": 500.0}
    assert (plans[0].device, plans[0].calls) == ("cuda", 10_000)
    monkeypatch.setattr(ranks_of_one_gpu, "run_one_gpu", hangs)
    with pytest.raises(Failed, match="stood still"):
        checks.all_reduces(gpu)
