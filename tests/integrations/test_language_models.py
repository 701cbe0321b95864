"""Vision- and audio-language models: the language model inside is compiled and packed, with eager's numbers."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import transformers as hf

import deepytorch
from deepytorch.compiler.report import LEDGER
from deepytorch.integrations.language_models import language_model_of

VOCAB, IMAGE, STEPS = 96, 90, 5
TEXT = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128}  # fmt: skip
Batch = dict[str, torch.Tensor]


@pytest.fixture(autouse=True)
def nothing_known_of_other_tests() -> Iterator[None]:
    LEDGER.forget()
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def llava() -> Any:
    tower = hf.CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    config = hf.LlavaConfig(vision_config=tower, text_config=hf.LlamaConfig(**TEXT), image_token_id=IMAGE)
    return hf.LlavaForConditionalGeneration(config)


def qwen2_vl() -> Any:
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    tower = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    config = hf.Qwen2VLConfig(
        text_config={**TEXT, "rope_parameters": rope, "bos_token_id": 1, "eos_token_id": 2},
        vision_config={**tower, "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_token_id=IMAGE, video_token_id=91, vision_start_token_id=92, vision_end_token_id=93,
    )  # fmt: skip
    return hf.Qwen2VLForConditionalGeneration(config)


def gemma3() -> Any:
    tower = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    layers = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 5, "head_dim": 8}
    config = hf.Gemma3Config(
        text_config={**TEXT, **layers, "pad_token_id": 0}, vision_config={**tower, "image_size": 16, "patch_size": 8},
        image_token_id=IMAGE, mm_tokens_per_image=4, boi_token_index=92, eoi_token_index=93,
    )  # fmt: skip
    return hf.Gemma3ForConditionalGeneration(config)


def whisper() -> Any:
    sides = {"layers": 1, "attention_heads": 4, "ffn_dim": 64}
    widths: dict[str, Any] = {f"{side}_{name}": size for side in ("encoder", "decoder") for name, size in sides.items()}
    widths |= {"d_model": 32, "num_mel_bins": 8, "max_source_positions": 20, "max_target_positions": 64}
    ids = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    return hf.WhisperForConditionalGeneration(hf.WhisperConfig(vocab_size=VOCAB, dropout=0.0, **widths, **ids))


def batch_of(build: Callable[[], Any], step: int) -> Batch:
    """Rows of 10 to 22 tokens with an image of four tokens each, but for a row without one in every other step."""
    generator = torch.Generator().manual_seed(step)
    width = 16 + 2 * (step % 4)
    lengths = torch.randint(10, width, (4,), generator=generator)
    lengths[step % 4] = width
    mask = (torch.arange(width) < lengths[:, None]).long()
    if step % 3 == 1:
        mask = mask.flip(1)
    ids = torch.randint(3, 88, (4, width), generator=generator) * mask
    labels = ids.masked_fill(mask == 0, -100)
    if build is whisper:
        sounds = torch.randn(4, 8, 40, generator=generator)
        given = {"decoder_input_ids": ids, "decoder_attention_mask": mask, "labels": labels}
        return {"input_features": sounds, **given}
    with_image = [row for row in range(4) if row != 3 or step % 2 == 0]
    for row in with_image:
        at = int(mask[row].argmax())
        ids[row, at : at + 6] = torch.tensor([92, *[IMAGE] * 4, 93])
        labels[row, at : at + 6] = -100
    labels[:, 1:][mask[:, :-1] == 0] = -100
    found = {"input_ids": ids, "attention_mask": mask, "labels": labels}
    if build is gemma3:
        found["token_type_ids"] = (ids == IMAGE).long()
    if build in (llava, gemma3):
        return {**found, "pixel_values": torch.randn(len(with_image), 3, 16, 16, generator=generator)}
    return {
        **found,
        "pixel_values": torch.randn(len(with_image) * 16, 3 * 2 * 4 * 4, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 4]] * len(with_image)),
        "mm_token_type_ids": (ids == IMAGE).long(),
    }


def train(
    model: Any, build: Callable[[], Any], make: Callable[..., Batch] = batch_of
) -> tuple[list[float], dict[str, torch.Tensor]]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for step in range(STEPS):
        loss = model(**make(build, step)).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: each.grad for name, each in model.named_parameters() if each.grad is not None}


@pytest.mark.parametrize("build", [llava, qwen2_vl], ids=lambda build: build.__name__)
def test_text_with_images_in_it_is_packed_with_eagers_losses_and_gradients(build: Callable[[], Any]) -> None:
    torch.manual_seed(0)
    model = build().train()
    reference = copy.deepcopy(model)
    with deepytorch.paused():
        expected, gradients = train(reference, build)
    handle = deepytorch.optimize(model, options={"lowering": "eager"})
    found, ours = train(model, build)
    handle.restore()
    assert found == pytest.approx(expected, rel=1e-5)
    assert ours.keys() == gradients.keys()
    assert any("vis" in name for name in ours)  # the tower is trained, too
    for name, each in ours.items():
        torch.testing.assert_close(each, gradients[name], rtol=1e-3, atol=1e-5)
    [record] = LEDGER.report().regions
    assert (record.steps_packed, record.steps_padded) == (STEPS - 1, 0), record


def without_images(batch: Batch) -> Batch:
    return {name: each * (each != IMAGE) for name, each in batch.items() if name != "pixel_values"} | {
        "token_type_ids": torch.zeros_like(batch["input_ids"])
    }


@pytest.mark.slow
def test_a_model_that_makes_the_masks_inside_is_compiled_whole() -> None:
    """Gemma 3's batches of text alone are packed; those with images, whose parts see each other, run padded."""
    torch.manual_seed(0)
    model = gemma3().train()
    reference = copy.deepcopy(model)

    def some_with_images(build: Callable[[], Any], step: int) -> Batch:
        return batch_of(build, step) if step == 3 else without_images(batch_of(build, step))

    with deepytorch.paused():
        expected, gradients = train(reference, gemma3, some_with_images)
    handle = deepytorch.optimize(model, options={"lowering": "eager"})
    found, ours = train(model, gemma3, some_with_images)
    handle.restore()
    assert found == pytest.approx(expected, rel=1e-5)
    assert ours.keys() == gradients.keys()
    for name, each in ours.items():
        torch.testing.assert_close(each, gradients[name], rtol=1e-3, atol=1e-5)
    report = LEDGER.report()
    assert report.total("steps_packed") == STEPS - 2, report  # but for the first, which is watched, and the images


def test_whispers_decoder_is_packed_where_no_frame_is_read() -> None:
    torch.manual_seed(0)
    model = whisper().train()
    reference = copy.deepcopy(model)
    with deepytorch.paused():
        expected, gradients = train(reference, whisper)
    handle = deepytorch.optimize(model, options={"lowering": "eager"})
    found, ours = train(model, whisper)
    handle.restore()
    assert found == pytest.approx(expected, rel=1e-5)
    for name, each in ours.items():
        torch.testing.assert_close(each, gradients[name], rtol=1e-3, atol=1e-5)
    [record] = LEDGER.report().regions
    assert record.steps_packed > 0, record


def test_the_language_model_is_found_below_adapters_and_nowhere_else() -> None:
    peft = pytest.importorskip("peft")
    model = llava()
    inside = model.model.language_model
    assert language_model_of(gemma3()) is None  # which makes the masks of its own
    assert language_model_of(model) is inside
    assert language_model_of(inside) is None
    assert language_model_of(torch.nn.ModuleList([model])) is None
    assert language_model_of(hf.LlamaForCausalLM(hf.LlamaConfig(**TEXT))) is None
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=2, target_modules=["q_proj"]))
    assert language_model_of(adapted) is inside
