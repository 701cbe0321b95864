"""`deepytorch.explain`: what would be done, before it is done."""

from __future__ import annotations

from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

import deepytorch
from deepytorch import handles
from deepytorch.api import explain
from deepytorch.compiler.report import LEDGER
from tests.compiler.parity import batches, causal_batch
from tests.compiler.test_parity_decoders import llama

EAGER = {"lowering": "aot_eager"}


def cut_by_a_layer(model: Any) -> Any:
    """A model whose first layer Dynamo does not trace. No function of the script's own is in it."""
    layer = model.model.layers[0]
    layer.forward = torch.compiler.disable(layer.forward)
    return model


def test_a_model_in_one_graph_has_one_region_with_its_fraction_and_gain() -> None:
    [batch] = batches(causal_batch, (4, 11, "right"))
    explained = explain(llama("sdpa").train(), **batch, options=EAGER)
    [region] = explained.to_json()["regions"]
    assert explained.packed
    assert region["outcome"] == "packed"
    assert region["real_token_fraction"] == pytest.approx(float(batch["attention_mask"].float().mean()))
    assert region["expected_speedup_of_matrix_work"] > 1
    assert region["attention"] == {"cpu": 2}  # its layers
    assert "packed" in str(explained)


@pytest.mark.slow
def test_where_graphs_break_the_model_entry_is_one_more_region() -> None:
    LEDGER.forget()
    model = cut_by_a_layer(llama("sdpa").train())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    one, full = batches(causal_batch, (4, 11, "right"), (4, 9, "none"))
    entry, *others = explain(model, **one, options=EAGER).to_json()["regions"]
    assert (entry["name"], entry["outcome"]) == ("model entry of LlamaForCausalLM", "packed")
    assert entry["real_token_fraction"] == pytest.approx(float(one["attention_mask"].float().mean()))
    assert len(others) > 1
    assert {region["outcome"] for region in others} == {"declined"}
    entry = explain(model, **full, options=EAGER).to_json()["regions"][0]
    assert entry["this_batch_would_run_padded_because"] == ["hardly any padding in the batch"]
    assert not LEDGER.report().regions
    assert not any("_compiled_call_impl" in vars(module) for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.testing.assert_close(model.state_dict(), before, rtol=0, atol=0)


@pytest.mark.slow
def test_a_model_that_is_not_packed_at_entry_says_why() -> None:
    model = cut_by_a_layer(llama("sdpa").train())
    [batch] = batches(causal_batch, (4, 11, "right"))
    del batch["attention_mask"]
    entry = explain(model, **batch, options=EAGER).to_json()["regions"][0]
    assert entry["outcome"] == "declined"
    assert entry["declined"] == ["no attention mask is given"]
    with_unpad_off = explain(model, **batch, options={**EAGER, "unpad": False}).to_json()["regions"]
    assert not any(region["name"].startswith("model entry") for region in with_unpad_off)


@pytest.mark.slow
@pytest.mark.matrix
def test_asking_in_the_middle_of_training_leaves_it_packed_at_entry() -> None:
    LEDGER.forget()
    model = cut_by_a_layer(llama("sdpa").train())
    handle = deepytorch.optimize(model, options=EAGER)
    given = batches(causal_batch, (4, 11, "right"), (4, 9, "right"), (4, 10, "right"))
    try:
        for batch in given[:2]:
            model(**batch).loss.backward()
        regions = explain(model, **given[2], options=EAGER).to_json()["regions"]
        assert (regions[0]["name"], regions[0]["outcome"]) == ("model entry of LlamaForCausalLM", "packed")
        model(**given[2]).loss.backward()
        assert handle.entry is not None
        [record] = [each for each in LEDGER.report().regions if each.name.startswith("model entry")]
        assert (record.steps_profiled, record.steps_packed, record.steps_padded) == (1, 1, 0)
        assert handles.armed(model)
    finally:
        handle.restore()


def test_a_diffusion_model_that_takes_what_frozen_parts_give_is_told_to_keep_that() -> None:
    diffusers = pytest.importorskip("diffusers")
    unet = diffusers.UNet2DConditionModel(
        down_block_types=("CrossAttnDownBlock2D",),
        up_block_types=("CrossAttnUpBlock2D",),
        mid_block_type=None,
        block_out_channels=(8,),
        attention_head_dim=2,
        layers_per_block=1,
        norm_num_groups=4,
        sample_size=8,
        cross_attention_dim=8,
    ).train()
    latents, steps, text = torch.randn(2, 4, 8, 8), torch.tensor([1, 2]), torch.randn(2, 3, 8)

    def advice(*given: Any) -> Any:
        return explain(unet, *given, options=EAGER).to_json()["advice"]

    [told] = advice(latents, steps, text)
    assert "Latents and text embeddings" in told
    assert "by hand" in str(explain(unet, latents, steps, text, options=EAGER))
    assert advice(latents, steps, text.requires_grad_()) == []  # of a text encoder that is trained
    assert advice(latents, steps, None) == []
    unet.eval()
    assert advice(latents, steps, text.detach()) == []
