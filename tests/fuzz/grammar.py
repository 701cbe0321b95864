"""The grammar: what a random model, its training loop and its batches are put together from.

An alternative is a name, which `source` turns into lines of a script. The first one of each list is the plainest: a
failing trial is shrunk towards these. The number behind a name is how often it is drawn.
"""

from __future__ import annotations

import random
from dataclasses import asdict, dataclass, replace
from typing import Any

Alternatives = dict[str, float]

MODEL: dict[str, Alternatives] = {
    # how the process is: which numbers, who compiles, what lowers
    "dtype": {"float64": 5, "float32": 3, "bfloat16": 0.7, "autocast": 0.7},
    "host": {"backend": 5, "import": 3, "function": 0.7, "compiled in place": 0.7},
    "lowering": {"eager": 9, "aot_eager": 1},
    # attention
    "spelling": {
        "sdpa": 4,
        "sdpa, added": 2,
        "sdpa, the least number added": 1,
        "filled": 2,
        "filled with infinity": 1,
        "filled with the least number": 1,
        "where": 1,
        "added": 1,
        "softmax in float32": 1,
        "less the maximum": 0.5,
        "merged heads": 0.7,
        "einsum": 0.7,
        "exponentials": 0.3,
        "masked softly": 0.2,
        "multihead": 1,
    },
    "reach": {
        "all": 4,
        "causal": 4,
        "window": 1.5,
        "window to both sides": 1,
        "chunks": 0.2,
        "prefix": 0.2,
        "prefix of each row": 0.4,
        "documents": 0.4,
        "windows by head": 0.4,
        "every second": 0.2,
    },
    "keys": {
        "mask": 10,
        "ids": 1.5,
        "mask of floats": 0.7,
        "mask from the caller": 1,
        "pairs of tokens": 0.7,
        "lengths": 0.5,
        "none": 0.7,
    },
    "heads": {"equal": 5, "repeated": 1, "expanded": 1, "by SDPA": 0.7, "one key head": 0.7},
    "score": {
        "plain": 9,
        "slopes": 0.7,
        "table of distances": 0.7,
        "softcap": 0.5,
        "sinks": 0.7,
        "scaled by sinks": 0.3,
        "sinks of queries": 0.3,
        "learned temperature": 0.5,
        "gate by query": 0.3,
    },
    "keys_norm": {"none": 5, "rms of heads": 1},
    "positions": {
        "none": 2,
        "learned": 3,
        "learned, from the mask": 1,
        "sinusoidal": 1,
        "rotary": 3,
        "rotary, from the mask": 0.7,
        "given": 0.7,
    },
    # the rest of a block
    "norm": {"layer": 4, "layer, behind": 1, "rms": 2, "rms of torch": 1, "none": 0.5},
    "feed": {
        "gelu": 4,
        "gated": 2,
        "relu squared": 0.5,
        "all experts": 0.7,
        "experts, chosen": 1,
        "experts, sorted": 1.5,
        "experts in a loop": 0.5,
        "experts of limited room": 0.4,
        "experts choose tokens": 0.4,
        "experts choose in each row": 0.3,
        "experts chosen by noise": 0.5,
        "none": 1,
    },
    "mixer": {
        "none": 14,
        "token shift": 0.4,
        "running sum": 0.3,
        "convolution": 0.3,
        "mean of the row": 0.3,
        "masked mean of the row": 0.5,
        "first position": 0.4,
        "batch norm": 0.2,
        "softmax over positions": 0.2,
        "flipped": 0.2,
        "mean over rows": 0.2,
        "learned token shift": 0.3,
        "token shift of tokens": 0.3,
        "running sum of tokens": 0.4,
        "running mean": 0.3,
        "causal convolution": 0.3,
        "causal convolution of tokens": 0.4,
    },
    "mixer_place": {"before the blocks": 3, "behind the blocks": 1},
    "second_side": {"none": 9, "cross attention": 1},
    "layers": {"1": 4, "2": 2, "one, twice": 0.5},
    # what is trained
    "head": {"shared": 3, "linear": 2, "bias of its own": 1},
    "loss": {
        "words": 3,
        "shifted": 3,
        "shifted, padded": 1,
        "summed": 1.5,
        "masked by multiplication": 1.5,
        "smoothed": 0.7,
        "weighted": 0.7,
        "log-probabilities of rows": 1,
        "teacher": 1,
        "preferences": 1,
        "few logits": 0.7,
        "chosen by index": 0.5,
        "entropy": 0.5,
        "z-loss": 0.5,
        "squares of hidden": 0.5,
        "row: mean": 1,
        "row: mean of filled": 0.5,
        "row: plain mean": 0.3,
        "row: first": 1,
        "row: last": 0.7,
        "row: last by argmax": 0.5,
        "row: maximum": 0.5,
        "row: attention": 0.5,
        "row: contrastive": 0.7,
        "row: regression": 0.5,
    },
    "place": {"inside": 3, "outside": 3, "outside, hidden too": 0.7},
    "returns": {"tuple": 2, "dict": 2, "dataclass": 1},
    # the loop
    "wrapped": {"no": 6, "module": 1, "module with keywords": 0.5, "DDP": 0.5},
    "accumulate": {"1": 5, "2": 1},
    "calls": {"1": 7, "2": 1, "2, the mask turned": 0.3},
    "checkpoints": {
        "none": 7,
        "of blocks": 1,
        "of blocks, reentrant": 0.5,
        "of the feed-forward": 0.3,
        "around the model": 0.3,
    },
    "frozen": {"nothing": 6, "the embedding": 0.7, "all but the head": 0.4, "the head": 0.4, "norms": 0.4},
    "hooks": {
        "none": 9,
        "forward hook on a block": 0.3,
        "hook on a gradient": 0.5,
        "pre-hook on the model": 0.3,
        "backward hook on a block": 0.2,
        "gradient of the embedding": 0.3,
        "midway: forward hook on a block": 0.3,
        "midway: hook on a gradient": 0.3,
        "midway: pre-hook on the model": 0.3,
        "midway: forward hook on the model": 0.3,
    },
    "clip": {"no": 4, "norm": 1, "value": 0.3},
    "optimizer": {"sgd": 4, "adamw": 2, "momentum": 1},
    "between": {"nothing": 6, "evaluation": 1.5, "copied": 0.3, "zeroed, not dropped": 0.5, "saved": 0.3},
    "random": {
        "none": 9,
        "dropout at 0": 1,
        "drawn by the loop": 0.5,
        "dropout": 0.7,
        "dropout of words": 0.3,
        "dropout of attention": 0.7,
        "dropout of rows": 0.3,
        "noise": 0.3,
    },
}

