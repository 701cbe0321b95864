"""The models of the benchmarks: each trains a step, and has the weights of its paper."""

from __future__ import annotations

import importlib.util

import pytest
import torch

from deepytorch.bench.zoo import MODELS, build_workload
from deepytorch.errors import ConfigError

INSTALLED = [name for name in MODELS if name != "sd_unet" or importlib.util.find_spec("diffusers")]


@pytest.mark.slow
@pytest.mark.parametrize("name", INSTALLED)
def test_every_model_trains_a_step(name: str) -> None:
    workload = build_workload(name)
    [batch, another] = workload.batches(4, 0, 2)
    assert not all(torch.equal(batch[key], another[key]) for key in batch)
    loss = workload.model(**batch)
    loss.backward()
    assert loss.dim() == 0
    assert torch.isfinite(loss)
    assert all(parameter.grad is not None for parameter in workload.model.parameters())


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("alexnet", 61.101),
        ("resnet18", 11.690),
        ("resnet50", 25.557),
        ("vgg16", 138.358),
        ("timm_vovnet", 22.600),
        ("timm_vision_transformer", 22.051),
        ("pytorch_unet", 31.038),
    ],
)
def test_full_size_models_have_as_many_weights_as_published(name: str, millions: float) -> None:
    with torch.device("meta"):
        model = build_workload(name, "full").model
    assert sum(parameter.numel() for parameter in model.parameters()) / 1e6 == pytest.approx(millions, abs=1e-3)


def test_the_same_seed_gives_the_same_weights_and_batches() -> None:
    one, other, another = (
        build_workload("tts_angular"),
        build_workload("tts_angular"),
        build_workload("tts_angular", seed=1),
    )
    assert all(map(torch.equal, one.model.parameters(), other.model.parameters()))
    assert not all(map(torch.equal, one.model.parameters(), another.model.parameters()))
    assert torch.equal(one.batches(4, 3, 1)[0]["mels"], other.batches(4, 3, 1)[0]["mels"])


def test_spectrograms_are_padded_behind_their_last_frame() -> None:
    [batch] = build_workload("speech_transformer").batches(4, 0, 1)
    frames, letters = batch["num_frames"], (batch["text"] != -100).sum(1)
    for row in range(4):
        assert bool(batch["spectrogram"][row, : frames[row]].any(1).all())
        assert not bool(batch["spectrogram"][row, frames[row] :].any())
        assert bool((batch["text"][row, : letters[row]] > 0).all())
    assert int(frames.max()) == batch["spectrogram"].shape[1]


@pytest.mark.parametrize(
    ("name", "size", "words"),
    [("vgg17", "cpu", "expected one of alexnet, resnet18"), ("vgg16", "huge", "expected one of cpu, full")],
)
def test_unknown_names_are_refused(name: str, size: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_workload(name, size)
