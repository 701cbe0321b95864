"""The environment variables that deepytorch listens to, read and checked here and nowhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass

from deepytorch.errors import ConfigError

LOG_LEVELS = ("debug", "info", "warning", "error", "critical")


@dataclass(frozen=True)
class Environment:
    """What the environment asks for.

    `enabled` (`DEEPYTORCH=on|off`): when off, the backend is stock Inductor and the import does nothing.
    `log_level` (`DEEPYTORCH_LOG=debug|info|warning|error|critical`): of the logger "deepytorch"; unset leaves it alone.
    `remember_links` (`DEEPYTORCH_LINKS=remember|measure`): whether a process group may take the costs of its links from
    the cache, or measures them anew, as a network that has changed needs.
    """

    enabled: bool = True
    log_level: str | None = None
    remember_links: bool = True

    @classmethod
    def read(cls, variables: Mapping[str, str] | None = None) -> Environment:
        """The environment of this process (or `variables`); `ConfigError` for a value that is not accepted."""
        variables = os.environ if variables is None else variables
        switch = _choice(variables, "DEEPYTORCH", ("on", "off"))
        links = _choice(variables, "DEEPYTORCH_LINKS", ("remember", "measure"))
        return cls(
            enabled=switch != "off",
            log_level=_choice(variables, "DEEPYTORCH_LOG", LOG_LEVELS),
            remember_links=links != "measure",
        )


def process_environment() -> MutableMapping[str, str]:
    """The environment itself, for what it tells others: a compiler that is started, NCCL. Not for settings of ours."""
    return os.environ


def _choice(variables: Mapping[str, str], name: str, accepted: tuple[str, ...]) -> str | None:
    found = variables.get(name, "").strip().lower()
    if found and found not in accepted:
        raise ConfigError(
            f"environment variable {name}={variables[name]!r}; expected one of {', '.join(accepted)}: "
            f"set it to one of these, or unset it"
        )
    return found or None
