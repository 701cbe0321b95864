"""Models for speech: recognition from spectrograms, and the encoder of a speaker's voice."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deepytorch.bench.zoo.workload import Workload

_FEATURES = 320  # of a frame: 80 mel bands of 4 frames that were stacked
_LETTERS = 4_232  # the characters of AISHELL-1, which the published recipe learns
_MELS = 40
_UTTERANCES = 4  # of each speaker in a batch


def workload(name: str, size: str) -> Workload:
    """Return one of these models. size: as for `build_workload`."""
    full = size == "full"
    if name == "tts_angular":
        return Workload(_SpeakerEncoder(768 if full else 192, 256 if full else 64), _voices, 64 if full else 32)
    hidden, layers = (512, 6) if full else (128, 6)
    return Workload(_SpeechTransformer(hidden, 8 if full else 2, layers), _speech, 32 if full else 16)


def _speech(rows: int, seed: int, count: int) -> list[dict[str, Tensor]]:
    """Return spectrograms (rows, frames, features) of 1.2 to 12 seconds, as in AISHELL-1, and their characters.

    A stacked frame is 30 ms long, and somebody reads about four characters a second.
    """
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(count):
        frames = (torch.randn(rows, generator=generator) * 45 + 145).clamp(40, 400).long()
        letters = (frames * 0.12).long().clamp(min=3)
        spectrogram = torch.randn(rows, int(frames.max()), _FEATURES, generator=generator)
        spectrogram[torch.arange(spectrogram.shape[1]) >= frames[:, None]] = 0.0
        text = torch.randint(1, _LETTERS, (rows, int(letters.max())), generator=generator)
        text[torch.arange(text.shape[1]) >= letters[:, None]] = -100
        found.append({"spectrogram": spectrogram, "num_frames": frames, "text": text})
    return found


class _SpeechTransformer(nn.Module):
    """The Speech-Transformer of Dong et al. 2018: attention over frames, attention over characters, and across."""

    angles: Tensor

    def __init__(self, hidden: int, heads: int, layers: int) -> None:
        super().__init__()
        self.enter, self.norm = nn.Linear(_FEATURES, hidden), nn.LayerNorm(hidden)
        self.encoder = nn.ModuleList(_Layer(hidden, heads, crosses=False) for _ in range(layers))
        self.embedding = nn.Embedding(_LETTERS + 1, hidden)  # the last one begins a sentence
        self.decoder = nn.ModuleList(_Layer(hidden, heads, crosses=True) for _ in range(layers))
        self.head = nn.Linear(hidden, _LETTERS, bias=False)
        self.register_buffer("angles", _angles(1024, hidden), persistent=False)

    def forward(self, spectrogram: Tensor, num_frames: Tensor, text: Tensor) -> Tensor:
        """Return the loss. Shapes: (rows, frames, features), (rows,), (rows, letters) with -100 behind the end."""
        heard = torch.arange(spectrogram.shape[1], device=text.device) < num_frames[:, None]
        frames = self.norm(self.enter(spectrogram)) + self.angles[: spectrogram.shape[1]]
        for layer in self.encoder:
            frames = layer(frames, heard[:, None, None, :])
        written = text != -100
        causal = torch.ones(text.shape[1], text.shape[1], dtype=torch.bool, device=text.device).tril()
        before = F.pad(text.masked_fill(~written, 0)[:, :-1], (1, 0), value=_LETTERS)
        letters = self.embedding(before) * math.sqrt(self.embedding.embedding_dim) + self.angles[: text.shape[1]]
        for layer in self.decoder:
            letters = layer(letters, causal & written[:, None, None, :], frames, heard[:, None, None, :])
        return F.cross_entropy(self.head(letters).flatten(0, 1), text.flatten(), ignore_index=-100, label_smoothing=0.1)


class _Layer(nn.Module):
    """A layer with its norms behind the sums, as in Vaswani et al. 2017."""

    def __init__(self, hidden: int, heads: int, *, crosses: bool) -> None:
        super().__init__()
        self.attention = _Attention(hidden, heads)
        self.across = _Attention(hidden, heads) if crosses else None
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.ReLU(), nn.Linear(4 * hidden, hidden))
        self.norms = nn.ModuleList(nn.LayerNorm(hidden) for _ in range(3 if crosses else 2))

    def forward(
        self, x: Tensor, mask: Tensor, memory: Tensor | None = None, memory_mask: Tensor | None = None
    ) -> Tensor:
        x = self.norms[0](x + self.attention(x, x, mask))
        if self.across is not None and memory is not None and memory_mask is not None:
            x = self.norms[1](x + self.across(x, memory, memory_mask))
        return self.norms[-1](x + self.mlp(x))


class _Attention(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(hidden, hidden) for _ in range(4))

    def forward(self, x: Tensor, memory: Tensor, mask: Tensor) -> Tensor:
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k = self.key(memory).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        v = self.value(memory).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        found = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        return self.out(found.transpose(1, 2).flatten(2))


def _angles(positions: int, hidden: int) -> Tensor:
    """Return the sines and cosines of positions, (positions, hidden), of Vaswani et al. 2017."""
    steps = torch.exp(torch.arange(0, hidden, 2) * (-math.log(10_000.0) / hidden))
    turned = torch.arange(positions)[:, None] * steps
    return torch.stack([turned.sin(), turned.cos()], dim=-1).flatten(1)


# ---------------------------------------------------------------------- voices


def _voices(rows: int, seed: int, count: int) -> list[dict[str, Tensor]]:
    """Return mel spectrograms (rows, frames, bands) of 1.6 seconds; rows of one speaker follow each other."""
    generator = torch.Generator().manual_seed(seed)
    return [{"mels": torch.randn(rows, 160, _MELS, generator=generator)} for _ in range(count)]


class _SpeakerEncoder(nn.Module):
    """The encoder of Wan et al. 2018 under the angular prototypical loss of Chung et al. 2020."""

    def __init__(self, hidden: int, projected: int) -> None:
        super().__init__()
        sizes = (_MELS, projected, projected)
        self.cells = nn.ModuleList(nn.LSTM(size, hidden, batch_first=True) for size in sizes)
        self.projections = nn.ModuleList(nn.Linear(hidden, projected, bias=False) for _ in sizes)
        self.scale, self.offset = nn.Parameter(torch.tensor(10.0)), nn.Parameter(torch.tensor(-5.0))

    def forward(self, mels: Tensor) -> Tensor:
        """Return the loss of spectrograms (rows, frames, bands)."""
        for cells, projection in zip(self.cells, self.projections, strict=True):
            mels = projection(cells(mels)[0])
        voices = F.normalize(mels[:, -1], dim=1).unflatten(0, (-1, _UTTERANCES))  # (speakers, utterances, projected)
        prototypes = F.normalize(voices[:, 1:].mean(1), dim=1)
        similar = voices[:, 0] @ prototypes.T * self.scale.clamp(min=1e-6) + self.offset
        return F.cross_entropy(similar, torch.arange(similar.shape[0], device=similar.device))
