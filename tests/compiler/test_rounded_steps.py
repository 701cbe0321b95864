"""Packed steps with dummy tokens equal padded eager; what cannot have them says why and has its own sizes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from deepytorch.compiler.code import lower_region
from deepytorch.compiler.code.lower import lower
from deepytorch.compiler.code.lower_region import RegionLowering
from deepytorch.compiler.config import CompilerConfig
from deepytorch.compiler.plan import Plan
from deepytorch.compiler.report import LEDGER, Report
from deepytorch.compiler.step.rounding.step import recording, without_recording
from tests.compiler.parity import (
    COMPILED,
    PAD,
    Pair,
    assert_same_gradients,
    batches,
    causal_batch,
    compare_at_tokens,
    describe,
    masked_lm_batch,
)
from tests.compiler.plain_models import Plain, filled, sdpa_bool

LAYOUTS = ((8, 31, "right"), (8, 40, "left"), (8, 37, "mixed"), (5, 60, "right"), (8, 33, "holes"), (3, 25, "one"))
ROUNDED = {**COMPILED, "round_sizes": True}


def expect_rounded(report: Report, steps: int) -> None:
    """All packed steps but so many were rounded, by one compile of the body."""
    assert report.total("steps_rounded") == report.total("steps_packed") >= steps, describe(report)
    assert report.total("compiles") == 1, describe(report)


@pytest.mark.parametrize("prompt", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_masked_lm_equals_eager_for_every_layout_of_padding(prompt: int) -> None:
    make = causal_batch if prompt else masked_lm_batch
    kwargs: dict[str, Any] = {"prompt": prompt} if prompt else {}
    report = Pair(Plain(sdpa_bool, layers=2).train(), options=ROUNDED).train(batches(make, *LAYOUTS, **kwargs))
    expect_rounded(report, len(LAYOUTS) - 2)


def _hf(name: str) -> nn.Module:
    hf = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    if name == "llama":
        config = hf.LlamaConfig(num_attention_heads=4, num_key_value_heads=2, use_cache=False, **sizes)
        return hf.LlamaForCausalLM(config)
    if name == "gpt2":
        dropouts = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return hf.GPT2LMHeadModel(
            hf.GPT2Config(vocab_size=96, n_embd=32, n_layer=1, n_head=4, use_cache=False, **dropouts)
        )
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    widths = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "max_position_embeddings": 128}
    return hf.BartForConditionalGeneration(
        hf.BartConfig(vocab_size=96, dropout=0.0, use_cache=False, **sizes, **widths)
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2", "bart"])
def test_transformers_equal_eager(name: str) -> None:
    """Rotary and learned positions, and two token spaces; outputs are looked at before and after backward."""
    given = batches(causal_batch, *LAYOUTS[:5])
    report = Pair(_hf(name).train(), options=ROUNDED).train(given, compare_at_tokens())
    expect_rounded(report, 4)
    assert 2 <= report.total("sizes_recorded") <= 5


@pytest.mark.slow
def test_a_bias_of_the_padded_size_has_its_own_sizes() -> None:
    hf = pytest.importorskip("transformers")
    sizes = {"vocab_size": 96, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 1, "num_heads": 4}
    config = hf.T5Config(dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=PAD, **sizes)
    report = Pair(hf.T5ForConditionalGeneration(config).train(), options=ROUNDED).train(
        batches(causal_batch, *LAYOUTS[:3])
    )
    assert report.total("steps_rounded") == 0 < report.total("steps_packed"), describe(report)
    assert any("a bias is added" in reason for region in report.regions for reason in region.declined)


def _shifted_loss(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.head(x)[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def _pooled_loss(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
    return F.cross_entropy(model.head(pooled), labels.amax(1).clamp(min=0))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("loss", "reason"),
    [
        (_shifted_loss, "not rounded: labels stand on a part of the positions"),
        (_pooled_loss, "not rounded: the packed step reads a value of the padded batch's size"),
    ],
)
def test_what_needs_the_padded_batch_has_its_own_sizes(loss: Any, reason: str) -> None:
    report = Pair(Plain(sdpa_bool, loss, layers=1).train(), options=ROUNDED).train(
        batches(masked_lm_batch, *LAYOUTS[:3])
    )
    assert report.total("steps_rounded") == 0 < report.total("steps_packed"), describe(report)
    declined = [each for region in report.regions for each in region.declined]
    assert any(reason in each for each in declined), declined


def test_second_backward_of_a_rounded_step() -> None:
    """A backward that keeps its graph and one of its gradients' norm: run again on the padded batch."""
    pair = Pair(Plain(filled, layers=1).train(), options=ROUNDED)  # SDPA has no second derivative
    given = batches(masked_lm_batch, *LAYOUTS[:3])
    for batch in given[:2]:
        pair.step(batch)
    rounded = LEDGER.report().total("steps_rounded")
    for model in (pair.reference, pair.compiled):
        loss = model(**given[2])
        loss = loss if isinstance(loss, torch.Tensor) else loss[0]
        weights = [p for p in model.parameters() if p.requires_grad]
        found = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        sum(each.square().sum() for each in found if each is not None).backward()
    assert_same_gradients(pair.reference, pair.model)
    report = LEDGER.report()
    assert report.total("steps_rounded") == rounded + 1, describe(report)
    pair.step(given[0])
    assert LEDGER.report().total("steps_rounded") == rounded + 1, "once asked for, the region runs in eager"


