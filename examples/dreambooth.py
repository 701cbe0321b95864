"""DreamBooth (Ruiz et al. 2022): a diffusion model learns a subject from a few pictures, five of them a step.

    pip install -e '.[bench,hosts]' && python examples/dreambooth.py
    python examples/dreambooth.py --pretrained PATH --pictures FOLDER --prompt "a photo of sks dog" --precision bf16

The one line that is ours is the import. Without `--pretrained` the models are small, with random weights, and so are
the pictures: a CPU trains them in a minute, and nothing is downloaded. PATH is a folder of diffusers, such as one of
Stable Diffusion 1.5 or 2.1. `DEEPYTORCH=off` in the environment runs the same script without us.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import deepytorch  # the one line

import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from peft import LoraConfig
from PIL import Image
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

BATCH_SIZE = 5
NUM_PICTURES = 20  # that are made where no folder has any
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass
class Pipeline:
    """The parts of a latent diffusion model. ids: of the prompt, (1, words)."""

    unet: Any
    vae: Any
    text_encoder: Any
    schedule: Any
    ids: Tensor
    pixels: int  # of a picture's side


def small_pipeline() -> Pipeline:
    """Return a pipeline with the layers of Stable Diffusion 2.1 at a tenth of its width, with random weights."""
    unet = UNet2DConditionModel(
        sample_size=16, block_out_channels=(32, 64), attention_head_dim=(2, 4), cross_attention_dim=64,
        layers_per_block=1, use_linear_projection=True,
        down_block_types=("CrossAttnDownBlock2D", "DownBlock2D"), up_block_types=("UpBlock2D", "CrossAttnUpBlock2D"),
    )  # fmt: skip
    sides = {"down_block_types": ("DownEncoderBlock2D",) * 3, "up_block_types": ("UpDecoderBlock2D",) * 3}
    vae = AutoencoderKL(block_out_channels=(16, 32, 32), norm_num_groups=8, latent_channels=4, **sides)
    words = CLIPTextConfig(
        vocab_size=1000, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
        bos_token_id=998, eos_token_id=999, pad_token_id=999,
    )  # fmt: skip
    ids = torch.full((1, words.max_position_embeddings), 999)
    ids[0, :6] = torch.tensor([998, 320, 1, 539, 7, 42])
    return Pipeline(unet, vae, CLIPTextModel(words), DDPMScheduler(), ids, pixels=64)


def pretrained_pipeline(path: str, prompt: str) -> Pipeline:
    """Return the pipeline in a folder of diffusers."""
    tokenizer = CLIPTokenizer.from_pretrained(path, subfolder="tokenizer")
    unet = UNet2DConditionModel.from_pretrained(path, subfolder="unet")
    vae = AutoencoderKL.from_pretrained(path, subfolder="vae")
    return Pipeline(
        unet,
        vae,
        CLIPTextModel.from_pretrained(path, subfolder="text_encoder"),
        DDPMScheduler.from_pretrained(path, subfolder="scheduler"),
        tokenizer(prompt, padding="max_length", max_length=77, truncation=True, return_tensors="pt").input_ids,
        pixels=unet.config.sample_size * 2 ** (len(vae.config.block_out_channels) - 1),
    )


def load_pictures(folder: str | None, pixels: int) -> Tensor:
    """Return pictures (pictures, 3, pixels, pixels) from -1 to 1: those of a folder, or discs of many colours."""
    if folder is not None:
        paths = sorted(each for each in Path(folder).iterdir() if each.suffix in (".jpg", ".jpeg", ".png"))
        opened = [Image.open(path).convert("RGB").resize((pixels, pixels)) for path in paths]
        return torch.stack([torch.tensor(np.asarray(each)).permute(2, 0, 1) / 127.5 - 1.0 for each in opened])
    places = torch.linspace(-1.0, 1.0, pixels)
    distance = (places[:, None].square() + places.square()).sqrt()
    colours = torch.rand(NUM_PICTURES, 3, 1, 1, generator=torch.Generator().manual_seed(0)) * 2.0 - 1.0
    return torch.where(distance < 0.6, colours, -colours)


def shuffled(pictures: Tensor, steps: int) -> Iterator[Tensor]:
    """Yield the places of each step's pictures, (5,)."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        yield torch.randperm(len(pictures), generator=generator)[:BATCH_SIZE]