BATCH: dict[str, Alternatives] = {
    "padding": {
        "right": 5,
        "left": 2,
        "mixed": 2,
        "holes": 1.5,
        "one": 1,
        "none": 0.7,
        "empty row": 0.4,
        "mostly": 1.5,
    },
    "labels": {"ignored": 6, "prompt": 1.5, "few": 1.5, "at pads too": 0.8, "nowhere": 0.15, "all": 0.3},
    "look": {
        "nothing": 6,
        "tokens": 2,
        "accuracy": 1,
        "tokens, afterwards": 1,
        "kept": 0.5,
        "argmax": 0.5,
        "a row": 0.1,
        "whole": 0.1,
        "whole, afterwards": 0.1,
        "sum": 0.1,
        "into the loss": 0.3,
        "mean of tokens into the loss": 0.4,
        "log: mean": 0.5,
        "log: mean, afterwards": 0.5,
        "log: spread": 0.3,
        "log: largest without gradients": 0.3,
        "log: any is no number": 0.3,
        "rows by the mask": 0.5,
        "tokens, after the step": 0.5,
        "log: mean, after the step": 0.2,
    },
}
LOOKS_AT_PADS = ("a row", "whole", "whole, afterwards", "sum")
DRAWS = ("dropout", "dropout of words", "dropout of attention", "dropout of rows", "noise")
STEPS = 3  # of each case


@dataclass(frozen=True)
class Batch:
    """One case of a trial: the kind of its batches, of which there are `STEPS`, and what is done with outputs."""

    rows: int = 3
    positions: int = 7
    padding: str = "right"
    labels: str = "ignored"
    look: str = "nothing"
    varies: bool = False  # whether rows and positions change from step to step
    seed: int = 0


@dataclass(frozen=True)
class Trial:
    """A model with its training loop, and the cases that it is trained on, one after the other.

    Attributes:
        seed, index: Where it was drawn.
        choices: One alternative for each of `MODEL`.
        cases: Kinds of batches; each begins with the model's first weights.
    """

    seed: int
    index: int
    choices: tuple[tuple[str, str], ...]
    cases: tuple[Batch, ...]

    def __getattr__(self, name: str) -> str:
        for key, value in object.__getattribute__(self, "choices"):
            if key == name:
                return value
        raise AttributeError(name)

    @property
    def draws(self) -> bool:
        """Return whether the model draws random numbers: packed it draws others than padded, of one distribution."""
        return self.random in DRAWS or self.feed == "experts chosen by noise"

    def with_choice(self, name: str, value: str) -> Trial:
        """Return the trial with another alternative."""
        return replace(self, choices=tuple((key, value if key == name else old) for key, old in self.choices))

    def to_json(self) -> dict[str, Any]:
        """Return what `from_json` reads."""
        choices = {key: value for key, value in self.choices if value != plainest(key)}
        return {
            "seed": self.seed,
            "index": self.index,
            "choices": choices,
            "cases": [asdict(case) for case in self.cases],
        }

    @classmethod
    def from_json(cls, found: dict[str, Any]) -> Trial:
        """Return the trial of a journal's line; what is not named there is the plainest."""
        choices = tuple((name, found["choices"].get(name, plainest(name))) for name in MODEL)
        return cls(found["seed"], found["index"], choices, tuple(Batch(**case) for case in found["cases"]))


