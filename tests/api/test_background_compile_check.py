"""The check of `deepytorch gpu-check` for graphs that another process compiles, with a small model on the CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from deepytorch.gpu_check.checks import background_compile
from tests.cold import run_cold

SCRIPT = """
import sys
from typing import NamedTuple
import torch
from torch import nn
torch.set_num_threads(1)
from deepytorch.switch import SWITCH
SWITCH.enabled = False
from deepytorch.compiler.code import compilers
from deepytorch.gpu_check.checks import background_compile
from deepytorch.gpu_check.outcome import Failed
from torch._inductor import config

class Output(NamedTuple):
    loss: torch.Tensor

class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
    def forward(self, x):
        return Output(self.second(torch.tanh(self.first(x))).square().mean())

def change_after(*job):
    asked = original(*job)
    config.max_fusion_size = 63  # the key that this process looks for is another one from now on
    return asked

if sys.argv[1] == "another key":
    original, compilers.compile_in_worker = compilers.compile_in_worker, change_after
background_compile.build_model = lambda *_, **__: Small()
background_compile.text_batches = lambda *_, **__: [{"x": torch.randn(5, 8)} for _ in range(4)]
try:
    print("passed:", background_compile.compiled_in_background(torch.device("cpu")))
except Failed as reason:
    print("failed:", reason)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("the same key", "passed: 1 graphs in "),
        ("another key", "inductor_config[max_fusion_size] is 64 there and 63 here"),
    ],
)
def test_the_check_tells_whether_code_of_the_other_process_was_found(case: str, said: str, tmp_path: Path) -> None:
    done = run_cold(SCRIPT, case, cwd=tmp_path)
    assert said in done.stdout
    assert done.stdout.startswith(said[:6] if case == "the same key" else "failed")


def test_its_checks_have_processes_of_their_own() -> None:
    found = list(background_compile.checks(torch.device("cpu")))
    assert len({each.group for each in found}) == len(found) == 2
    assert all(not each.is_timed and not each.quick for each in found)
