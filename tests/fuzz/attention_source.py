"""Attention as a script writes it: keys, reach, scores, and how the softmax over them is spelled."""

from __future__ import annotations

from textwrap import indent

from tests.fuzz.grammar import Trial
from tests.fuzz.random_source import DROPPED, attention_dropout

# A mask (rows, 1, 1 or positions, positions), true where a key is a token; `bias` where the caller gives numbers.
KEYS = {
    "mask": "seen = attention_mask[:, None, None, :].bool()",
    "ids": "attention_mask = (input_ids != PAD).long()\nseen = attention_mask[:, None, None, :].bool()",
    "mask of floats": "seen = attention_mask[:, None, None, :] > 0.5",
    "mask from the caller": "seen = bias",
    "pairs of tokens": "seen = (attention_mask[:, None, :, None] * attention_mask[:, None, None, :]) > 0",
    "lengths": (
        "attention_mask = (torch.arange(input_ids.shape[1])[None] < lengths[:, None]).long()\n"
        "seen = attention_mask[:, None, None, :].bool()"
    ),
    "none": "seen = None",
}
REACH = {
    "causal": "gap >= 0",
    "window": "(gap >= 0) & (gap < 3)",
    "window to both sides": "gap.abs() < 3",
    "chunks": "(gap >= 0) & (here[:, None] // 4 == here // 4)",
    "prefix": "(gap >= 0) | (here < 2)",
    "every second": "(gap >= 0) & (gap % 2 == 0)",
    "windows by head": "((gap >= 0) & (gap < torch.tensor([2, 3, 5, 64])[:, None, None]))[None]",
    "prefix of each row": "(gap >= 0) | (here < prefix[:, None])[:, None, None, :]",
    "documents": "(gap >= 0) & (documents[:, None, :, None] == documents[:, None, None, :])",
}
SCORES = {
    "slopes": "scores = scores - gap.abs().to(scores.dtype) * SLOPES.to(scores.dtype)",
    "table of distances": ("scores = scores + self.table(gap.clamp(-4, 4) + 4).permute(2, 0, 1).to(scores.dtype)"),
    "softcap": "scores = 5.0 * torch.tanh(scores / 5.0)",
    "learned temperature": "scores = scores * self.temperature",
}
EXTRA = {
    "table of distances": "self.table = nn.Embedding(9, HEADS)",
    "sinks": "self.sinks = nn.Parameter(torch.randn(HEADS))",
    "scaled by sinks": "self.sinks = nn.Parameter(torch.randn(HEADS))",
    "sinks of queries": "self.sinks = nn.Linear(DIM, HEADS)",
    "learned temperature": "self.temperature = nn.Parameter(torch.ones(HEADS, 1, 1))",
    "gate by query": "self.gate = nn.Linear(DIM, DIM)",
}
LOWEST = {
    "filled": "-1e9",
    "filled with infinity": "-math.inf",
    "filled with the least number": "torch.finfo(scores.dtype).min",
    "where": "torch.finfo(scores.dtype).min",
    "added": "-1e5",
    "masked softly": "-2.0",
    "less the maximum": "-1e9",
    "merged heads": "-1e9",
    "einsum": "-1e9",
    "softmax in float32": "-1e9",
}


def seen_in_model(trial: Trial) -> str:
    """Return the lines of the model's forward that make `seen`, handed to each block."""
    lines = [KEYS[trial.keys]]
    if trial.reach != "all" and not _is_causal_by_argument(trial):
        lines.append("here = torch.arange(input_ids.shape[1])")
        lines.append("gap = here[:, None] - here")
        reach = REACH[trial.reach]
        if trial.keys == "mask from the caller":
            lines.append(f"seen = seen.masked_fill(~({reach}), torch.finfo(seen.dtype).min)")
        elif trial.keys == "none":
            lines.append(f"seen = torch.ones(1, 1, 1, 1, dtype=torch.bool) & ({reach})")
        else:
            lines.append(f"seen = seen & ({reach})")
    return "\n".join(lines)


