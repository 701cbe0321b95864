"""The Hugging Face Trainer logs what deepytorch does, to whatever it logs to: `deepytorch/*` beside the loss."""

from __future__ import annotations

import functools
from typing import Any


def attach(trainer: Any) -> None:
    """Add our figures to the training logs of `transformers.trainer.Trainer`."""
    original = trainer.Trainer.log
    if hasattr(original, "_deepytorch_original"):
        return

    @functools.wraps(original)
    def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
        if "loss" in logs:  # not those of an evaluation
            logs.update(metrics())
        original(self, logs, *args, **kwargs)

    log._deepytorch_original = original  # type: ignore[attr-defined]
    trainer.Trainer.log = log


def detach(trainer: Any) -> None:
    """Log as before."""
    trainer.Trainer.log = getattr(trainer.Trainer.log, "_deepytorch_original", trainer.Trainer.log)


def metrics() -> dict[str, float]:
    """What happened so far in this process, as numbers; empty while nothing was compiled."""
    from deepytorch.compiler.report import LEDGER

    report = LEDGER.report()
    found: dict[str, float] = {}
    if not report.regions:
        return found
    found["deepytorch/steps_packed"] = float(report.total("steps_packed"))
    found["deepytorch/steps_padded"] = float(report.total("steps_padded"))
    found["deepytorch/recompiles"] = float(report.total("recompiles"))
    if report.real_token_fraction is not None:
        found["deepytorch/real_token_fraction"] = round(report.real_token_fraction, 4)
    reduced = [entry for entry in report.gradients if entry["syncs"]]
    if reduced:
        waited = sum(entry["exposed_seconds"] / entry["syncs"] for entry in reduced)
        found["deepytorch/exposed_communication_ms"] = round(1e3 * waited, 3)
    return found
