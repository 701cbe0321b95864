"""What the import adds to steps that run in eager: next to nothing, in a process of its own."""

from __future__ import annotations

import subprocess
import sys

TRAINING = """
import sys, torch
for name in {without}:
    def refuse(*args, name=name, **kwargs): raise AssertionError("torch._C._functorch." + name + " was called")
    setattr(torch._C._functorch, name, refuse)
import deepytorch
from torch import nn
net = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Dropout(0.1), nn.Linear(16, 1))
optimizer = torch.optim.AdamW(net.parameters())
for _ in range(5):
    net(torch.randn(4, 8)).pow(2).mean().backward()
    optimizer.step(); optimizer.zero_grad()
from deepytorch.handles import handle_of
assert handle_of(net) is not None, "the module was not armed"
loaded = [name for name in sys.modules if name.startswith("deepytorch.")]
print(" ".join(loaded))
"""


def _train(without: str) -> set[str]:
    done = subprocess.run(
        [sys.executable, "-c", TRAINING.format(without=without)],
        capture_output=True, text=True, timeout=120, env={"PATH": "", "DEEPYTORCH_COMPILE": "background"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return set(done.stdout.split())


def test_functorch_is_left_alone() -> None:
    """Its first call in a process makes state that each node of each backward copies from then on: 1 % of a step."""
    _train("[each for each in dir(torch._C._functorch) if callable(getattr(torch._C._functorch, each))]")


def test_what_is_not_needed_is_not_loaded() -> None:
    """Loading the compiler and the communication layer takes 0.3 s, which a run has to be able to afford."""
    loaded = _train("()")
    assert "deepytorch.first_steps" in loaded
    heavy = (
        "deepytorch.compiler.backend",
        "deepytorch.passes",
        "deepytorch.comm.gradients",
        "deepytorch.comm.algorithms",
    )
    assert not [name for name in loaded if name.startswith(heavy)]
