"""What a script looks at, and when."""

from __future__ import annotations

from tests.fuzz.grammar import Trial
from tests.fuzz.loss_source import is_of_rows

# What stands before the backward, and behind it.
LOOKS = {
    "nothing": ("", ""),
    "tokens": ('note("logits at tokens", logits[real])', ""),
    "accuracy": (
        'note("accuracy", ((logits.argmax(-1) == labels) & real).sum() / real.sum())',
        "",
    ),
    "tokens, afterwards": ("", 'note("logits at tokens, afterwards", logits.detach()[real])'),
    "kept": ("kept.append((logits.detach(), real))", ""),
    "argmax": ("", 'note("words", torch.where(real, logits.argmax(-1), 0)[real])'),
    "a row": ('note("a row", logits[0])', ""),
    "whole": ('note("logits", logits)', ""),
    "whole, afterwards": ("", 'note("logits, afterwards", logits)'),
    "sum": ('note("sum", logits.sum())', ""),
    "into the loss": ("loss = loss + 0.1 * logits[real].pow(2).mean()", ""),
    "mean of tokens into the loss": ("loss = loss + 0.1 * (logits.mean(-1) * real).sum() / real.sum()", ""),
    "log: mean": ('note("mean", logits.detach().mean())', ""),
    "log: mean, afterwards": ("", 'note("mean", logits.detach().mean())'),
    "log: spread": ('note("spread", torch.stack([logits.detach().std(), logits.detach().norm()]))', ""),
    "log: largest without gradients": (
        'with torch.no_grad(): note("largest", torch.stack([logits.amax(), logits.amin()]))',
        "",
    ),
    "log: any is no number": ('note("any", logits.detach().isnan().any())', ""),
    "rows by the mask": (
        "",
        'note("rows", (logits.detach() * real[..., None]).sum(1) / real.sum(1, keepdim=True).clamp(min=1))',
    ),
}
# What stands behind the optimizer's step.
LATE_LOOKS = {
    "tokens, after the step": 'note("logits at tokens, after the step", logits.detach()[real])',
    "log: mean, after the step": 'note("mean, after the step", logits.detach().mean())',
}
ROW_LOOKS = {
    "into the loss": ("loss = loss + 0.1 * logits.pow(2).mean()", ""),
    "nothing": ("", ""),
    "tokens, afterwards": ("", 'note("logits, afterwards", logits)'),
}
# With random draws these are of eager's: they look at pads, and are computed once more, padded.
OF_EAGERS_DRAWS = ("log:", "a row", "whole", "sum")


def look(trial: Trial, name: str) -> tuple[str, str, str]:
    """Return what the script does with outputs before the backward, after it, and after the optimizer's step."""
    if trial.draws and (is_of_rows(trial) or not name.startswith(OF_EAGERS_DRAWS)):
        return "", "", ""
    if is_of_rows(trial):
        return (*ROW_LOOKS.get(name, ('note("logits", logits)', "")), "")
    return (*LOOKS.get(name, ("", "")), LATE_LOOKS.get(name, ""))
