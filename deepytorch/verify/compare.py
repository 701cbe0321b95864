"""The comparison of two runs: their differences, judged by the sensitivity of eager itself.

A number may differ by `tolerance` (relative), or by ten times its sensitivity: its change, without the import, when
every weight is moved by its last bit. Rounding alone can change a number by as much.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from deepytorch.verify.records import Gradients, Loss, Run, Weight

SENSITIVITIES = 10.0  # the largest difference, in multiples of eager's own sensitivity
# A gradient's norm below a thousandth of the total is judged as if it were a thousandth: below that it is mostly
# rounding (without rounding, the biases of keys in an attention would have a gradient of exactly zero).
_SMALLEST_PART = 1e-3
_STEPS_LOOKED_BACK = 3  # rounding may by chance leave one number unchanged, but not three in a row

LOSS, TOTAL, NORM, WEIGHT, COUNT = "loss", "total gradient norm", "gradient norm", "weight at the end", "count"


@dataclass(frozen=True, kw_only=True, slots=True)
class Compared:
    """One number of both runs.

    Attributes:
        step: The step; None at the end.
        kind: The kind of number.
        name: The number's name.
        without: Its value without the import.
        with_import: Its value with the import.
        relative: The difference of both, relative to the larger one.
        sensitivity: Eager's own sensitivity, on the same scale; None if it is not known.
        allowed: The largest allowed `relative`.
    """

    step: int | None
    kind: str
    name: str
    without: float
    with_import: float
    relative: float
    sensitivity: float | None
    allowed: float

    @property
    def agrees(self) -> bool:
        """Return whether the difference is within the allowed one."""
        return self.relative <= self.allowed

    @property
    def where(self) -> str:
        """Return the step, or the end, in words."""
        return "at the end" if self.step is None else f"step {self.step}"

    def to_json(self) -> dict[str, Any]:
        """Return plain data; numbers that are not finite are text."""
        return {name: plain(value) for name, value in asdict(self).items()}


def plain(value: Any) -> Any:
    """Return a value for JSON: a number that is not finite as text."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class _Judge:
    """The judge of numbers, which makes a `Compared` of each; it keeps the sensitivities of the last steps."""

    tolerance: float
    moved: bool

    def __post_init__(self) -> None:
        self._seen: dict[tuple[str, str], deque[float]] = {}

    def number(
        self, step: int, kind: str, name: str, one: float, other: float, moved: float | None, floor: float = 0.0
    ) -> Compared:
        seen = self._seen.setdefault((kind, name), deque(maxlen=_STEPS_LOOKED_BACK))
        if moved is not None:
            seen.append(_difference(one, moved))
        scale = max([abs(each) for each in (one, other) if math.isfinite(each)] + [floor])
        return self.judged(step, kind, name, one, other, _difference(one, other), max(seen, default=None), scale)

    def judged(
        self, step: int | None, kind: str, name: str, one: float, other: float,
        difference: float, sensitivity: float | None, scale: float,
    ) -> Compared:  # fmt: skip
        relative = _over(difference, scale)
        own = None if sensitivity is None else _over(sensitivity, scale)
        tolerance = 0.0 if kind == COUNT else self.tolerance
        allowed = max(tolerance, SENSITIVITIES * own if own is not None and math.isfinite(own) else 0.0)
        return Compared(
            step=step,
            kind=kind,
            name=name,
            without=one,
            with_import=other,
            relative=relative,
            sensitivity=own,
            allowed=allowed,
        )


def compare(without: Run, with_import: Run, moved: Run | None, tolerance: float) -> list[Compared]:
    """Return every number of two runs, in the script's order. moved: the run with moved weights; None if it failed."""
    judge = _Judge(tolerance, moved is not None)
    found: list[Compared] = []
    complete = with_import.failure is None
    last = max(without.steps, with_import.steps) if complete else with_import.steps
    for step in range(1, last + 2):
        runs = [run.events.get(step, []) if run is not None else [] for run in (without, with_import, moved)]
        found += _step(judge, step, runs, without, compare_counts=complete or step <= last)
    if complete and without.steps != with_import.steps:
        moved_steps = None if moved is None else moved.steps
        found.append(_count(judge, None, "optimizer steps", without.steps, with_import.steps, moved_steps))
    if without.weights_file and with_import.weights_file:
        found += _weights(judge, without, with_import, moved)
    return found


