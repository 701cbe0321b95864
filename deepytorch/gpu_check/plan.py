"""The seconds that checks are expected to take: those of their last outcomes, else an estimate that each one states."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from deepytorch.gpu_check.isolated import TOGETHER, next_group
from deepytorch.gpu_check.outcome import Check, Outcome

_START_S = 8.0  # for a process to load torch and transformers, beside others


@dataclass(frozen=True, slots=True)
class Expected:
    """The expected seconds of a check. measured: whether they are those of an earlier outcome."""

    check: Check
    seconds: float
    measured: bool


def expected(checks: Sequence[Check], before: Mapping[tuple[str, str], Outcome]) -> list[Expected]:
    """Return what each check is expected to take. before: the last outcomes on such a device, by group and name.

    A check that could not be made, or was ended, took no time that could be expected of it.
    """
    found = []
    for check in checks:
        last = before.get(check.key)
        measured = last is not None and last.passed is not None and last.seconds > 0
        found.append(Expected(check, last.seconds if last is not None and measured else check.expected_s, measured))
    return found


@dataclass(eq=False, slots=True)
class _Group:
    """The seconds that a group is expected to take beside others, and alone."""

    is_first: bool = False
    is_timed: bool = False
    prepares_s: float = 0.0
    beside_s: float = _START_S
    alone_s: float = 0.0


def whole_seconds(plan: Sequence[Expected], together: int = TOGETHER) -> float:
    """Return the expected seconds of all checks, as `isolated.run_groups` makes them."""
    groups: dict[str, _Group] = {}
    for each in plan:
        group = groups.setdefault(each.check.group, _Group())
        group.is_first |= each.check.is_first
        group.is_timed |= each.check.is_timed
        if each.check.is_timed:
            group.alone_s += each.seconds
        else:
            group.beside_s += each.seconds
            group.prepares_s += each.check.expected_s
    waiting, busy, now = list(groups.values()), dict[_Group, float](), 0.0
    while waiting or busy:
        while (begun := next_group(waiting, [*busy], together)) is not None:
            waiting.remove(begun)
            busy[begun] = now + begun.beside_s
        over = min(busy, key=lambda group: busy[group])
        now = busy.pop(over)
    return now + sum(group.alone_s for group in groups.values())