def attention(trial: Trial) -> str:
    """Return the class `Attention`: (rows, positions, DIM), `seen`, and angles of rotary positions or None."""
    if trial.spelling == "multihead":
        return _multihead(trial)
    heads = {"equal": "HEADS", "one key head": "1"}.get(trial.heads, "2")
    extra = [EXTRA[trial.score]] if trial.score in EXTRA else []
    if trial.keys_norm != "none":
        extra.append("self.of_queries = nn.Parameter(torch.ones(DIM // HEADS))")
    body = [
        "rows, positions, _ = x.shape",
        "memory = x if memory is None else memory",
        "q = self.q(x).view(rows, positions, HEADS, -1).transpose(1, 2)",
        f"k, v = (each(memory).view(rows, memory.shape[1], {heads}, -1).transpose(1, 2) for each in (self.k, self.v))",
        *_normed(trial),
        *_rotated(trial),
        *_repeated(trial),
        _attended(trial),
        "y = y.transpose(1, 2).reshape(rows, positions, DIM)",
        *(["y = y * torch.sigmoid(self.gate(x))"] if trial.score == "gate by query" else []),
        "return self.out(y)",
    ]
    return f"""class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.out = nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)
        self.k, self.v = nn.Linear(DIM, {heads} * (DIM // HEADS)), nn.Linear(DIM, {heads} * (DIM // HEADS))
{indent(chr(10).join(extra), " " * 8)}

    def forward(self, x, seen, angles=None, memory=None):
{indent(chr(10).join(body), " " * 8)}
"""


def _multihead(trial: Trial) -> str:
    """Attention by torch's own module; its key padding mask where the mask is one of keys alone."""
    if trial.keys == "mask from the caller":
        mask = "attn_mask=seen.expand(rows, HEADS, positions, -1).flatten(0, 1).to(x.dtype)"
    elif trial.reach == "all" and trial.keys != "pairs of tokens":
        mask = "key_padding_mask=None if seen is None else ~seen[:, 0, 0]"
    else:
        mask = "attn_mask=None if seen is None else (~seen).expand(rows, HEADS, positions, -1).flatten(0, 1)"
    weights = trial.layers == "2"
    dropout = f", dropout={DROPPED}" if attention_dropout(trial) else ""
    return f"""class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attend = nn.MultiheadAttention(DIM, HEADS, batch_first=True{dropout})

    def forward(self, x, seen, angles=None, memory=None):
        rows, positions, _ = x.shape
        memory = x if memory is None else memory
        return self.attend(x, memory, memory, need_weights={weights}, {mask})[0]
"""


def _is_causal_by_argument(trial: Trial) -> bool:
    return trial.reach == "causal" and trial.keys == "none" and trial.spelling == "sdpa" and trial.score == "plain"


def _normed(trial: Trial) -> list[str]:
    if trial.keys_norm == "none":
        return []
    return ["q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6) * self.of_queries"]


def _rotated(trial: Trial) -> list[str]:
    if not trial.positions.startswith("rotary"):
        return []
    return ["if angles is not None:", "    q, k = rotated(q, angles), rotated(k, angles)"]


def _repeated(trial: Trial) -> list[str]:
    if trial.heads == "repeated":
        return ["k, v = k.repeat_interleave(HEADS // 2, dim=1), v.repeat_interleave(HEADS // 2, dim=1)"]
    if trial.heads == "expanded":
        return [
            "k, v = (each[:, :, None].expand(-1, -1, HEADS // 2, -1, -1).reshape(rows, HEADS, *each.shape[2:]) "
            "for each in (k, v))"
        ]
    if trial.heads == "one key head" and (trial.spelling.startswith("sdpa") or trial.spelling == "merged heads"):
        return ["k, v = k.expand(-1, HEADS, -1, -1), v.expand(-1, HEADS, -1, -1)"]
    return []


def _attended(trial: Trial) -> str:
    """The lines from `q`, `k`, `v` and `seen` to `y`, (rows, HEADS, positions, DIM // HEADS) each."""
    gap = "gap = torch.arange(q.shape[-2])[:, None] - torch.arange(k.shape[-2])"
    lines = [gap] if trial.score in ("slopes", "table of distances") else []
    if trial.spelling.startswith("sdpa"):
        return "\n".join([*lines, *_by_sdpa(trial)])
    if trial.spelling == "einsum":
        lines.append(
            'scores = torch.einsum("bhqd,bhkd->bhqk", q, k.expand(-1, HEADS, -1, -1)) / math.sqrt(q.shape[-1])'
        )
    elif trial.spelling == "merged heads":
        lines.append("q, k, v = (each.reshape(-1, *each.shape[2:]) for each in (q, k, v))")
        lines.append("scores = torch.bmm(q, k.transpose(1, 2)) / math.sqrt(q.shape[-1])")
        lines.append("scores = scores.view(rows, HEADS, *scores.shape[1:])")
    else:
        lines.append("scores = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5")
    if trial.score in SCORES:
        lines.append(SCORES[trial.score])
    return "\n".join([*lines, *_masked(trial), *_softmaxed(trial)])


