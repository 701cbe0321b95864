"""Megatron-LM's fused functions, compiled by deepytorch: `python examples/hosts/megatron_jit.py`."""

import deepytorch  # the one line

import torch
from megatron.core.fusions.fused_bias_swiglu import swiglu  # decorated with megatron.core.jit.jit_fuser

x = torch.randn(64, 512, requires_grad=True)
[gradient] = torch.autograd.grad(swiglu(x).square().mean(), x)
print(f"gradient {gradient.norm().item():.4f}")
print(deepytorch.report())
