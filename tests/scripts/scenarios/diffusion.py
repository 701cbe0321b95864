"""UNets of diffusers in steps of denoising: conditions, adapters, averages, checkpoints, and sizes that change."""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from diffusers.training_utils import EMAModel
from peft import LoraConfig
from tiny import TIMES, case, chosen, norms
from transformers import CLIPTextConfig, CLIPTextModel

SCHEDULE = DDPMScheduler()
BLOCKS = {
    "down_block_types": ("CrossAttnDownBlock2D", "DownBlock2D"), "up_block_types": ("UpBlock2D", "CrossAttnUpBlock2D"),
    "block_out_channels": (16, 32), "attention_head_dim": (2, 4), "layers_per_block": 1, "norm_num_groups": 8,
}  # fmt: skip


def unet(**changes):
    return UNet2DConditionModel(
        **{**BLOCKS, "sample_size": 16, "cross_attention_dim": 32, "use_linear_projection": True, **changes}
    ).train()


def batch(step, rows=5, side=16):
    """Noisy latents, the steps of the noise, the noise, and the text's hidden states."""
    generator = torch.Generator().manual_seed(100 + step)
    latents, noise = (torch.randn(rows, 4, side, side, generator=generator) for _ in range(2))
    times = torch.randint(0, 1000, (rows,), generator=generator)
    return SCHEDULE.add_noise(latents, noise, times), times, noise, torch.randn(rows, 12, 32, generator=generator)


def denoised(model, step, **given):
    noisy, times, noise, text = batch(step, **given)
    return F.mse_loss(model(noisy, times, text).sample.float(), noise)


def trained(model, loss_of, *others, steps=4, after=lambda: None):
    """Losses of each step, and the norms of weights in the end; after: what a script does behind each step."""
    parts = (model, *others)
    trained = [each for part in parts for each in part.parameters() if each.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    history = []
    for step in range(steps * TIMES):
        optimizer.zero_grad()
        loss = loss_of(model, step)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        after()
        history.append(loss.item())
    return [*history, *[norms(each) for each in parts]]


@case
def unet_of_sd():
    """A condition by cross-attention, the loss outside."""
    return trained(unet(), denoised)


@case
def unet_of_sdxl():
    """The text's pooled state and the picture's size are added to the time."""
    model = unet(
        addition_embed_type="text_time", addition_time_embed_dim=8, projection_class_embeddings_input_dim=6 * 8 + 24,
        transformer_layers_per_block=(2, 1),
    )  # fmt: skip

    def loss_of(model, step):
        noisy, times, noise, text = batch(step)
        added = {"text_embeds": text[:, 0, :24], "time_ids": torch.tensor([[1024.0, 1024, 0, 0, 1024, 1024]] * 5)}
        return F.mse_loss(model(noisy, times, text, added_cond_kwargs=added, return_dict=False)[0], noise)

    return trained(model, loss_of)


@case
def unet_with_checkpoints():
    """Blocks are computed again in the backward."""
    model = unet()
    model.enable_gradient_checkpointing()
    return trained(model, denoised)


@case
def unet_averaged():
    """An average of weights, kept by the side, is evaluated in the end."""
    model = unet()
    average = EMAModel(model.parameters(), decay=0.5)
    history = trained(model, denoised, after=lambda: average.step(model.parameters()))
    average.store(model.parameters())
    average.copy_to(model.parameters())
    with torch.no_grad():
        history.append(denoised(model, 0))
    average.restore(model.parameters())
    return [*history, norms(model)]


@case
def unet_with_lora():
    """Adapters at attention; the UNet itself is frozen."""
    model = unet().requires_grad_(requires_grad=False)
    model.add_adapter(LoraConfig(r=4, init_lora_weights=False, target_modules=["to_q", "to_k", "to_v", "to_out.0"]))
    return trained(model, denoised)


@case
def unet_and_text_encoder():
    """The text encoder learns too; a frozen autoencoder makes the latents."""
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    encoder = CLIPTextModel(CLIPTextConfig(vocab_size=96, **sizes)).train()
    sides = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    vae = AutoencoderKL(block_out_channels=(8, 8), norm_num_groups=4, **sides).requires_grad_(requires_grad=False)

    def loss_of(model, step):
        _, times, noise, _ = batch(step)
        pictures = torch.randn(5, 3, 32, 32, generator=torch.Generator().manual_seed(step))
        with torch.no_grad():
            latents = vae.encode(pictures).latent_dist.mode()
        text = encoder(torch.arange(12).remainder(7 + step % 3).expand(5, -1)).last_hidden_state
        return F.mse_loss(model(SCHEDULE.add_noise(latents, noise, times), times, text).sample, noise)

    return trained(unet(), loss_of, encoder)


@case(precision="bfloat16")
def unet_in_bf16():
    """Under autocast."""

    def loss_of(model, step):
        with torch.autocast("cpu", torch.bfloat16):
            return denoised(model, step)

    return trained(unet(), loss_of)


@case
def unet_of_uneven_batches():
    """The last batch of an epoch is smaller."""
    return trained(unet(), lambda model, step: denoised(model, step, rows=3 if step % 3 == 2 else 5))


def dreambooth(*options):
    """The example's own loop."""
    sys.path.append(str(Path(__file__).parents[3] / "examples"))
    import dreambooth

    pipeline, options = dreambooth.small_pipeline(), dreambooth.parsed([f"--steps={4 * TIMES}", *options])
    losses = dreambooth.train(pipeline, dreambooth.load_pictures(None, pipeline.pixels), options)
    return [*losses, norms(pipeline.unet), norms(pipeline.text_encoder)]


@case
def dreambooth_of_all():
    return dreambooth("--train-text-encoder")


@case
def dreambooth_of_adapters():
    return dreambooth("--lora", "--cache-latents", "--train-text-encoder")


@case(precision="bfloat16")
def dreambooth_in_bf16():
    return dreambooth("--precision=bf16", "--cache-latents", "--gradient-checkpointing")


@case(precision="float16")
def dreambooth_in_fp16():
    return dreambooth("--precision=fp16", "--cache-latents")


torch.manual_seed(0)
history = chosen()()
