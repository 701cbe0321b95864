"""The result file of a device: every check's last outcome, with what decides whether the check has to be made again."""

from __future__ import annotations

import contextlib
import datetime
import platform
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, packages_distributions, version
from pathlib import Path

import torch

from deepytorch.bench.results import Record, read_result
from deepytorch.errors import ConfigError
from deepytorch.gpu_check.outcome import Check, Outcome
from deepytorch.gpu_check.sources import digest_of

FOLDER = Path("docs/results")
_DECIDE = ("triton", "transformers")  # besides torch and its CUDA


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceResults(Record):
    """All that is known of one device.

    device: its name. capability: compute capability, as "9.0". memory_gb: of 2^30 bytes. checks: in no order.
    """

    what = "result file"

    device: str
    capability: str
    memory_gb: int
    checks: list[Outcome]
    layout: int = 1

    @property
    def short(self) -> str:
        """Return the device's name in a word, as H100."""
        return short_name(self.device)

    def by_key(self) -> dict[tuple[str, str], Outcome]:
        """Return the outcomes by group and name."""
        return {(each.group, each.name): each for each in self.checks}

    def having(self, outcome: Outcome) -> DeviceResults:
        """Return these results with an outcome in the place of the check's earlier one."""
        return replace(self, checks=list({**self.by_key(), (outcome.group, outcome.name): outcome}.values()))


def of_device(device: str) -> DeviceResults:
    """Return the results of a device of this machine, without any."""
    if torch.device(device).type != "cuda":
        return DeviceResults(device="cpu", capability="", memory_gb=0, checks=[])
    of = torch.cuda.get_device_properties(device)
    memory_gb = round(of.total_memory / 2**30)
    return DeviceResults(device=of.name, capability=f"{of.major}.{of.minor}", memory_gb=memory_gb, checks=[])


def short_name(device: str) -> str:
    """Return a device's name in a word: H100 of "NVIDIA H100 80GB HBM3"."""
    found = re.search(r"\b[A-Z]{1,3}\d{1,4}[A-Z]?\b", device)
    if found is not None and "MIG" not in device:
        return found.group()
    return re.sub(r"[^A-Za-z0-9.]+", "-", device.removeprefix("NVIDIA ")).strip("-")


def default_path(results: DeviceResults) -> Path | None:
    """Return the file of a GPU where the working directory is a source tree; None where it is not, or for a CPU."""
    return FOLDER / f"gpu-{results.short.lower()}.json" if results.capability and FOLDER.is_dir() else None


def read_results(path: Path, fresh: DeviceResults) -> DeviceResults:
    """Return the results in a file, or `fresh` ones if there is none. Raises `ConfigError` for those of others."""
    if not path.exists():
        return fresh
    found = read_result(DeviceResults, path)
    if found.device != fresh.device:
        raise ConfigError(
            f"{path} holds results of {found.device}, and this is {fresh.device}: give another --results."
        )
    return found


def dated(check: Check, outcome: Outcome) -> Outcome:
    """Return an outcome of now with all that decides whether the check is made again."""
    today = datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()
    return replace(outcome, sources=sources_of(check), versions=versions(check.needs), date=today)


def is_known(check: Check, before: Outcome | None) -> bool:
    """Return whether a check has passed with these sources and versions."""
    if before is None or not before.passed or not before.sources:
        return False
    return (before.sources, before.versions) == (sources_of(check), versions(check.needs))


def sources_of(check: Check) -> str:
    """Return the digest of a check's sources."""
    return digest_of(check.module) if check.module else ""


def versions(needs: Sequence[str] = ()) -> str:
    """Return in words the versions of Python, torch, CUDA, Triton, transformers, and of packages by import name."""
    found = [f"Python {platform.python_version()}", f"torch {torch.__version__}"]
    if torch.version.cuda is not None:
        found.append(f"CUDA {torch.version.cuda}")
    for name in (*_DECIDE, *needs):
        with contextlib.suppress(PackageNotFoundError):
            found.append(f"{name} {version(_distribution_of(name))}")
    return ", ".join(found)


def _distribution_of(name: str) -> str:
    return name if name in _DECIDE else (packages_distributions().get(name) or [name])[0]
