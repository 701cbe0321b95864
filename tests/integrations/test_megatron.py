"""Megatron-LM's jit hook, by the contract of its module `megatron.core.jit`."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

JIT = """
import torch

def noop_decorator(function):
    return function

def enable_jit_fuser():
    global jit_fuser
    jit_fuser = torch.compile

def disable_jit_fuser():
    global jit_fuser
    jit_fuser = noop_decorator

enable_jit_fuser()
"""

FUSED = """
import torch
from megatron.core.jit import jit_fuser

@jit_fuser
def swiglu(x):
    first, second = x.chunk(2, -1)
    return torch.nn.functional.silu(first) * second
"""


def test_fused_functions_are_compiled_by_deepytorch(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "jit.py").write_text(JIT)
    (core / "fused.py").write_text(FUSED)
    script = """
import deepytorch
import torch
from megatron.core import jit
from megatron.core.fused import swiglu
from deepytorch.integrations import megatron
x = torch.randn(4, 8, requires_grad=True)
first, second = x.chunk(2, -1)
torch.testing.assert_close(swiglu(x), torch.nn.functional.silu(first) * second)
swiglu(x).sum().backward()
assert len(deepytorch.report().to_json()["regions"]) == 1
jit.disable_jit_fuser()
assert jit.jit_fuser is jit.noop_decorator
jit.enable_jit_fuser()
assert jit.jit_fuser is megatron.compile_fused
megatron.detach(jit)
assert jit.jit_fuser is torch.compile
jit.enable_jit_fuser()
assert jit.jit_fuser is torch.compile
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
