"""Megatron-LM: its jit hook, by the contract of its module `megatron.core.jit` and with the package; its models."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cold import run_cold

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


@pytest.mark.slow
def test_fused_functions_are_compiled_by_deepytorch(tmp_path: Path) -> None:
    core = tmp_path / "megatron" / "core"
    core.mkdir(parents=True)
    (core / "__init__.py").touch()
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
deepytorch.disable()
assert jit.jit_fuser is torch.compile
jit.enable_jit_fuser()
assert jit.jit_fuser is torch.compile
"""
    run_cold(script, cwd=tmp_path)


GPT = """
import contextlib, logging
import torch
import torch.distributed as dist
torch.cuda.current_device = lambda: "cpu"  # Megatron asks for the device of its buffers
from megatron.core import parallel_state
from megatron.core.fusions.fused_bias_swiglu import swiglu
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel import random
from megatron.core.transformer.transformer_config import TransformerConfig
class Tracker:  # of the random numbers of a GPU
    def fork(self, *_):
        return contextlib.nullcontext()
random._CUDA_RNG_STATE_TRACKER, random._CUDA_RNG_STATE_TRACKER_INITIALIZED = Tracker(), True
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
parallel_state.initialize_model_parallel()
config = TransformerConfig(
    num_layers=2, hidden_size=32, num_attention_heads=4, use_cpu_initialization=True, hidden_dropout=0.0,
    attention_dropout=0.0, bias_activation_fusion=True, gated_linear_unit=True, add_bias_linear=False,
    activation_func=torch.nn.functional.silu, masked_softmax_fusion=False, normalization="RMSNorm",
)
torch.manual_seed(0)
model = GPTModel(config, get_gpt_layer_local_spec(normalization="RMSNorm"), vocab_size=64, max_sequence_length=32)
optimizer = torch.optim.AdamW(model.parameters(), 1e-3)
ids = torch.randint(0, 64, (2, 16))
mask = torch.triu(torch.ones(16, 16, dtype=torch.bool), 1)[None, None]
for _ in range(3):
    loss = model(ids, torch.arange(16).expand(2, 16), mask, labels=ids).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(f"loss {loss.item():.5f}")
x = torch.randn(4, 8, requires_grad=True)
[gradient] = torch.autograd.grad(swiglu(x).square().sum(), x)
print(f"gradient {gradient.norm().item():.5f}")
dist.destroy_process_group()
"""


@pytest.mark.slow
def test_models_of_the_package_are_left_alone_and_its_fused_functions_are_compiled() -> None:
    pytest.importorskip("megatron.core")
    ours = """
import logging, deepytorch
logging.basicConfig(level=logging.INFO)
deepytorch.configure(options={"lowering": "aot_eager"})
"""
    report = """
from deepytorch import autowrap
assert not autowrap.armed(model)
assert len(deepytorch.report().to_json()["regions"]) >= 1
"""
    found = []
    for script in (GPT, ours + GPT + report):
        done = run_cold(script)
        found.append([line for line in done.stdout.splitlines() if line.startswith(("loss", "gradient"))])
    assert len(found[0]) == 4
    assert found[0] == found[1]
    assert "models of Megatron-LM are left as they are" in done.stderr