def plainest(name: str) -> str:
    """Return the alternative that a choice is shrunk to."""
    return next(iter(MODEL[name] if name in MODEL else BATCH[name]))


def draw(seed: int, index: int, cases: int = 96, among: dict[str, list[str]] | None = None) -> Trial:
    """Return the trial of this seed and index, which is always the same.

    among: alternatives of some choices; the trial has one of these.
    """
    rng = random.Random(f"{seed}/{index}")
    choices = {name: _one_of(rng, alternatives) for name, alternatives in MODEL.items()}
    if rng.random() < 0.35:  # many choices at once hide each other: a part of the trials is plain in most respects
        kept = set(rng.sample(sorted(choices), 8)) | {"dtype", "host", "lowering"}
        choices = {name: value if name in kept else plainest(name) for name, value in choices.items()}
    choices |= {name: rng.choice(values) for name, values in (among or {}).items()}
    single = rng.random() < 0.2  # batches of one row are traced once more
    kinds = [_draw_case(rng, single) for _ in range(cases)]
    if rng.random() < 0.95:  # who looks at pads once is not packed any more, or only where most are pads
        kinds.sort(key=lambda case: (case.look in LOOKS_AT_PADS, case.look.startswith("log:")))
    trial = valid(Trial(seed, index, tuple(choices.items()), tuple(kinds)))
    return replace(trial, cases=trial.cases[: max(1, cases // 3)]) if trial.draws else trial  # seven calls each


def valid(trial: Trial) -> Trial:
    """Return the trial with alternatives that go together."""
    if (trial.score == "softcap" or "sinks" in trial.score) and trial.spelling.startswith("sdpa"):
        trial = trial.with_choice("spelling", "filled")
    if trial.spelling == "multihead":
        for name in ("heads", "score", "keys_norm"):
            trial = trial.with_choice(name, plainest(name))
        if trial.positions.startswith("rotary"):
            trial = trial.with_choice("positions", "learned")
    if trial.spelling == "exponentials" and trial.score in ("sinks", "sinks of queries"):
        trial = trial.with_choice("score", "plain")
    if trial.spelling == "merged heads" and "sinks" in trial.score:
        trial = trial.with_choice("spelling", "filled")
    if trial.heads == "by SDPA" and not trial.spelling.startswith("sdpa"):
        trial = trial.with_choice("heads", "repeated")
    if trial.place != "inside" and trial.loss.startswith("row: contrastive"):
        trial = trial.with_choice("place", "inside")
    if trial.host == "function" and trial.wrapped != "no":
        trial = trial.with_choice("wrapped", "no")
    if trial.frozen == "the embedding" and trial.head == "shared":
        trial = trial.with_choice("head", "linear")
    if trial.wrapped == "DDP" and trial.between == "copied":
        trial = trial.with_choice("between", "nothing")
    if trial.hooks.startswith("midway: forward") and trial.host != "import":
        trial = trial.with_choice("hooks", "none")  # torch.compile does not look for hooks that come later
    if trial.random == "dropout of attention" and trial.spelling == "exponentials":
        trial = trial.with_choice("spelling", "filled")
    return _exact(trial) if trial.draws else trial


def _exact(trial: Trial) -> Trial:
    """Return a trial that draws with what its gradients can be compared with slopes by: float64, one call a step."""
    trial = trial.with_choice("dtype", "float64").with_choice("accumulate", "1").with_choice("calls", "1")
    if trial.spelling == "softmax in float32":
        trial = trial.with_choice("spelling", "filled")
    return trial.with_choice("loss", "shifted") if trial.loss == "shifted, padded" else trial


def _draw_case(rng: random.Random, single: bool) -> Batch:
    chosen = {name: _one_of(rng, alternatives) for name, alternatives in BATCH.items()}
    rows, positions = (
        rng.choice((1 if single else 2, 2, 3, 3, 4, 4, 5)),
        rng.choice((3, 4, 5, 6, 7, 8, 9, 11, 13, 16, 17)),
    )
    return Batch(rows, positions, **chosen, varies=rng.random() < 0.5, seed=rng.randrange(10**6))


def _one_of(rng: random.Random, alternatives: Alternatives) -> str:
    return rng.choices(list(alternatives), list(alternatives.values()))[0]
