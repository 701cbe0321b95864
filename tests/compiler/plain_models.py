"""A small transformer as a user would write it; how it attends and what it is trained on are given."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

HEADS, DIM, VOCAB = 4, 32, 96
Attend = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
SIZES = ((4, 11, "right"), (3, 13, "left"), (5, 9, "holes"), (4, 8, "one"))


class Block(nn.Module):
    def __init__(self, attend: Attend) -> None:
        super().__init__()
        self.attend = attend
        self.before, self.after = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, positions, _ = x.shape
        q, k, v = (
            self.qkv(self.before(x)).view(rows, positions, 3, HEADS, DIM // HEADS).permute(2, 0, 3, 1, 4).unbind(0)
        )
        attended = self.attend(q, k, v, mask)
        x = x + self.out(attended.transpose(1, 2).reshape(rows, positions, DIM))
        return x + self.down(F.gelu(self.up(self.after(x))))


class Plain(nn.Module):
    """A transformer of `layers` blocks; `loss` makes of the last hidden state what is trained."""

    def __init__(
        self,
        attend: Attend,
        loss: Callable[..., Any] | None = None,
        outputs: int = VOCAB,
        places: int = 64,
        layers: int = 2,
    ) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(VOCAB, DIM), nn.Embedding(places, DIM)
        self.blocks = nn.ModuleList(Block(attend) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, outputs)
        self.loss = loss or token_loss

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor, labels: torch.Tensor) -> Any:
        x = self.tokens(input_ids) + self.places(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x, attention_mask)
        return self.loss(self, self.norm(x), attention_mask, labels)


def token_loss(model: Any, x: torch.Tensor, mask: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model.head(x).view(-1, VOCAB), labels.view(-1))


def scaled(q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
    return q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])


def keys(mask: torch.Tensor) -> torch.Tensor:
    return mask[:, None, None, :].bool()


def attended(q: Any, k: Any, v: Any, seen: Any) -> torch.Tensor:
    """Attention spelled out: a low number where a key is not seen, so that a row of pads is not NaN."""
    return scaled(q, k).masked_fill(~seen, -1e9).softmax(-1) @ v


def distance(q: torch.Tensor) -> torch.Tensor:
    """How many positions (queries, keys) a key stands before its query; negative behind it."""
    places = torch.arange(q.shape[-2], device=q.device)
    return places[:, None] - places


def sdpa_bool(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=keys(mask))


def filled(q: Any, k: Any, v: Any, mask: Any) -> torch.Tensor:
    return attended(q, k, v, keys(mask))
