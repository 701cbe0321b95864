"""Models with parts that look across positions (convolutions, scans) beside attention: around them, all is packed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.compiler.parity import (
    COMPILED,
    Pair,
    batches,
    causal_batch,
    compare_at_tokens,
    describe,
    expect_packed,
    mixture,
    padded_because,
)
from tests.compiler.plain_models import DIM, VOCAB, Block, sdpa_bool

transformers = pytest.importorskip("transformers")

TEXT = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "pad_token_id": 1,
    "bos_token_id": 2, "eos_token_id": 2, "use_cache": False,
}  # fmt: skip


def qwen3_next() -> Any:
    config = transformers.Qwen3NextConfig(
        **TEXT, num_hidden_layers=2, layer_types=["linear_attention", "full_attention"], num_key_value_heads=2,
        head_dim=8, linear_num_key_heads=2, linear_num_value_heads=4, linear_key_head_dim=8, linear_value_head_dim=8,
        num_experts=4, num_experts_per_tok=2, moe_intermediate_size=16, shared_expert_intermediate_size=16,
    )  # fmt: skip
    return transformers.Qwen3NextForCausalLM(config)


def bamba() -> Any:
    config = transformers.BambaConfig(
        **TEXT, num_hidden_layers=2, num_key_value_heads=2, attn_layer_indices=[1], mamba_n_heads=8, mamba_d_head=8,
        mamba_n_groups=1, mamba_d_state=8, mamba_chunk_size=16,
    )  # fmt: skip
    return transformers.BambaForCausalLM(config)


def gpt1() -> Any:
    config = transformers.OpenAIGPTConfig(
        vocab_size=96, n_embd=32, n_layer=2, n_head=4, n_positions=32, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0
    )
    return transformers.OpenAIGPTLMHeadModel(config)


MODELS = {"Qwen3-Next": qwen3_next, "Bamba": bamba, "GPT-1": gpt1}


@pytest.mark.slow
@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS)
def test_training_equals_eager_for_every_padding(build: Any) -> None:
    torch.manual_seed(0)
    given = batches(causal_batch, *mixture())
    report = Pair(build().train()).train(given, compare_at_tokens())
    expect_packed(report)
    assert not padded_because(report), describe(report)


class Convolved(nn.Module):
    """Blocks of attention, before each of which every position is mixed with the two before it."""

    def __init__(self, *, masked: bool, in_place: bool, p: float = 0.0) -> None:
        super().__init__()
        self.tokens, self.head = nn.Embedding(VOCAB, DIM), nn.Linear(DIM, VOCAB)
        self.mixes = nn.ModuleList(nn.Conv1d(DIM, DIM, 3, padding=2, groups=DIM) for _ in range(2))
        self.blocks = nn.ModuleList(Block(sdpa_bool) for _ in range(2))
        self.masked, self.in_place, self.p = masked, in_place, p

    def mix(self, x: torch.Tensor, convolution: nn.Module) -> torch.Tensor:
        y = convolution(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
        if not self.in_place:
            return y
        held = torch.zeros_like(y)
        held[:, 1:] = y[:, :-1]
        early = held.tanh()
        held[:, :2] *= 3.0  # read once before it, and once behind
        return early + held

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.tokens(input_ids)
        for convolution, block in zip(self.mixes, self.blocks, strict=True):
            seen = x * attention_mask[..., None] if self.masked else x
            x = block(F.dropout(x + self.mix(seen, convolution), self.p, training=True), attention_mask)
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


@pytest.mark.slow
@pytest.mark.parametrize("masked", [True, False], ids=["masked", "pads seen"])
@pytest.mark.parametrize("in_place", [True, False], ids=["writes", "no writes"])
def test_a_convolution_sees_what_it_sees_in_eager(masked: bool, in_place: bool) -> None:
    model = Convolved(masked=masked, in_place=in_place).train()
    expect_packed(Pair(model, options=COMPILED).train(batches(causal_batch, *mixture())), padded=0)


def test_labels_at_pads_and_rows_without_pads_around_a_convolution() -> None:
    given = batches(causal_batch, (4, 11, "right"), (4, 12, "left"), (3, 9, "none"), (4, 10, "right"), (1, 7, "none"))
    given[3]["labels"][:, -1] = 7  # of a pad in some rows
    report = Pair(Convolved(masked=True, in_place=True).train()).train(given)
    expect_packed(report)
    assert "a label at a padded position is not ignored" in padded_because(report)


def test_dropout_around_a_convolution_is_as_strong_as_in_eager() -> None:
    model = Convolved(masked=True, in_place=True, p=1.0).train()  # the one rate whose draws do not matter
    expect_packed(Pair(model).train(batches(causal_batch, *mixture())))
