"""Two runs of a trial compared: the same notes, in the same order, equal within what rounding explains."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from tests.fuzz.grammar import Trial

Note = tuple[int, str, "torch.Tensor | None"]
# relative to a tensor's norm: of gradients, and of all else
WITHIN = {"float64": (1e-9, 1e-9), "float32": (1e-4, 1e-5), "bfloat16": (5e-2, 2e-2)}
FLOOR = {"float64": 1e-11, "float32": 1e-6, "bfloat16": 2e-2}  # of the largest gradient, or of 1
NOISE = 10  # times what eager's numbers change by where its weights do by their last bit
DEVIATIONS = 6  # between means over random draws
OWN_ERROR = 3  # times what eager is away from float64, in half precision
BESIDES = 1e-4  # the root mean square by which an entry may be further from float64 than that
ENTRIES = 256  # of the smallest tensors for which a root mean square tells something
ROUNDED_CHOICES = ("accuracy", "words")  # the largest of two that are as good as equal


@dataclass(frozen=True)
class Difference:
    """A note that is not what it is in eager: in which case, its name, and how far apart they are."""

    case: int
    text: str
    finite: bool = False  # here, where eager is not


def precision(trial: Trial) -> str:
    """Return the dtype whose rounding shows in the trial's numbers."""
    if trial.dtype in ("autocast", "bfloat16"):
        return "bfloat16"
    casts = trial.spelling == "softmax in float32" or trial.loss == "shifted, padded"
    return "float32" if casts else trial.dtype


def differences(
    trial: Trial,
    wanted: Sequence[Note],
    found: Sequence[Note],
    moved: Sequence[Sequence[Note]] = (),
    exact: Sequence[Note] = (),
) -> Iterator[Difference]:
    """Compare `found` with eager's notes.

    moved: eager's own, from weights moved by their last bit. exact: eager's in float64, for half precision.
    """
    names = [note[:2] for note in wanted]
    if names != [note[:2] for note in found]:
        yield Difference(0, f"{len(found)} notes, {len(wanted)} in eager")
        return
    kind = precision(trial)
    moved = [each for each in moved if [note[:2] for note in each] == names]
    exact = exact if [note[:2] for note in exact] == names else ()
    largest = _largest_gradients(wanted)
    ruined = _ruined(wanted)
    for place, (case, name, one) in enumerate(wanted):
        other = found[place][2]
        if place > ruined.get(case, place):
            continue
        if one is None or other is None:
            if one is not other:
                yield Difference(case, f"{name}: {'none' if other is None else 'one'}, in eager {_none(one)}")
            continue
        if one.shape != other.shape or one.dtype != other.dtype:
            yield Difference(
                case, f"{name}: {tuple(other.shape)} {other.dtype}, in eager {tuple(one.shape)} {one.dtype}"
            )
            continue
        if "over draws" in name:
            yield from _of_draws(case, name, one, other)
            continue
        if kind == "bfloat16" and any(each in name for each in ROUNDED_CHOICES):
            continue
        is_gradient = "gradient: " in name
        within = WITHIN[kind][0 if is_gradient else 1]
        norm = one.double().nan_to_num(0, 0, 0).norm().item()
        allowed = within * norm + FLOOR[kind] * (largest.get(case, 0.0) if is_gradient else 1.0)
        allowed = max([allowed, *(NOISE * _apart(one, _tensor(each[place])) for each in moved)])
        if exact:
            exactly = _tensor(exact[place])
            allowed += OWN_ERROR * _apart(one, exactly)
            if one.numel() >= ENTRIES:  # the rule of PyTorch's benchmarks
                eagers = max(_apart(_tensor(each), exactly) for each in (wanted[place], *(run[place] for run in moved)))
                limit = OWN_ERROR * eagers + BESIDES * one.numel() ** 0.5
                if not _apart(other, exactly) <= limit:
                    text = f"{name}: {_apart(other, exactly):.2e} away from float64's, eager {eagers:.2e}"
                    yield Difference(case, text)
                    continue
        apart = _apart(one, other)
        if not apart <= allowed:
            text = f"{name}: {apart:.2e} away from eager's, whose norm is {norm:.2e}; {allowed:.1e} allowed"
            yield Difference(case, text, not one.isfinite().all() and bool(other.isfinite().all()))


def _of_draws(case: int, name: str, one: torch.Tensor, other: torch.Tensor) -> Iterator[Difference]:
    """Compare two means over random draws, each with how far it may be off."""
    apart, off = (one[0] - other[0]).abs().item(), (one[1].square() + other[1].square()).sqrt().item()
    both_nan = bool(one[0].isnan() and other[0].isnan())
    if not both_nan and not apart <= DEVIATIONS * off + 1e-9:
        yield Difference(case, f"{name}: {apart:.2e} away from eager's {one[0].item():.3e}; a deviation is {off:.1e}")


def _ruined(notes: Sequence[Note]) -> dict[int, int]:
    """The last gradient of the step after which eager's weights hold no numbers any more, by case."""
    ruined: dict[int, int] = {}
    steps: dict[int, str] = {}
    for place, (case, name, tensor) in enumerate(notes):
        step, _, what = name.partition(": ")
        if not what.startswith("gradient") or steps.get(case, step) != step:
            continue
        if case in ruined or (tensor is not None and not tensor.isfinite().all()):
            ruined[case], steps[case] = place, step
    return ruined


def _none(tensor: torch.Tensor | None) -> str:
    return "none" if tensor is None else "one"


def _tensor(note: Note) -> torch.Tensor:
    return torch.tensor(0.0) if note[2] is None else note[2]


def _apart(one: torch.Tensor, other: torch.Tensor) -> float:
    """The norm of the difference, where both are finite; infinite where numbers that are not finite differ."""
    if one.shape != other.shape:
        return 0.0  # another batch's
    one, other = one.detach().double(), other.detach().double()
    finite = one.isfinite() & other.isfinite()
    same = finite | (one == other) | (one.isnan() & other.isnan())
    if not same.all():
        return float("inf")
    return (one - other)[finite].norm().item()


def _largest_gradients(notes: Sequence[Note]) -> dict[int, float]:
    """The largest norm of a gradient in each case."""
    largest: dict[int, float] = {}
    for case, name, tensor in notes:
        if tensor is not None and "gradient: " in name:
            norm = tensor.double().nan_to_num(0, 0, 0).norm().item()
            largest[case] = max(largest.get(case, 0.0), norm)
    return largest
