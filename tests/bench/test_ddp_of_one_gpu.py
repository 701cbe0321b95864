"""Two ranks on one device train under DDP as one process does; a wrong rank is found."""

from __future__ import annotations

import sys

import pytest
import torch

from deepytorch.bench import ddp_of_one_gpu
from deepytorch.bench.ddp_of_one_gpu import DdpFound, DdpPlan, run_ddp
from deepytorch.bench.launch import RankError
from deepytorch.gpu_check.checks.ranks import ddp_is_right
from deepytorch.gpu_check.outcome import Failed, Skipped

CPU = torch.device("cpu")


def test_ranks_that_fail_are_told():
    with pytest.raises(RankError, match="ended with exit status 3"):
        run_ddp(DdpPlan("cpu", timeout_s=5.0), worker=(sys.executable, "-c", "raise SystemExit(3)"))


def test_what_ranks_found_is_judged(monkeypatch):
    given = {"packed": 8, "padded": 0, "eager_off": (1e-6, 1e-6), "norm": (1.0, 1.0)}

    def finds(**found):
        monkeypatch.setattr(ddp_of_one_gpu, "run_ddp", lambda plan: DdpFound(**given | found))
        return ddp_is_right(CPU, "gloo", "fp32")

    assert finds(off=(2e-6, 1e-6)) == "off by 2.0e-06 at most, 8 steps packed, 0 padded"
    with pytest.raises(Failed, match="change of the weights is off by"):
        finds(off=(1e-6, 0.1))
    with pytest.raises(Failed, match="losses is off by nan"):
        finds(off=(float("nan"), 0.0))
    with pytest.raises(Failed, match="8 steps ran padded, and none packed"):
        finds(off=(0.0, 0.0), packed=0, padded=8)


def test_nccl_that_takes_one_rank_is_no_failure(monkeypatch):
    def refuses(plan):
        raise RankError("ncclInvalidUsage: Duplicate GPU detected")

    monkeypatch.setattr(ddp_of_one_gpu, "run_ddp", refuses)
    with pytest.raises(Skipped, match="one rank on each GPU"):
        ddp_is_right(torch.device("cuda"), "nccl", "fp32")
    with pytest.raises(Failed, match="Duplicate GPU"):
        ddp_is_right(CPU, "gloo", "fp32")


@pytest.mark.slow
@pytest.mark.timeout(300, func_only=True)
def test_two_ranks_train_as_one_process():
    assert "steps packed" in ddp_is_right(CPU, "gloo", "fp32")
