"""Packages from a folder, for machines without a registry: rivals that are measured beside."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

from deepytorch.errors import ConfigError


@contextlib.contextmanager
def packages_from(folder: Path | None) -> Iterator[None]:
    """Let this process, and those that it starts in the block, import packages of a folder.

    folder: wheels, which are unpacked into a temporary folder, or packages as `pip install --target` leaves them. They
    stand behind the working directory and before what is installed. Raises `ConfigError` if it is no folder.
    """
    if folder is None:
        yield
        return
    if not folder.is_dir():
        raise ConfigError(f"--packages is {folder}, which is no folder; expected one with wheels or packages.")
    with tempfile.TemporaryDirectory(prefix="deepytorch-packages-") as unpacked:
        for wheel in sorted(folder.glob("*.whl")):
            with zipfile.ZipFile(wheel) as content:
                content.extractall(unpacked)
        paths = [str(folder.resolve()), unpacked]
        before, path = os.environ.get("PYTHONPATH"), list(sys.path)
        os.environ["PYTHONPATH"] = os.pathsep.join([*([before] if before else []), *paths])
        sys.path[1:1] = paths
        try:
            yield
        finally:
            sys.path[:] = path
            if before is None:
                del os.environ["PYTHONPATH"]
            else:
                os.environ["PYTHONPATH"] = before


def missing(needs: Sequence[str]) -> str | None:
    """Return why a check that needs these packages cannot be made; None if all are there."""
    found = [name for name in needs if find_spec(name) is None]
    return f"{' and '.join(found)} not installed; --packages takes a folder of them" if found else None
