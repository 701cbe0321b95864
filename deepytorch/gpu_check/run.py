"""A run of `deepytorch gpu-check`: what is left to be made, by what is known of the device, and the making of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from deepytorch.bench.results import read_result
from deepytorch.bench.run import write_results
from deepytorch.errors import ConfigError
from deepytorch.gpu_check.isolated import WORKER, run_groups
from deepytorch.gpu_check.outcome import Check, Outcome
from deepytorch.gpu_check.packages import missing
from deepytorch.gpu_check.plan import Expected, expected, whole_seconds
from deepytorch.gpu_check.records import (
    FOLDER,
    DeviceResults,
    dated,
    default_path,
    is_known,
    of_device,
    read_results,
)

SECONDS = 480.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """The checks that were asked for.

    Attributes:
        device: The device to check.
        quick: Whether to make small checks of kernels, parity and synchronisations only, without figures.
        seconds: The time limit; checks that are not over within it are reported as not made.
        only: Names of subjects, groups or checks, as `Check.is_named` has them; empty: all.
        results: The result file; None: that of the GPU in a source tree's docs/results, or none.
        again: Whether checks are made, too, that passed before with the same sources and versions.
    """

    device: str = "cuda"
    quick: bool = False
    seconds: float = SECONDS
    only: Sequence[str] = ()
    results: Path | None = None
    again: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """The checks that are left to be made, what is known, the file for it, and how many checks need not be made."""

    checks: list[Check]
    known: DeviceResults
    path: Path | None
    num_known: int


def work_of(options: Options, checks: Sequence[Check] | None = None) -> Work:
    """Return what is to be made, those that failed before first. checks: None: all that there are.

    Raises `ConfigError` for a device or a name that does not exist, and for a result file of another device.
    """
    if torch.device(options.device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("There is no CUDA device here; `deepytorch doctor` says why. --device cpu tries the checks.")
    chosen = selected(options, checks)
    known = of_device(options.device)
    path = options.results or default_path(known)
    if path is not None:
        known = read_results(path, known)
    before = known.by_key()
    left = [each for each in chosen if options.again or not is_known(each, before.get(each.key))]
    # What a process has prepared for its timed checks ended with it.
    timed = {each.group for each in left if each.is_timed}
    left = [each for each in chosen if each in left or (each.group in timed and not each.is_timed)]
    has_failed = {each.group for each in left if (found := before.get(each.key)) and found.passed is False}
    left.sort(key=lambda check: (not check.is_first, check.group not in has_failed))
    return Work(left, known, path, len(chosen) - len(left))


def selected(options: Options, checks: Sequence[Check] | None = None) -> list[Check]:
    """Return the checks that are asked for. Raises `ConfigError` for a name of none."""
    if checks is None:
        from deepytorch.gpu_check.checks import checks_on

        checks = checks_on(options.device)
    for name in options.only:
        if not any(check.is_named(name) for check in checks):
            groups = dict.fromkeys(check.group for check in checks)
            raise ConfigError(f"There is no group {name!r}; expected some of: {'; '.join(groups)}.")
    named = [each for each in checks if not options.only or any(map(each.is_named, options.only))]
    return [each for each in named if each.quick or not options.quick]


def plan_of(options: Options, checks: Sequence[Check] | None = None) -> tuple[list[Expected], float]:
    """Return what each check that is asked for is expected to take, and all of them together, in seconds.

    No device need be there. The seconds are those of the result file, of this GPU's, or of the newest of any GPU.
    """
    path = options.results
    if path is None:
        here = default_path(of_device(options.device)) if torch.cuda.is_available() else None
        others = sorted(FOLDER.glob("gpu-*.json"), key=lambda each: each.stat().st_mtime)
        path = here if here is not None and here.exists() else others[-1] if others else None
    before = {} if path is None or not path.exists() else read_result(DeviceResults, path).by_key()
    chosen = [each for each in selected(options, checks) if missing(each.needs) is None]
    plan = expected(chosen, before)
    return plan, whole_seconds(plan)


def gathered(work: Work, found: Sequence[Outcome]) -> DeviceResults:
    """Return what is known of the device, with what was found now."""
    known = work.known
    for outcome in found:
        known = known.having(outcome)
    return known


def gpu_check(
    work: Work,
    options: Options,
    told: Callable[[Outcome], None] = lambda outcome: None,
    notify: Callable[[str], None] = lambda text: None,
    worker: Sequence[str] = WORKER,
) -> list[Outcome]:
    """Make checks, and return the outcomes, the failed ones first. Each is in the result file as soon as it is known.

    Args:
        work: What is to be made.
        options: The device and the time limit.
        told: Called with each outcome, of which those are left when this is interrupted.
        notify: Called with a line on the progress.
        worker: The command of a group's process.
    """
    found: list[Outcome] = []
    by_key, known = {each.key: each for each in work.checks}, work.known

    def keep(outcome: Outcome) -> None:
        nonlocal known
        outcome = dated(by_key[outcome.group, outcome.name], outcome)
        found.append(outcome)
        before = known.by_key().get((outcome.group, outcome.name))
        if work.path is not None and (before is None or outcome.passed is not None or before.passed is None):
            known = known.having(outcome)
            write_results(work.path, known)
        told(outcome)

    can_be_made = []
    for check in work.checks:
        reason = missing(check.needs)
        if reason is None:
            can_be_made.append(check)
        else:
            keep(check.outcome(None, reason))
    for outcome in run_groups(can_be_made, options.device, options.seconds, notify, worker):
        keep(outcome)
    return failed_first(found)


def failed_first(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """Return outcomes in the order of the report: failed ones, those that could not be made, and passed ones."""
    order = {False: 0, None: 1, True: 2}
    return sorted(outcomes, key=lambda outcome: order[outcome.passed])
