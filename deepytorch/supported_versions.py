"""The versions that deepytorch is tested with, stated only here: doctor warns of others, and pyproject.toml agrees.

The results with each version are in docs/compatibility.md. deepytorch can be installed with a newer torch, too: an
install must not replace the torch of its user.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class Tested:
    """A range of versions. oldest, newest: first numbers of a version; each version that begins so is in the range."""

    name: str
    oldest: tuple[int, ...]
    newest: tuple[int, ...]

    def __str__(self) -> str:
        return f"{_dotted(self.oldest)} to {_dotted(self.newest)}{'.x' if len(self.newest) == 1 else ''}"

    def is_older(self, version: str) -> bool:
        """Return whether `version`, as a package gives its own ("2.11.0+cpu"), is below the range."""
        return _numbers(version)[: len(self.oldest)] < self.oldest

    def is_newer(self, version: str) -> bool:
        """Return whether `version` is above the range."""
        return _numbers(version)[: len(self.newest)] > self.newest


PYTHON = Tested("Python", (3, 10), (3, 13))
TORCH = Tested("torch", (2, 11), (2, 15))
TRANSFORMERS = Tested("transformers", (4, 57), (5,))  # optional

# The Triton that a torch release is built and tested with; another one may not even import.
TRITON_OF_TORCH = {"2.11": "3.6", "2.12": "3.7", "2.13": "3.7", "2.14": "3.8", "2.15": "3.9"}


def _dotted(numbers: tuple[int, ...]) -> str:
    return ".".join(map(str, numbers))


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version: (2, 15, 0) of "2.15.0a0+git1234"."""
    found = re.match(r"\d+(\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
