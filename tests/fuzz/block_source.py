"""The rest of a model as a script writes it: positions, norms, feed-forward, what mixes positions, the blocks."""

from __future__ import annotations

from textwrap import indent

from tests.fuzz.attention_source import seen_in_model
from tests.fuzz.feed_source import FEED
from tests.fuzz.grammar import Trial
from tests.fuzz.mixer_source import MIXER_PARTS, MIXERS
from tests.fuzz.random_source import block_dropout, noise_of_words

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
    dropout, around = block_dropout(trial)
    if around:
        body = body.replace("return ", f"return {around}(", 1) + ")"
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
        "self.blocks = nn.ModuleList([Block()] * 2)"
        if trial.layers == "one, twice"
        else f"self.blocks = nn.ModuleList(Block() for _ in range({trial.layers}))",
        f"self.norm = {NORMS[trial.norm]}",
        f"self.mix = {MIXER_PARTS[trial.mixer]}" if trial.mixer in MIXER_PARTS else "",
        "self.source_block = Block()" if trial.second_side != "none" else "",
    ]
    given = "x, seen, angles" if trial.positions.startswith("rotary") else "x, seen, None"
    memory = ", memory, memory_seen" if trial.second_side != "none" else ""
    is_behind = trial.mixer_place == "behind the blocks"
    call = f"block({given}{memory})"
    if trial.checkpoints.startswith("of blocks"):
        call = f"checkpoint(block, {given}{memory}, use_reentrant={'reentrant' in trial.checkpoints})"
    forward = [
        seen_in_model(trial),
        "x = self.tokens(input_ids)",
        placed,
        _second_side(trial),
        noise_of_words(trial),
        "" if is_behind else MIXERS.get(trial.mixer, ""),
        f"for block in self.blocks:\n    x = {call}",
        MIXERS.get(trial.mixer, "") if is_behind else "",
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
