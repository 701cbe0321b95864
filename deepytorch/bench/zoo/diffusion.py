"""The UNet of Stable Diffusion 2.1 in a step of dreambooth (Ruiz et al. 2022), from latents that are there already."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepytorch.bench.zoo.workload import Workload
from deepytorch.errors import ConfigError

_TRAINED_STEPS = 1000  # of the noise schedule
_BETAS = (0.00085, 0.012)  # its ends; the square roots lie on a line


def workload(size: str) -> Workload:
    """Return the UNet under the loss of denoising (Ho et al. 2020). size: as for `build_workload`.

    Raises `ConfigError` if diffusers is not installed.
    """
    full = size == "full"
    pixels, words = (64, 1024) if full else (32, 256)
    settings: dict[str, Any] = {
        "sample_size": pixels,
        "in_channels": 4,
        "out_channels": 4,
        "layers_per_block": 2,
        "block_out_channels": (320, 640, 1280, 1280) if full else (64, 128, 256, 256),
        "attention_head_dim": (5, 10, 20, 20) if full else (1, 2, 4, 4),
        "cross_attention_dim": words,
        "use_linear_projection": True,
    }
    model = _Denoising(_unet_class()(**settings))

    def batches(rows: int, seed: int, count: int) -> list[dict[str, Tensor]]:
        generator = torch.Generator().manual_seed(seed)
        return [
            {
                "latents": torch.randn(rows, 4, pixels, pixels, generator=generator),
                "noise": torch.randn(rows, 4, pixels, pixels, generator=generator),
                "steps": torch.randint(0, _TRAINED_STEPS, (rows,), generator=generator),
                "text": torch.randn(rows, 77, words, generator=generator),
            }
            for _ in range(count)
        ]

    return Workload(model, batches, 5 if full else 3)


def _unet_class() -> Any:
    try:
        from diffusers import UNet2DConditionModel
    except ImportError as error:
        raise ConfigError(
            "diffusers is not installed, and sd_unet comes from it. Install it with: pip install 'deepytorch[bench]'"
        ) from error
    return UNet2DConditionModel


class _Denoising(nn.Module):
    kept: Tensor

    def __init__(self, unet: nn.Module) -> None:
        super().__init__()
        self.unet = unet
        betas = torch.linspace(_BETAS[0] ** 0.5, _BETAS[1] ** 0.5, _TRAINED_STEPS) ** 2
        self.register_buffer("kept", (1.0 - betas).cumprod(0), persistent=False)  # of the signal, at each step

    def forward(self, latents: Tensor, noise: Tensor, steps: Tensor, text: Tensor) -> Tensor:
        """Return the mean squared error of the noise that the UNet finds. text: (rows, words, hidden)."""
        kept = self.kept[steps][:, None, None, None]
        noisy = kept.sqrt() * latents + (1.0 - kept).sqrt() * noise
        return F.mse_loss(self.unet(noisy, steps, text).sample.float(), noise)