def _step(
    judge: _Judge, step: int, runs: list[list[Loss | Gradients]], names: Run, compare_counts: bool
) -> Iterator[Compared]:
    losses = [[each for each in events if isinstance(each, Loss)] for events in runs]
    gradients = [[each for each in events if isinstance(each, Gradients)] for events in runs]
    in_order = {id(each): number for number, each in enumerate(runs[0])}
    found: list[tuple[int, Compared]] = []
    for number, (one, other, third) in enumerate(zip_longest(*losses)):
        if one is not None and other is not None:
            name = f"loss {number + 1} of {len(losses[0])}" if len(losses[0]) > 1 else "loss"
            moved = None if third is None else third.value
            found.append((in_order[id(one)], judge.number(step, LOSS, name, one.value, other.value, moved)))
    for number, (one, other, third) in enumerate(zip_longest(*gradients)):
        if one is not None and other is not None:
            which = f" ({number + 1} of {len(gradients[0])})" if len(gradients[0]) > 1 else ""
            found += [(in_order[id(one)], each) for each in _norms(judge, step, one, other, third, names, which)]
    yield from (each for _, each in sorted(found, key=lambda pair: pair[0]))
    if compare_counts:
        for what, of_runs in (("losses handed to backward", losses), ("gradients before a step", gradients)):
            one_count, other_count, moved_count = map(len, of_runs)
            if one_count != other_count:
                yield _count(judge, step, what, one_count, other_count, moved_count if judge.moved else None)


def _norms(
    judge: _Judge, step: int, one: Gradients, other: Gradients, third: Gradients | None, run: Run, which: str
) -> Iterator[Compared]:
    yield judge.number(step, TOTAL, TOTAL + which, one.total, other.total, None if third is None else third.total)
    if len(one.norms) != len(other.norms):
        moved_count = None if third is None else len(third.norms)
        yield _count(judge, step, "trained parameters", len(one.norms), len(other.norms), moved_count)
        return
    names = run.names[one.optimizer]
    thirds = third.norms if third is not None and len(third.norms) == len(one.norms) else [None] * len(one.norms)
    for name, norm, with_import, moved in zip(names, one.norms, other.norms, thirds, strict=False):
        if norm is None and with_import is None:
            continue
        floor = _SMALLEST_PART * one.total if math.isfinite(one.total) else 0.0
        moved_norm = None if third is None else moved or 0.0
        yield judge.number(step, NORM, name + which, norm or 0.0, with_import or 0.0, moved_norm, floor)


def _count(judge: _Judge, step: int | None, what: str, one: int, other: int, moved: int | None) -> Compared:
    own = None if moved is None else float(abs(one - moved))
    return judge.judged(step, COUNT, f"number of {what}", one, other, float(abs(one - other)), own, max(one, other))


def _weights(judge: _Judge, without: Run, with_import: Run, moved: Run | None) -> Iterator[Compared]:
    """Yield the weights at the end; each difference is a norm, relative to the weight's norm."""
    shapes = [[(each.dtype, each.count) for each in run.weights] for run in (without, with_import)]
    if shapes[0] != shapes[1]:
        yield _count(judge, None, "trained weights", len(shapes[0]), len(shapes[1]), None)
        return
    thirds: list[Any] = [None] * len(without.weights)
    if moved is not None and [(each.dtype, each.count) for each in moved.weights] == shapes[0]:
        thirds = moved.weights
    for one, other, third in zip(without.weights, with_import.weights, thirds, strict=True):
        values = _read(without.weights_file, one)
        others = _read(with_import.weights_file, other)
        norm, other_norm = (float(each.norm()) for each in (values, others))
        own = None if moved is None or third is None else _distance(values, _read(moved.weights_file, third))
        scale = max(norm, other_norm)
        yield judge.judged(None, WEIGHT, one.name, norm, other_norm, _distance(values, others), own, scale)


def _read(path: Path | None, weight: Weight) -> Any:
    import torch

    dtype = getattr(torch, weight.dtype)
    if not weight.count or path is None:
        return torch.zeros(0, dtype=torch.float64)
    with path.open("rb") as file:
        file.seek(weight.offset)
        found = bytearray(file.read(weight.count * dtype.itemsize))
    return torch.frombuffer(found, dtype=dtype).double()


def _distance(one: Any, other: Any) -> float:
    """Return the norm of the difference; equal infinities, and NaN in both, count as equal."""
    same = (one == other) | (one.isnan() & other.isnan())
    found = float((one - other).masked_fill(same, 0.0).norm())
    return math.inf if math.isnan(found) else found


def _difference(one: float, other: float) -> float:
    if one == other or (math.isnan(one) and math.isnan(other)):
        return 0.0
    found = abs(one - other)
    return math.inf if math.isnan(found) else found


def _over(difference: float, scale: float) -> float:
    return 0.0 if difference == 0.0 else difference / scale if scale > 0.0 else math.inf
