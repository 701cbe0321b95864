"""The environment variables of deepytorch, read and checked here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from deepytorch.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class Environment:
    """The settings that environment variables give.

    `enabled` (`DEEPYTORCH=on|off`): when off, the backend is stock Inductor and the import does nothing.
    `log_level` (`DEEPYTORCH_LOG=debug|info|warning|error|critical`): of the logger "deepytorch"; unset leaves it alone.
    `remember_links` (`DEEPYTORCH_LINKS=remember|measure`): whether a process group may take the costs of its links from
    the cache, or measures them anew, as a network that has changed needs.
    `verify` (`DEEPYTORCH=verify`): on, and steps are compared with eager from time to time, not only once.
    `verify_every` (`DEEPYTORCH_VERIFY_EVERY=K`): with `DEEPYTORCH=verify`, one step in so many is compared; unset: 50.
    `wait` (`DEEPYTORCH_COMPILE=background|wait`): whether steps wait until they are compiled, unless said otherwise.
    `gpu_background` (`DEEPYTORCH_GPU_COMPILE=wait|background`): whether another process compiles for a GPU, too; not
    yet run on one.
    `started_by_run` (`DEEPYTORCH_RUN=on|off`): set by `deepytorch run`; off leaves a process, and what it
    starts, without the import.
    `profile` (`DEEPYTORCH_PROFILE=FOLDER`): set by `deepytorch profile`; where a process writes the times of its steps.
    `cache_mb` (`DEEPYTORCH_CACHE_MB=N`): how much compiled code is kept on disk; unset: 2048.
    `keep_memory` (`DEEPYTORCH_MEMORY=keep|release`): whether memory that a step on a CPU frees stays with the process.
    """

    enabled: bool = True
    log_level: str | None = None
    remember_links: bool = True
    verify: bool = False
    verify_every: int = 50
    wait: bool = False
    gpu_background: bool = False
    started_by_run: bool = False
    profile: str | None = None
    cache_mb: int = 2048
    keep_memory: bool = True

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """Return the settings of the environment (or of `variables`). Raises `ConfigError` for a wrong value."""
        variables = os.environ if variables is None else variables
        switch = _choice(variables, "DEEPYTORCH", ("on", "off", "verify"))
        links = _choice(variables, "DEEPYTORCH_LINKS", ("remember", "measure"))
        return cls(
            enabled=switch != "off",
            log_level=_choice(variables, "DEEPYTORCH_LOG", LOG_LEVELS),
            remember_links=links != "measure",
            verify=switch == "verify",
            started_by_run=_choice(variables, "DEEPYTORCH_RUN", ("on", "off")) == "on",
            profile=variables.get("DEEPYTORCH_PROFILE") or None,
            cache_mb=_positive(variables, "DEEPYTORCH_CACHE_MB", cls.cache_mb),
            # "beside" is the earlier name of "background"
            wait=_choice(variables, "DEEPYTORCH_COMPILE", ("background", "beside", "wait")) == "wait",
            gpu_background=_choice(variables, "DEEPYTORCH_GPU_COMPILE", ("wait", "background")) == "background",
            keep_memory=_choice(variables, "DEEPYTORCH_MEMORY", ("keep", "release")) != "release",
            verify_every=_positive(variables, "DEEPYTORCH_VERIFY_EVERY", cls.verify_every),
        )


def process_environment() -> MutableMapping[str, str]:
    """Return the environment itself, for settings of others: a compiler that is started, NCCL. Not for ours."""
    return os.environ


def _choice(variables: Mapping[str, str], name: str, accepted: tuple[str, ...]) -> str | None:
    found = variables.get(name, "").strip().lower()
    if found and found not in accepted:
        raise ConfigError(
            f"environment variable {name}={variables[name]!r}; expected one of {', '.join(accepted)}: "
            f"set it to one of these, or unset it"
        )
    return found or None


def _positive(variables: Mapping[str, str], name: str, default: int) -> int:
    found = variables.get(name, "").strip()
    if not found:
        return default
    if not (found.isascii() and found.isdigit() and int(found) > 0):
        raise ConfigError(
            f"environment variable {name}={variables[name]!r}; expected a whole number from 1 on: set it to one, or "
            f"unset it"
        )
    return int(found)
