"""The rest of a model as a script writes it: positions, norms, feed-forward, what mixes positions, the blocks."""

from __future__ import annotations

from textwrap import indent

from tests.fuzz.attention_source import seen_in_model
from tests.fuzz.grammar import Trial

NORMS = {
    "layer": "nn.LayerNorm(DIM)",
    "layer, behind": "nn.LayerNorm(DIM)",
    "rms": "RMSNorm()",
    "rms of torch": "nn.RMSNorm(DIM)",
    "none": "nn.Identity()",
}
RMS = """class RMSNorm(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(DIM))

    def forward(self, x):
        y = x.float() if x.dtype != torch.float64 else x
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)
        return self.weight * y.to(x.dtype)


"""
ROTARY = """def rotated(x, angles):
    one, other = x.chunk(2, -1)
    cos, sin = (each[:, None].to(x.dtype) for each in (angles.cos(), angles.sin()))
    return torch.cat([one * cos - other * sin, other * cos + one * sin], -1)


"""
FEED = {
    "gelu": (
        "self.up, self.down = nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)",
        "return self.down(F.gelu(self.up(x)))",
    ),
    "gated": (
        "self.up, self.gate = nn.Linear(DIM, WIDE, bias=False), nn.Linear(DIM, WIDE, bias=False)\n"
        "self.down = nn.Linear(WIDE, DIM, bias=False)",
        "return self.down(F.silu(self.gate(x)) * self.up(x))",
    ),
    "relu squared": (
        "self.up, self.down = nn.Linear(DIM, WIDE), nn.Linear(WIDE, DIM)",
        "return self.down(F.relu(self.up(x)) ** 2)",
    ),
    "all experts": (
        "self.router = nn.Linear(DIM, EXPERTS)\n"
        "self.up = nn.Parameter(torch.randn(EXPERTS, DIM, WIDE) * 0.2)\n"
        "self.down = nn.Parameter(torch.randn(EXPERTS, WIDE, DIM) * 0.2)",
        "weights = self.router(x).softmax(-1)\n"
        'y = F.gelu(torch.einsum("bsd,edw->bsew", x, self.up.to(x.dtype)))\n'
        'return torch.einsum("bsew,ewd,bse->bsd", y, self.down.to(y.dtype), weights.to(y.dtype))',
    ),
    "experts, chosen": (
        "self.router = nn.Linear(DIM, EXPERTS)\n"
        "self.up = nn.Parameter(torch.randn(EXPERTS, DIM, WIDE) * 0.2)\n"
        "self.down = nn.Parameter(torch.randn(EXPERTS, WIDE, DIM) * 0.2)",
        "scores, chosen = self.router(x).softmax(-1).topk(2, dim=-1)\n"
        "weights = torch.zeros(*x.shape[:-1], EXPERTS, dtype=scores.dtype).scatter(-1, chosen, scores)\n"
        'y = F.silu(torch.einsum("bsd,edw->bsew", x, self.up.to(x.dtype)))\n'
        'return torch.einsum("bsew,ewd,bse->bsd", y, self.down.to(y.dtype), weights.to(y.dtype))',
    ),
    "experts, sorted": (
        "self.router = nn.Linear(DIM, EXPERTS, bias=False)\n"
        "self.up = nn.Parameter(torch.randn(EXPERTS, DIM, WIDE) * 0.2)\n"
        "self.down = nn.Parameter(torch.randn(EXPERTS, WIDE, DIM) * 0.2)",
        "flat = x.reshape(-1, DIM)\n"
        "scores, chosen = self.router(flat).softmax(-1).topk(2, dim=-1)\n"
        "entries, order = chosen.reshape(-1).sort(stable=True)\n"
        "of_tokens = flat[order // 2]\n"
        "hidden = F.silu(torch.bmm(of_tokens[:, None], self.up[entries].to(flat.dtype)))\n"
        "found = torch.bmm(hidden, self.down[entries].to(hidden.dtype))[:, 0] * scores.reshape(-1)[order][:, None]\n"
        "back = torch.empty_like(order)\n"
        "back[order] = torch.arange(order.shape[0])\n"
        "return found[back].view(-1, 2, DIM).sum(1).view(x.shape).to(x.dtype)",
    ),
    "experts in a loop": (
        "self.router = nn.Linear(DIM, EXPERTS)\n"
        "self.experts = nn.ModuleList(nn.Linear(DIM, DIM) for _ in range(EXPERTS))",
        "flat = x.reshape(-1, DIM)\n"
        "scores, chosen = self.router(flat).softmax(-1).topk(1, dim=-1)\n"
        "y = torch.zeros_like(flat)\n"
        "for number, expert in enumerate(self.experts):\n"
        "    tokens, place = torch.where(chosen == number)\n"
        "    y.index_add_(0, tokens, (expert(flat[tokens]) * scores[tokens, place, None]).to(y.dtype))\n"
        "return y.view(x.shape)",
    ),
    "none": ("self.nothing = nn.Identity()", "return torch.zeros_like(x)"),
}
MIXERS = {
    "token shift": "x = x + 0.1 * F.pad(x, (0, 0, 1, -1))",
    "running sum": "x = x + 0.1 * x.cumsum(1)",
    "convolution": "x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)",
    "mean of the row": "x = x + x.mean(1, keepdim=True)",
    "masked mean of the row": (
        "real = attention_mask[..., None].to(x.dtype)\n"
        "x = x + (x * real).sum(1, keepdim=True) / real.sum(1, keepdim=True).clamp(min=1)"
    ),
    "first position": "x = x + 0.5 * x[:, :1]",
    "batch norm": "x = x + self.mix(x.flatten(0, 1)).view(x.shape)",
    "softmax over positions": "x = x + x * x.softmax(1)",
    "flipped": "x = x + 0.1 * x.flip(1)",
    "mean over rows": "x = x + 0.1 * x.mean(0, keepdim=True)",
}
MIXER_PARTS = {"convolution": "nn.Conv1d(DIM, DIM, 3, padding=1)", "batch norm": "nn.BatchNorm1d(DIM)"}


