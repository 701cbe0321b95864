"""A trial as a script that a user could have written; the fuzzer runs the same text."""

from __future__ import annotations

from textwrap import indent

from tests.fuzz.attention_source import attention
from tests.fuzz.block_source import blocks, body
from tests.fuzz.grammar import Trial
from tests.fuzz.loop_source import arguments_of, imports_deepytorch, loop
from tests.fuzz.loss_source import head, is_of_rows, loss_function

BATCHES = """
def token_mask(rows, positions, padding, generator):
    lengths = torch.randint(1, positions + 1, (rows,), generator=generator)
    lengths[0] = positions
    columns = torch.arange(positions)[None]
    right = columns < lengths[:, None]
    if padding == "right":
        return right
    if padding == "left":
        return right.flip(1)
    if padding == "mixed":
        return torch.where(torch.arange(rows)[:, None] % 2 == 0, right.flip(1), right)
    if padding == "holes":
        mask = torch.rand(rows, positions, generator=generator) < 0.6
        mask[:, 1] = True
        return mask
    if padding == "mostly":
        return columns < torch.where(torch.arange(rows) == 0, positions, lengths // 3 + 1)[:, None]
    if padding == "one":
        return columns < torch.where(torch.arange(rows) % 2 == 1, 1, positions)[:, None]
    mask = torch.ones(rows, positions, dtype=torch.bool)
    if padding == "empty row":
        mask[-1] = False
    return mask


def word_labels(kind, ids, mask, generator):
    labels = ids.clone()
    if kind != "at pads too":
        labels[~mask] = IGNORED
        labels[:, 1:][~mask[:, :-1]] = IGNORED  # what a pad would predict
    if kind == "prompt":
        labels[:, : labels.shape[1] // 2] = IGNORED
    if kind == "few":
        labels[torch.rand(labels.shape, generator=generator) < 0.7] = IGNORED
        labels[0, 1:] = torch.where(mask[0, 1:] & mask[0, :-1], ids[0, 1:], IGNORED)
    if kind == "nowhere":
        labels[:] = IGNORED
    return labels

"""


def script(trial: Trial) -> str:
    """Return the script: `run(side)` trains by "eager" or "deepytorch" and returns all that it noted."""
    return (
        "\n\n".join(
            part.strip("\n") + "\n"
            for part in (
                _head(trial),
                attention(trial),
                blocks(trial),
                _model(trial),
                BATCHES + _batch(trial),
                loop(trial),
            )
        )
        + MAIN
    )


def _head(trial: Trial) -> str:
    lines = [
        f'"""Trial {trial.index} of seed {trial.seed}: trains in eager and by deepytorch, and prints what differs.',
        "",
        "DEEPYTORCH_COMPILE=wait python this_file.py",
        '"""',
        "import copy",
        "import contextlib",
        "import io",
        "import math",
        "import tempfile",
        "from dataclasses import dataclass",
        "",
        "import torch",
        "import torch.nn.functional as F",
        "from torch import nn",
        "from torch.utils.checkpoint import checkpoint",
        "",
        "DIM, HEADS, WIDE, EXPERTS, VOCAB, CLASSES, PAD, IGNORED = 16, 4, 24, 3, 19, 3, 0, -100",
        f"DTYPE = torch.{'float32' if trial.dtype == 'autocast' else trial.dtype}",
        "SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])[:, None, None]",
        f"OPTIONS = {{'lowering': {trial.lowering!r}}}",
    ]
    if imports_deepytorch(trial):
        lines.insert(lines.index("import torch"), "import deepytorch")
    return "\n".join(lines)


def _model(trial: Trial) -> str:
    init, forward = body(trial)
    head_init, head_forward = head(trial)
    loss = loss_function(trial)
    names = ["logits"] + (["x"] if trial.place == "outside, hidden too" else [])
    if trial.place == "inside":
        names = ["loss", *names]
    lines = [forward, head_forward]
    if trial.place == "inside":
        lines.append(loss)
    lines.append(
        {
            "tuple": f"return {', '.join(names)},",
            "dict": f"return {{{', '.join(f'{name!r}: {name}' for name in names)}}}",
            "dataclass": f"return Output({', '.join(f'{name}={name}' for name in names)})",
        }[trial.returns]
    )
    arguments = "".join(f", {name}" for name in arguments_of(trial))
    text = f"""@dataclass
class Output:
    logits: torch.Tensor
    loss: torch.Tensor | None = None
    x: torch.Tensor | None = None


class Model(nn.Module):
    def __init__(self):
        super().__init__()
{indent(init + chr(10) + head_init, " " * 8)}

    def forward(self, input_ids, attention_mask{arguments}):
{indent(chr(10).join(lines), " " * 8)}
"""
    if trial.wrapped.startswith("module"):
        given = "**batch" if trial.wrapped == "module with keywords" else "*batch.values()"
        text += f"""

class Wrapped(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, batch):
        return self.inner({given})
"""
    return text


def _batch(trial: Trial) -> str:
    words = "word_labels(labels, ids, mask, generator)"
    rows = "torch.randint(0, CLASSES, (rows,), generator=generator)"
    lines = [
        "generator = torch.Generator().manual_seed(seed)",
        "mask = token_mask(rows, positions, padding, generator)",
        "ids = torch.randint(1, VOCAB, (rows, positions), generator=generator)",
        f"batch = {{'labels': {rows if is_of_rows(trial) else words}}}",
        "batch['attention_mask'] = mask.to(DTYPE)"
        if trial.keys == "mask of floats"
        else "batch['attention_mask'] = mask.long()",
        "batch['input_ids'] = ids.masked_fill(~mask, PAD)",
    ]
    if trial.keys == "mask from the caller":
        lines.append("batch['bias'] = torch.zeros(mask.shape, dtype=DTYPE).masked_fill(~mask, -1e9)[:, None, None, :]")
    if trial.keys == "lengths":
        lines.append("batch['lengths'] = mask.sum(1)")
    if trial.positions == "given":
        lines.append("batch['places'] = (mask.long().cumsum(1) - 1).clamp(min=0)")
    if trial.reach == "prefix of each row":
        lines.append("batch['prefix'] = torch.randint(0, 4, (rows,), generator=generator)")
    if trial.reach == "documents":
        lines.append(
            "batch['documents'] = (torch.rand(rows, positions, generator=generator) < 0.3).long().cumsum(1) * mask"
        )
    if trial.second_side != "none":
        lines.append("batch['source'] = torch.randint(1, VOCAB, (rows, positions + 2), generator=generator)")
        lines.append("batch['source_mask'] = token_mask(rows, positions + 2, 'right', generator).long()")
    return f"""
def make_batch(rows, positions, padding, labels, seed):
{indent(chr(10).join(lines), " " * 4)}
    return batch
"""


MAIN = """

if __name__ == "__main__":
    wanted, found = run("eager"), run("deepytorch")
    print(len(wanted), len(found))
    for (case, name, one), (_, _, other) in zip(wanted, found):
        if (one is None) != (other is None) or (one is not None and one.shape != other.shape):
            print(case, name, one is None, other is None)
        elif one is not None and not torch.allclose(one.double(), other.double(), 1e-4, 1e-6, equal_nan=True):
            print(case, name, (one.double() - other.double()).abs().max().item())
"""
