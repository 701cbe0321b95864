"""What mixes positions besides attention, as a script writes it: shifts, sums, convolutions, means."""

from __future__ import annotations

REAL = "real = attention_mask[..., None].to(x.dtype)"
MIXERS = {
    "token shift": "x = x + 0.1 * F.pad(x, (0, 0, 1, -1))",
    "running sum": "x = x + 0.1 * x.cumsum(1)",
    "convolution": "x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)",
    "mean of the row": "x = x + x.mean(1, keepdim=True)",
    "masked mean of the row": (
        f"{REAL}\nx = x + (x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)"
    ),
    "first position": "x = x + 0.5 * x[:, :1]",
    "batch norm": "x = x + self.mix(x.flatten(0, 1)).view(x.shape)",
    "softmax over positions": "x = x + x * x.softmax(1)",
    "flipped": "x = x + 0.1 * x.flip(1)",
    "mean over rows": "x = x + 0.1 * x.mean(0, keepdim=True)",
    "learned token shift": "x = x * self.mix + F.pad(x, (0, 0, 1, -1)) * (1 - self.mix)",
    "token shift of tokens": f"{REAL}\nx = x + 0.1 * F.pad(x * real, (0, 0, 1, -1))",
    "running sum of tokens": f"{REAL}\nx = x + 0.1 * (x * real).cumsum(1)",
    "running mean": "x = x + x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]",
    "causal convolution": "x = x + self.mix(F.pad(x.transpose(1, 2), (2, 0))).transpose(1, 2)",
    "causal convolution of tokens": (
        f"{REAL}\nx = x + F.silu(self.mix(F.pad((x * real).transpose(1, 2), (2, 0)))).transpose(1, 2) * real"
    ),
}
MIXER_PARTS = {
    "convolution": "nn.Conv1d(DIM, DIM, 3, padding=1)",
    "batch norm": "nn.BatchNorm1d(DIM)",
    "learned token shift": "nn.Parameter(torch.rand(DIM))",
    "causal convolution": "nn.Conv1d(DIM, DIM, 3, groups=DIM)",
    "causal convolution of tokens": "nn.Conv1d(DIM, DIM, 3, groups=DIM)",
}
