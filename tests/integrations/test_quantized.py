"""Frozen weights in 4 or 8 bits under adapters: bitsandbytes' layers, where it is installed."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import deepytorch
from deepytorch.compiler.report import LEDGER
from deepytorch.integrations.entry_readings import declined_beforehand
from tests.compiler.parity import batches, causal_batch
from tests.compiler.test_parity_decoders import llama


def test_layers_that_look_for_outliers_in_all_tokens_are_declined() -> None:
    model: Any = llama("sdpa")
    assert declined_beforehand(model, model) is None
    model.model.layers[0].mlp.up_proj.state = SimpleNamespace(threshold=6.0)
    assert "outlier" in (declined_beforehand(model, model) or "")


def test_four_bit_weights_under_adapters_are_packed_at_model_entry() -> None:
    quantized, peft = pytest.importorskip("bitsandbytes").nn, pytest.importorskip("peft")
    torch.manual_seed(0)
    model: Any = llama("sdpa")
    for part in list(model.model.modules()):
        for name, linear in list(part.named_children()):
            if type(linear) is nn.Linear:
                kind = quantized.Linear4bit
                layer = kind(linear.in_features, linear.out_features, False, torch.float32, quant_type="nf4")
                layer.load_state_dict(linear.state_dict())
                setattr(part, name, layer.to("cpu"))
    lora = peft.LoraConfig(task_type="CAUSAL_LM", r=2, lora_dropout=0.0, init_lora_weights=False)
    adapted = peft.get_peft_model(model.requires_grad_(False), lora).train()
    reference = copy.deepcopy(adapted)
    LEDGER.forget()
    torch._dynamo.reset()
    handle = deepytorch.optimize(adapted, options={"lowering": "eager"})
    for batch in batches(causal_batch, *[(4, 10, "right")] * 4):
        found = adapted(**batch).loss
        with deepytorch.paused():
            expected = reference(**batch).loss
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
        for loss in (found, expected):
            loss.backward()
        for mine, theirs in zip(adapted.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-5)
    handle.restore()
    packed = {each.name: each.steps_packed for each in LEDGER.report().regions if each.steps_packed}
    assert list(packed) == ["model entry of LlamaForCausalLM"], LEDGER.report().regions
