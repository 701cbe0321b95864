"""`deepytorch gpu-check`: checks that deepytorch's results on this GPU are right, and measures of its speed.

The check runs from a work tree with `PYTHONPATH` alone, without a network, in eight minutes at most. Each group of
checks runs in a process of its own, several at a time, and each check has a deadline. A check that fails, crashes or
hangs is reported with the others at the end, the failed ones first. Timed checks run alone, behind the rest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Any

import torch

from deepytorch.errors import ConfigError
from deepytorch.gpu_check.isolated import WORKER, run_groups
from deepytorch.gpu_check.outcome import Outcome

SECONDS = 480.0


def gpu_check(
    device: str = "cuda",
    quick: bool = False,
    seconds: float = SECONDS,
    only: Sequence[str] = (),
    notify: Callable[[str], None] = lambda text: None,
    worker: Sequence[str] = WORKER,
) -> list[Outcome]:
    """Make every check on `device`, and return the outcomes, the failed ones first.

    Raises `ConfigError` for a device or a group that does not exist.

    Args:
        device: The device to check.
        quick: Whether to make small checks of kernels, parity and synchronisations only, without figures.
        seconds: The time limit; checks that are not over within it are reported as not made.
        only: The groups to make; empty: all.
        notify: Called with a line on the progress.
        worker: The command of a group's process.
    """
    from deepytorch.gpu_check.checks import checks_on  # imports every kernel and model: not in each group's process

    if torch.device(device).type == "cuda" and not torch.cuda.is_available():
        raise ConfigError("There is no CUDA device here; `deepytorch doctor` says why. --device cpu tries the checks.")
    checks = checks_on(device)
    groups = list(dict.fromkeys(check.group for check in checks))
    unknown = [name for name in only if name not in groups]
    if unknown:
        raise ConfigError(f"There is no group {unknown[0]!r}; expected some of: {'; '.join(groups)}.")
    wanted = [each for each in checks if (each.quick or not quick) and (not only or each.group in only)]
    order = {False: 0, None: 1, True: 2}
    return sorted(run_groups(wanted, device, seconds, notify, worker), key=lambda outcome: order[outcome.passed])


def to_json(outcomes: list[Outcome], device: str) -> dict[str, Any]:
    """Return the outcomes, with the machine that they are from, as JSON."""
    properties: dict[str, Any] = {"name": "cpu"}
    if torch.device(device).type == "cuda":
        of = torch.cuda.get_device_properties(device)
        properties = {
            "name": of.name,
            "capability": f"{of.major}.{of.minor}",
            "memory_gb": round(of.total_memory / 2**30),
        }
    return {
        "device": properties,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "checks": [asdict(outcome) for outcome in outcomes],
    }
