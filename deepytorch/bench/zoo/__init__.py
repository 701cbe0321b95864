"""The models of this field's tables, with random weights, and batches for them: nothing is downloaded.

These are the eleven models of PyTorch's data-parallel benchmark that ACSpeed's table is of, the UNet of Stable
Diffusion, and language models of the sizes that people train. Each is written here or made from a library's
configuration.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from deepytorch.errors import ConfigError

if TYPE_CHECKING:
    from deepytorch.bench.zoo.workload import Workload

SIZES = ("cpu", "full")
TEXT_SIZES = ("tiny", "quarter", "demo", "small", "base", "large")  # of `bench.models`, for language models
VISION = ("alexnet", "resnet18", "resnet50", "vgg16", "timm_vovnet", "timm_vision_transformer", "pytorch_unet")
TEXT = ("hf_Bart", "hf_Bert", "llama")
SPEECH = ("speech_transformer", "tts_angular")
DIFFUSION = ("sd_unet",)
LANGUAGE = ("gpt2", "bert_512", "gpt_1.3b", "llama2_13b", "qwen2_14b", "llama_65b")
MODELS = (*VISION, *TEXT, *SPEECH, *DIFFUSION)  # one of each kind


def build_workload(name: str, size: str = "cpu", seed: int = 0, data: Path | None = None) -> Workload:
    """Return a model in training mode, and a maker of batches for it.

    Args:
        name: The model, one of `MODELS` or of `LANGUAGE`.
        size: "full" as published, "cpu" with a quarter of the width; for language models one of `TEXT_SIZES`, too.
        seed: Of the weights.
        data: A file in Alpaca layout for the text of models that learn from text; None: the documentation of installed
            libraries.

    Raises `ConfigError` for an unknown name or size, or if a library that the model comes from is not installed.
    """
    if name not in (*MODELS, *LANGUAGE):
        raise ConfigError(f'The model is "{name}", expected one of {", ".join((*MODELS, *LANGUAGE))}.')
    sizes = SIZES + TEXT_SIZES if name in TEXT + LANGUAGE else SIZES
    if size not in sizes:
        raise ConfigError(f'The model size is "{size}", expected one of {", ".join(sizes)}.')
    from deepytorch.bench.zoo.workload import seeded  # loads torch, which names of models need not

    with seeded(seed):
        found = _build(name, size, seed, data)
    found.model.train()
    return found


def _build(name: str, size: str, seed: int, data: Path | None) -> Workload:
    if name in VISION:
        from deepytorch.bench.zoo import vision

        return vision.workload(name, size)
    if name in TEXT + LANGUAGE:
        from deepytorch.bench.zoo import text

        return text.workload(name, size, seed, data)
    if name in SPEECH:
        from deepytorch.bench.zoo import speech

        return speech.workload(name, size)
    from deepytorch.bench.zoo import diffusion

    return diffusion.workload(size)