def _by_sdpa(trial: Trial) -> list[str]:
    gqa = ", enable_gqa=True" if trial.heads == "by SDPA" else ""
    if _is_causal_by_argument(trial):
        return [f"y = F.scaled_dot_product_attention(q, k, v, is_causal=memory is x{gqa}{_dropped(trial)})"]
    lines = ["add = seen"]
    least = "torch.finfo(q.dtype).min" if trial.spelling == "sdpa, the least number added" else "-math.inf"
    if trial.keys != "mask from the caller" and (trial.spelling != "sdpa" or trial.score in SCORES):
        lines.append("if seen is not None:")
        lines.append(f"    add = torch.zeros_like(seen, dtype=q.dtype).masked_fill(~seen, {least})")
    if trial.score == "slopes":
        lines.append("slope = -gap.abs().to(q.dtype) * SLOPES.to(q.dtype)")
        lines.append("add = slope[None] if add is None else add + slope")
    if trial.score == "table of distances":
        lines.append("table = self.table(gap.clamp(-4, 4) + 4).permute(2, 0, 1)[None].to(q.dtype)")
        lines.append("add = table if add is None else add + table")
    if trial.score == "learned temperature":
        lines.append("q = q * self.temperature")
    if trial.keys == "mask from the caller" or trial.spelling != "sdpa" or trial.score in SCORES:
        lines.append("add = add if add is None else add.to(q.dtype)")
    return [*lines, f"y = F.scaled_dot_product_attention(q, k, v, attn_mask=add{gqa}{_dropped(trial)})"]


def _dropped(trial: Trial) -> str:
    dropout = attention_dropout(trial)
    return f", dropout_p={dropout}" if dropout else ""


def _masked(trial: Trial) -> list[str]:
    if trial.keys == "mask from the caller":
        return ["scores = scores + seen.to(scores.dtype)"]
    if trial.spelling == "exponentials":
        return []
    least = LOWEST[trial.spelling]
    lines = ["if seen is not None:"]
    if trial.spelling == "where":
        lines.append(f"    scores = torch.where(seen, scores, {least})")
    elif trial.spelling in ("added", "masked softly"):
        lines.append(f"    scores = scores + (1.0 - seen.to(scores.dtype)) * {least}")
    else:
        lines.append(f"    scores = scores.masked_fill(~seen, {least})")
    return lines


def _softmaxed(trial: Trial) -> list[str]:
    lines = []
    if trial.spelling == "less the maximum":
        lines.append("scores = scores - scores.amax(-1, keepdim=True)")
    if trial.score in ("sinks", "sinks of queries"):
        column = "self.sinks.view(1, -1, 1, 1).to(scores.dtype).expand(rows, -1, positions, -1)"
        if trial.score == "sinks of queries":
            column = "self.sinks(x).to(scores.dtype).transpose(1, 2).unsqueeze(-1)"
        lines.append(f"column = {column}")
        lines.append("scores = torch.cat([scores, column], dim=-1)")
        lines.append("weights = scores.softmax(-1)[..., :-1]")
    elif trial.spelling == "softmax in float32":
        lines.append("weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(v.dtype)")
    elif trial.spelling == "exponentials":
        lines.append("weights = scores.exp() if seen is None else scores.exp() * seen.to(scores.dtype)")
        lines.append("weights = weights / (weights.sum(-1, keepdim=True) + 1e-6)")
    else:
        lines.append("weights = scores.softmax(-1)")
    if attention_dropout(trial):
        lines.append(f"weights = F.dropout(weights, {attention_dropout(trial)})")
    lines.append("weights = weights.to(v.dtype)")
    if trial.spelling == "merged heads":
        lines.append("y = torch.bmm(weights.flatten(0, 1), v).view(rows, HEADS, positions, -1)")
    elif trial.spelling == "einsum":
        lines.append('y = torch.einsum("bhqk,bhkd->bhqd", weights, v.expand(-1, HEADS, -1, -1))')
    else:
        lines.append("y = weights @ v")
    if trial.score == "scaled by sinks":
        lines.append("factor = (scores.logsumexp(-1) - self.sinks.view(1, -1, 1)).sigmoid()")
        lines.append("y = y * factor.unsqueeze(-1).to(y.dtype)")
    return lines