def blocks(trial: Trial) -> str:
    """Return the classes `Feed` and `Block`, and the functions that they use."""
    parts, lines = FEED[trial.feed]
    norm = NORMS[trial.norm]
    crossed = trial.second_side != "none"
    crossing = "\n        if memory is not None:\n            x = x + self.cross(x, memory_seen, None, memory)"
    feed = "checkpoint(self.feed, {}, use_reentrant=False)" if _is_checkpointed_inside(trial) else "self.feed({})"
    if trial.norm == "layer, behind":
        body = "x = self.before(x + self.attention(x, seen, angles))" + (crossing if crossed else "")
        body += f"\n        return self.after(x + {feed.format('x')})"
    else:
        body = "x = x + self.attention(self.before(x), seen, angles)" + (crossing if crossed else "")
        body += f"\n        return x + {feed.format('self.after(x)')}"
    before = (RMS if trial.norm == "rms" else "") + (ROTARY if trial.positions.startswith("rotary") else "")
    cross = "\n        self.cross = Attention()" if crossed else ""
    dropout = "\n        self.drop = nn.Dropout(0.0)" if trial.random == "dropout at 0" else ""
    if dropout:
        body = body.replace("return ", "return self.drop(", 1) + ")"
    return f"""{before}class Feed(nn.Module):
    def __init__(self):
        super().__init__()
{indent(parts, " " * 8)}

    def forward(self, x):
{indent(lines, " " * 8)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.feed = Attention(), Feed()
        self.before, self.after = {norm}, {norm}{cross}{dropout}

    def forward(self, x, seen, angles=None, memory=None, memory_seen=None):
        {body}
"""


def _is_checkpointed_inside(trial: Trial) -> bool:
    return trial.checkpoints == "of the feed-forward"


POSITIONS = {
    "none": ("", ""),
    "learned": ("self.places = nn.Embedding(64, DIM)", "x = x + self.places(torch.arange(input_ids.shape[1]))"),
    "learned, from the mask": (
        "self.places = nn.Embedding(64, DIM)",
        "x = x + self.places((attention_mask.long().cumsum(1) - 1).clamp(min=0))",
    ),
    "sinusoidal": (
        'self.register_buffer("frequencies", 100 ** -torch.linspace(0, 1, DIM // 2))',
        "turns = torch.arange(input_ids.shape[1])[:, None] * self.frequencies\n"
        "x = x + torch.cat([turns.sin(), turns.cos()], -1).to(x.dtype)",
    ),
    "rotary": (
        'self.register_buffer("frequencies", 100 ** -torch.linspace(0, 1, DIM // HEADS // 2))',
        "angles = torch.arange(input_ids.shape[1])[None, :, None] * self.frequencies",
    ),
    "rotary, from the mask": (
        'self.register_buffer("frequencies", 100 ** -torch.linspace(0, 1, DIM // HEADS // 2))',
        "angles = (attention_mask.long().cumsum(1) - 1).clamp(min=0)[..., None] * self.frequencies",
    ),
    "given": ("self.places = nn.Embedding(64, DIM)", "x = x + self.places(places)"),
}


def body(trial: Trial) -> tuple[str, str]:
    """Return the lines of the model's `__init__` and of its forward, from `input_ids` to the hidden state `x`."""
    parts, placed = POSITIONS[trial.positions]
    init = [
        "self.tokens = nn.Embedding(VOCAB, DIM)",
        parts,
        f"self.blocks = nn.ModuleList(Block() for _ in range({trial.layers}))",
        f"self.norm = {NORMS[trial.norm]}",
        f"self.mix = {MIXER_PARTS[trial.mixer]}" if trial.mixer in MIXER_PARTS else "",
        "self.source_block = Block()" if trial.second_side != "none" else "",
    ]
    given = "x, seen, angles" if trial.positions.startswith("rotary") else "x, seen, None"
    memory = ", memory, memory_seen" if trial.second_side != "none" else ""
    call = f"block({given}{memory})"
    if trial.checkpoints.startswith("of blocks"):
        call = f"checkpoint(block, {given}{memory}, use_reentrant={'reentrant' in trial.checkpoints})"
    forward = [
        seen_in_model(trial),
        "x = self.tokens(input_ids)",
        placed,
        _second_side(trial),
        MIXERS.get(trial.mixer, ""),
        f"for block in self.blocks:\n    x = {call}",
        "x = self.norm(x)",
    ]
    return "\n".join(filter(None, init)), "\n".join(filter(None, forward))


def _second_side(trial: Trial) -> str:
    if trial.second_side == "none":
        return ""
    lines = ["memory_seen = source_mask[:, None, None, :].bool()"]
    if trial.keys == "mask from the caller":
        least = "torch.finfo(x.dtype).min"
        lines.append(f"memory_seen = torch.zeros(memory_seen.shape, dtype=x.dtype).masked_fill(~memory_seen, {least})")
    lines.append("memory = self.source_block(self.tokens(source), memory_seen)")
    return "\n".join(lines)
