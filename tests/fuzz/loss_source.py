"""Heads, pooling and losses, as a script writes them."""

from __future__ import annotations

from tests.fuzz.grammar import Trial

# `logits` (rows, positions, VOCAB), `labels` (rows, positions), `attention_mask` and the last hidden state `x`.
LOSSES = {
    "words": "loss = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1))",
    "shifted": "loss = F.cross_entropy(logits[:, :-1].reshape(-1, VOCAB), labels[:, 1:].reshape(-1))",
    "shifted, padded": (
        "targets = F.pad(labels, (0, 1), value=IGNORED)[:, 1:]\n"
        "loss = F.cross_entropy(logits.float().view(-1, VOCAB), targets.reshape(-1), ignore_index=IGNORED)"
    ),
    "summed": (
        "loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='sum') / (labels != IGNORED).sum()"
    ),
    "masked by multiplication": (
        "losses = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction='none').view(labels.shape)\n"
        "loss = (losses * attention_mask).sum() / attention_mask.sum()"
    ),
    "smoothed": "loss = F.cross_entropy(logits.transpose(1, 2), labels, label_smoothing=0.1)",
    "weighted": (
        "weight = torch.linspace(0.5, 1.5, VOCAB).to(logits.dtype)\n"
        "loss = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1), weight=weight)"
    ),
    "log-probabilities of rows": (
        "counted = (labels[:, 1:] != IGNORED) & (attention_mask[:, 1:] > 0)\n"
        "wanted = labels[:, 1:].clamp(min=0)\n"
        "scores = logits[:, :-1].log_softmax(-1).gather(2, wanted[..., None])[..., 0]\n"
        "rows = (scores * counted).sum(-1)\n"
        "loss = -F.logsigmoid(rows - rows.detach().mean()).mean()"
    ),
    "teacher": (
        "apart = F.kl_div(logits.log_softmax(-1), taught.softmax(-1), reduction='none').sum(-1)\n"
        "loss = (apart * attention_mask).sum() / attention_mask.sum()"
    ),
    "preferences": (
        "counted = (labels[:, 1:] != IGNORED) & (attention_mask[:, 1:] > 0)\n"
        "wanted = labels[:, 1:].clamp(min=0)[..., None]\n"
        "ours, theirs = (\n"
        "    (each[:, :-1].log_softmax(-1).gather(2, wanted)[..., 0] * counted).sum(-1) for each in (logits, taught)\n"
        ")\n"
        "margins = 0.5 * (ours - theirs)  # of chosen rows, and of rejected ones\n"
        "loss = -F.logsigmoid(margins - margins.roll(1, 0)).mean()"
    ),
    "few logits": (
        "last = (attention_mask.long().cumsum(1) * attention_mask.long()).argmax(1)\n"
        "some = torch.stack([logits[:, 1], logits[torch.arange(last.shape[0]), last]], 1)\n"
        "loss = some.logsumexp(-1).mean()"
    ),
    "chosen by index": ("chosen = labels != IGNORED\nloss = F.cross_entropy(logits[chosen], labels[chosen])"),
    "entropy": (
        "logs = logits.log_softmax(-1)\n"
        "entropy = -(logs.exp() * logs).sum(-1)\n"
        "loss = F.nll_loss(logs.flatten(0, 1), labels.flatten())\n"
        "loss = loss + 0.1 * (entropy * attention_mask).sum() / attention_mask.sum()"
    ),
    "z-loss": (
        "loss = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)) + 0.01 * logits.logsumexp(-1).pow(2).mean()"
    ),
    "squares of hidden": (
        "real = attention_mask[..., None].to(x.dtype)\n"
        "loss = F.cross_entropy(logits.view(-1, VOCAB), labels.view(-1)) + 0.1 * (x * real).pow(2).sum() / real.sum()"
    ),
}
POOLS = {
    "row: mean": "x = (x * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True).clamp(min=1)",
    "row: mean of filled": (
        "x = x.masked_fill(attention_mask[..., None] == 0, 0.0).sum(1) / attention_mask.sum(1)[:, None].clamp(min=1)"
    ),
    "row: plain mean": "x = x.mean(1)",
    "row: first": "x = torch.tanh(x[:, 0])",
    "row: last": "x = x[torch.arange(x.shape[0]), attention_mask.long().sum(1) - 1]",
    "row: last by argmax": (
        "last = (torch.arange(x.shape[1]) * attention_mask.long()).argmax(-1)\n"
        "x = x.gather(1, last[:, None, None].expand(-1, -1, DIM))[:, 0]"
    ),
    "row: maximum": "x = x.masked_fill(attention_mask[..., None] == 0, -1e4).max(1).values",
    "row: attention": (
        "weights = self.asks(x)[..., 0].masked_fill(attention_mask == 0, torch.finfo(x.dtype).min).softmax(-1)\n"
        "x = (x * weights[..., None].to(x.dtype)).sum(1)"
    ),
    "row: contrastive": "x = (x * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True).clamp(min=1)",
    "row: regression": "x = x[:, 0]",
}


TAUGHT = ("teacher", "preferences")  # by a second model, which is frozen


def is_of_rows(trial: Trial) -> bool:
    """Return whether the model says one thing a row, and not one a token."""
    return trial.loss.startswith("row:")


def head(trial: Trial) -> tuple[str, str]:
    """Return the lines of the model's `__init__` and of its forward, from the hidden state `x` to `logits`."""
    if is_of_rows(trial):
        outputs = {"row: regression": "1", "row: contrastive": "DIM"}.get(trial.loss, "CLASSES")
        init = f"self.head = nn.Linear(DIM, {outputs})"
        if trial.loss == "row: attention":
            init += "\nself.asks = nn.Linear(DIM, 1)"
        pooled = POOLS[trial.loss].replace("attention_mask[..., None])", "attention_mask[..., None].to(x.dtype))")
        return init, f"{pooled}\nlogits = self.head(x.to(self.head.weight.dtype))"
    if trial.head == "shared":
        return (
            "self.head = nn.Linear(DIM, VOCAB, bias=False)\nself.head.weight = self.tokens.weight",
            "logits = self.head(x)",
        )
    if trial.head == "linear":
        return "self.head = nn.Linear(DIM, VOCAB)", "logits = self.head(x)"
    return (
        "self.head = nn.Linear(DIM, DIM)\nself.words = nn.Parameter(torch.randn(VOCAB, DIM) * 0.1)\n"
        "self.words_bias = nn.Parameter(torch.zeros(VOCAB))",
        "logits = F.linear(F.gelu(self.head(x)), self.words, self.words_bias)",
    )


def loss_function(trial: Trial) -> str:
    """Return the lines from `logits`, `labels` and so on to `loss`."""
    if not is_of_rows(trial):
        return LOSSES[trial.loss]
    if trial.loss == "row: regression":
        return "loss = F.mse_loss(logits[:, 0], labels.to(logits.dtype))"
    if trial.loss == "row: contrastive":
        return (
            "unit = F.normalize(logits, dim=-1)\n"
            "loss = F.cross_entropy(unit @ unit.roll(1, 0).detach().T / 0.5, torch.arange(unit.shape[0]))"
        )
    return "loss = F.cross_entropy(logits, labels)"