def test_a_rounded_step_that_fails_leaves_the_packed_one(monkeypatch: pytest.MonkeyPatch) -> None:
    from deepytorch.compiler.step.rounding import step

    def fails(*_: Any) -> None:
        raise RuntimeError("no indices")

    pair = Pair(Plain(sdpa_bool, layers=1).train(), options=ROUNDED)
    monkeypatch.setattr(step, "RoundedIndices", fails)
    report = pair.train(batches(masked_lm_batch, *LAYOUTS[:4]))
    assert report.total("steps_rounded") == 0 < report.total("steps_packed"), describe(report)
    assert any("no indices" in each for region in report.regions for each in region.fallbacks)


def test_weights_are_static_inputs_of_what_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a replay would copy all of them: AOTAutograd reads from `tensor_dict` what stays where it is."""
    static: list[set[bool]] = []

    def look(module: Any, example_inputs: Any, **kwargs: Any) -> Any:
        nodes = [node for node in module.graph.nodes if node.op == "placeholder"]
        static.append(
            {
                bool(node.meta["tensor_dict"].get("_dynamo_static_input_type"))
                for node, value in zip(nodes, example_inputs, strict=True)
                if isinstance(value, nn.Parameter)
            }
        )
        return lower(module, example_inputs, **kwargs)

    monkeypatch.setattr(lower_region, "lower", look)
    pair = Pair(Plain(sdpa_bool, layers=1).train(), options=ROUNDED)
    expect_rounded(pair.train(batches(masked_lm_batch, *LAYOUTS[:3])), 1)
    assert static == [{True}]


def test_only_the_step_with_few_sizes_is_recorded() -> None:
    config = CompilerConfig.parse("reduce-overhead")
    lowering = RegionLowering(config, Plan.initial("region", config))
    assert config.records_graphs
    few, many = recording(lowering).config.inductor_options(), without_recording(lowering).config.inductor_options()
    assert few["triton.cudagraphs"]
    assert few["graph_partition"]
    assert not many["triton.cudagraphs"]
    theirs = CompilerConfig.parse("reduce-overhead", {"graph_partition": False})
    kept = recording(RegionLowering(theirs, Plan.initial("region", theirs))).config.inductor_options()
    assert not kept["graph_partition"]


def test_sizes_are_rounded_where_graphs_are_asked_for_on_a_gpu() -> None:
    assert CompilerConfig.parse("reduce-overhead").rounds_sizes(on_cuda=True)
    assert CompilerConfig.parse(options={"triton.cudagraphs": True}).rounds_sizes(on_cuda=True)
    assert not CompilerConfig.parse("reduce-overhead").rounds_sizes(on_cuda=False)
    assert not CompilerConfig.parse("reduce-overhead", {"round_sizes": False}).rounds_sizes(on_cuda=True)
    assert not CompilerConfig.parse("max-autotune-no-cudagraphs").rounds_sizes(on_cuda=True)
    assert not CompilerConfig.parse("reduce-overhead", {"lowering": "aot_eager"}).rounds_sizes(on_cuda=True)
    assert CompilerConfig.parse(options={"round_sizes": True}).rounds_sizes(on_cuda=False)


def test_operators_with_a_state_are_cut_out_of_graphs() -> None:
    import deepytorch.passes.ops.reduce  # noqa: F401, registers them

    for name in ("reduce_start", "reduce_part", "reduce_rows", "reduce_wait"):
        assert torch.Tag.cudagraph_unsafe in getattr(torch.ops.deepytorch, name).default.tags


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_recorded_steps_equal_eager_on_a_gpu(name: str) -> None:
    model = _hf(name).cuda().train()
    pair = Pair(model, options={"lowering": "inductor", "mode": "reduce-overhead", "wait": True})
    given = [{key: value.cuda() for key, value in batch.items()} for batch in batches(causal_batch, *LAYOUTS[:5] * 3)]
    report = pair.train(given, compare_at_tokens())
    assert report.total("steps_rounded") >= 12, describe(report)
    assert report.total("compiles") <= 2, describe(report)
    counters = torch._dynamo.utils.counters["inductor"]
    assert counters["cudagraph_skips"] == 0, dict(counters)
    assert counters["cudagraph_recorded_non_static_inputs"] > 0, dict(counters)
