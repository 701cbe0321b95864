"""LoRA on the language model of a vision-language model: in one process, and under DistributedDataParallel."""

import torch
import torch.distributed as dist
from peft import LoraConfig, get_peft_model
from tiny import SPECIAL, WIDTHS, batch, case, chosen, train
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

IMAGE = 95


def adapted(model):
    layers = r".*language_model.*\.(q_proj|v_proj|down_proj)"
    return get_peft_model(model.train(), LoraConfig(r=4, init_lora_weights=False, target_modules=layers))


def llava():
    tower = CLIPVisionConfig(
        hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, image_size=16, patch_size=8
    )
    text = LlamaConfig(**WIDTHS, **SPECIAL, num_key_value_heads=2)
    return LlavaForConditionalGeneration(LlavaConfig(vision_config=tower, text_config=text, image_token_id=IMAGE))


def qwen2_vl():
    rope = {"rope_type": "default", "mrope_section": [1, 1, 2], "rope_theta": 10000.0}
    tower = {"depth": 2, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "mlp_ratio": 2, "patch_size": 4}
    config = Qwen2VLConfig(
        text_config={**WIDTHS, **SPECIAL, "num_key_value_heads": 2, "rope_parameters": rope},
        vision_config={**tower, "spatial_merge_size": 2, "temporal_patch_size": 2},
        image_token_id=IMAGE, video_token_id=94, vision_start_token_id=93, vision_end_token_id=92,
    )  # fmt: skip
    return Qwen2VLForConditionalGeneration(config)


def with_images(step):
    """A batch whose rows begin with a token, an image of four tokens, and the end of it."""
    ids, mask, labels = batch(step, length=14 + step % 5)
    ids, mask = ids % 90 + mask, mask.clone()
    mask[:, :8] = 1
    ids[:, 1:7] = torch.tensor([93, *[IMAGE] * 4, 92])
    return ids, mask, labels.masked_fill((ids > 90) | (mask == 0), -100)


def of_llava(model, ids, mask, labels):
    pixels = torch.randn(len(ids), 3, 16, 16, generator=torch.Generator().manual_seed(int(ids.sum())))
    yield model(input_ids=ids, attention_mask=mask, labels=labels, pixel_values=pixels).loss
    yield from (each.grad.norm().item() for each in model.parameters() if each.grad is not None)


def of_qwen2_vl(model, ids, mask, labels):
    pixels = torch.randn(len(ids) * 16, 3 * 2 * 4 * 4, generator=torch.Generator().manual_seed(int(ids.sum())))
    images = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 4, 4]] * len(ids))}
    kinds = (ids == IMAGE).long()
    yield model(input_ids=ids, attention_mask=mask, labels=labels, mm_token_type_ids=kinds, **images).loss
    yield from (each.grad.norm().item() for each in model.parameters() if each.grad is not None)


@case(expect="packed")
def lora_qwen2_vl():
    """Positions in three dimensions."""
    return train(adapted(qwen2_vl()), of_qwen2_vl, batches=with_images)


@case(expect="packed", ranks=2)
def ddp_lora_llava():
    """Two ranks, each with rows of its own."""
    dist.init_process_group("gloo")
    model = DistributedDataParallel(adapted(llava()))
    history = train(model, of_llava, batches=lambda step: with_images(step + 10 * dist.get_rank()))
    dist.destroy_process_group()
    return history


torch.manual_seed(0)
history = chosen()()
