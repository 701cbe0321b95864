"""A script of a user's that is compiled beside: run in a process of its own, and what it has printed."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

SCRIPT = """
import os, signal, sys, time
import torch
from torch import nn
torch.set_num_threads(1)
if os.environ.get("DEEPYTORCH") != "off":
    import deepytorch, deepytorch.process_facts
    from deepytorch.compiler.report import LEDGER
    deepytorch.process_facts._BEGAN -= 3600.0  # old enough to pay for any pause
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4)).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
data = torch.Generator().manual_seed(0)
def compiled():
    return os.environ.get("DEEPYTORCH") != "off" and any(r.compiled_by for r in LEDGER.report().regions)
def step():
    loss = model(torch.randn(5, 8, generator=data)).square().mean()
    loss.backward(); optimizer.step(); optimizer.zero_grad()
    return loss.item()
"""

UNTIL_COMPILED = """
deadline, steps = time.time() + 150, 0
while not compiled() and time.time() < deadline:
    step(); steps += 1; time.sleep(0.05)
for _ in range(5):
    step(); steps += 1
region = LEDGER.report().regions[0]
print("steps", steps, "by", region.compiled_by.replace(" ", "-"), "compiles", region.compiles)
print("fell", len(region.fallbacks))
print("sum", repr(sum(p.double().sum().item() for p in model.parameters())))
"""


def run(
    script: str, tmp_path: Path, launcher: tuple[str, ...] = (), **environment: str
) -> subprocess.CompletedProcess[str]:
    """A script of a user's, compiled beside, with caches in `tmp_path`."""
    (tmp_path / "xdg").mkdir(mode=0o700, exist_ok=True)
    full = {
        **os.environ,
        "XDG_CACHE_HOME": str(tmp_path / "xdg"),
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "torch"),
        "DEEPYTORCH_COMPILE": "background",
        **environment,
    }
    path = tmp_path / "script.py"
    path.write_text(SCRIPT + textwrap.dedent(script))
    return subprocess.run(
        [sys.executable, *launcher, path], env=full, capture_output=True, text=True, timeout=500, check=False
    )


def words(done: subprocess.CompletedProcess[str]) -> dict[str, str]:
    """What such a script has printed."""
    assert done.returncode == 0, done.stderr[-3000:]
    found = done.stdout.split()
    return dict(zip(found[::2], found[1::2], strict=True))