def add_lora(module: Any, *layers: str) -> None:
    """Freeze a model, and add adapters of rank 4 to its layers of these names."""
    module.requires_grad_(requires_grad=False)
    module.add_adapter(LoraConfig(r=4, lora_alpha=4, init_lora_weights="gaussian", target_modules=list(layers)))


def train(pipeline: Pipeline, pictures: Tensor, options: argparse.Namespace) -> list[float]:
    """Train for `options.steps` steps; return their losses."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    unet, vae, text_encoder = (each.to(device) for each in (pipeline.unet, pipeline.vae, pipeline.text_encoder))
    vae.requires_grad_(requires_grad=False).eval()
    text_encoder.requires_grad_(options.train_text_encoder).train(options.train_text_encoder)
    if options.lora:
        add_lora(unet, "to_q", "to_k", "to_v", "to_out.0")
        if options.train_text_encoder:
            add_lora(text_encoder, "q_proj", "k_proj", "v_proj", "out_proj")
    if options.gradient_checkpointing:
        unet.enable_gradient_checkpointing()
    unet.train()
    trained = [each for part in (unet, text_encoder) for each in part.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.learning_rate)
    scaler = torch.amp.GradScaler(device.type, enabled=options.precision == "fp16")  # type: ignore[attr-defined]
    pictures, ids = pictures.to(device), pipeline.ids.to(device)
    dtype = DTYPES[options.precision]

    def encoded(chosen: Tensor) -> tuple[Tensor, Tensor]:
        """Return mean and deviation of the pictures' latents, each (pictures, 4, latent side, latent side)."""
        with torch.no_grad():
            found = vae.encode(chosen).latent_dist
        return found.mean, found.std

    def reduced() -> Any:
        return nullcontext() if dtype is torch.float32 else torch.autocast(device.type, dtype)

    kept, words = None, None
    if options.cache_latents:  # frozen parts give the same for the same pictures and prompt: once is enough
        with reduced():
            parts = [encoded(each) for each in pictures.split(BATCH_SIZE)]
            kept = [torch.cat(each) for each in zip(*parts, strict=True)]
            if not options.train_text_encoder:
                with torch.no_grad():
                    words = text_encoder(ids).last_hidden_state
        del vae
    losses = []
    for step, places in enumerate(shuffled(pictures, options.steps)):
        start = time.perf_counter()
        with reduced():
            mean, deviation = encoded(pictures[places]) if kept is None else (each[places] for each in kept)
            latents = (mean + deviation * torch.randn_like(mean)) * pipeline.vae.config.scaling_factor
            noise = torch.randn_like(latents)
            times = torch.randint(0, pipeline.schedule.config.num_train_timesteps, (len(places),), device=device)
            noisy = pipeline.schedule.add_noise(latents, noise, times)
            if words is None:
                with torch.set_grad_enabled(options.train_text_encoder):
                    text = text_encoder(ids).last_hidden_state
            else:
                text = words
            found = unet(noisy, times, text.expand(len(places), -1, -1)).sample
        if pipeline.schedule.config.prediction_type == "v_prediction":
            noise = pipeline.schedule.get_velocity(latents, noise, times)
        loss = F.mse_loss(found.float(), noise.float())
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        print(f"step {step}: loss {losses[-1]:.4f}, {time.perf_counter() - start:.2f} s")
    return losses


def parsed(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the options of the command line, or of `arguments`."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--pretrained", help="a folder of diffusers; small random models without it")
    parser.add_argument("--pictures", help="a folder of pictures; discs of many colours without it")
    parser.add_argument("--prompt", default="a photo of sks dog", help="the words for the pictures")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--learning-rate", type=float, default=1e-4)
    parser.add_argument("--precision", choices=list(DTYPES), default="fp32")
    parser.add_argument("--train-text-encoder", action="store_true")
    parser.add_argument("--lora", action="store_true", help="train adapters of rank 4, and not the models themselves")
    parser.add_argument("--gradient-checkpointing", action="store_true", help="keep fewer activations, compute more")
    parser.add_argument("--cache-latents", action="store_true", help="run what is frozen once, before the first step")
    return parser.parse_args(arguments)


def main() -> None:
    """Train, and print what was done."""
    options = parsed()
    torch.manual_seed(0)
    pipeline = pretrained_pipeline(options.pretrained, options.prompt) if options.pretrained else small_pipeline()
    train(pipeline, load_pictures(options.pictures, pipeline.pixels), options)
    print(deepytorch.report())


if __name__ == "__main__":
    main()
