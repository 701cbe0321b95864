"""The Hugging Face Trainer: deepytorch's figures are logged with the loss, as `deepytorch/*`, to all its loggers."""

from __future__ import annotations

from typing import Any

from deepytorch.patches import replace


def attach(trainer: Any) -> None:
    """Add our figures to the training logs of `transformers.trainer.Trainer`."""

    def logging(original: Any) -> Any:
        def log(self: Any, logs: dict[str, float], *args: Any, **kwargs: Any) -> None:
            if "loss" in logs:  # training logs, not those of an evaluation
                logs.update(metrics())
            original(self, logs, *args, **kwargs)

        return log

    replace(trainer.Trainer, "log", logging, "put deepytorch's figures beside the loss")


def metrics() -> dict[str, float]:
    """Return the figures of this process so far, as numbers; empty while nothing was compiled."""
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
