"""Waiting until deepytorch has compiled and chosen what a model runs as: steps before that are no steps of training."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
import torch.distributed as dist

from deepytorch import background
from deepytorch.compiler.report import LEDGER, RegionRecord

REST_S = 0.3  # between steps while code is compiled, so that this process leaves the cores to the compile process
_CALM = 12  # steps in a row in which nothing was compiled or tried: the choice is made
_MORE = 3.0  # times the limit, until code that is being compiled has to be there and every form tried


def settle(step: Callable[[], None], limit_s: float) -> None:
    """Train until the choice is made, on all ranks, for at most `limit_s` seconds.

    Thrice that while code is compiled or a form is left to try: what runs until then is not what a training runs in.

    Raises `TimeoutError` if code is still being compiled then, which would slow the steps of all setups down.
    """
    began, calm, state = time.perf_counter(), 0, ""
    while not _on_all_ranks(calm >= _CALM or _is_late(began, limit_s)):
        step()
        if waits_for_code():
            time.sleep(REST_S)
        before, state = state, _state()
        calm = calm + 1 if state == before and state else 0
    if waits_for_code():
        raise TimeoutError(
            f"code was still being compiled after {time.perf_counter() - began:.0f} s, which would slow down the steps "
            "of all setups; expected it to be there: give --settle more"
        )


def wait_for_code(limit_s: float) -> None:
    """Wait while code is compiled, of sizes that the last step was the first with; nothing is timed meanwhile."""
    deadline = time.perf_counter() + limit_s
    while waits_for_code() and time.perf_counter() < deadline:
        time.sleep(REST_S)


def waits_for_code() -> bool:
    """Return whether code is being compiled in the background, and no form is on trial."""
    if background.is_working():
        return True
    regions = LEDGER.report().regions
    return any(each.forms_untried for each in regions) and not any(each.on_trial for each in regions)


def plan_of(regions: Sequence[RegionRecord]) -> str:
    """Return in words what runs: of each region the form that was chosen, each said once."""
    found = []
    for each in regions:
        won = [trial.partition(":")[0] for trial in each.trials if trial.endswith("used from now on")]
        if each.steps_packed:
            found.append("packed")
        elif each.trials:
            found.append((won[-1] if won else "eager") + (", forms untried" if each.forms_untried else ""))
        elif each.compiled_by or each.compiles:
            found.append("compiled")
    return ", ".join(dict.fromkeys(found)) or "eager"


def _is_late(began: float, limit_s: float) -> bool:
    is_open = background.is_working() or any(each.forms_untried for each in LEDGER.report().regions)
    return time.perf_counter() - began > limit_s * (_MORE if is_open else 1.0)


def _on_all_ranks(is_over: bool) -> bool:
    """Return whether all ranks say so: they are to make as many steps."""
    if not dist.is_initialized():
        return is_over
    said = torch.tensor(float(is_over), device="cuda" if dist.get_backend() == "nccl" else "cpu")
    dist.all_reduce(said, dist.ReduceOp.MIN)
    return bool(said)


def _state() -> str:
    """Return what deepytorch has decided so far; empty while something is being compiled or tried."""
    regions = LEDGER.report().regions
    meanwhile = sum(each.steps_meanwhile for each in regions)
    if not regions or any(each.forms_untried for each in regions):
        return ""
    return f"{len(regions)} {meanwhile} {[(each.trials, each.compiled_by) for each in regions]}"
