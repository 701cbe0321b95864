"""JSON files kept in the user's cache directory, for what is slow to make and easy to make again.

Nothing here may stop a run: a cache that cannot be trusted, read or written is left alone, and the value is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import os
import stat
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import platformdirs

from deepytorch.log import once


def cached_json(name: str, build: Callable[[], Any], *, directory: Path | None = None) -> Any:
    """Return the value of `build()`, from `<directory>/<name>.json` when that file holds one.

    `build` returns plain JSON values, and `name` says everything that the value depends on (versions included).
    `directory` is the user's cache directory unless given. The file is replaced in one rename, so that a reader never
    sees half of one.
    """
    directory = Path(platformdirs.user_cache_dir("deepytorch")) if directory is None else directory
    refusal = _prepare(directory)
    if refusal is not None:
        once(logging.WARNING, "The cache directory %s is not used: %s", directory, refusal)
        return build()
    path = directory / f"{name}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    value = build()
    try:
        _replace(path, json.dumps(value, ensure_ascii=False))
    except OSError as error:
        once(logging.WARNING, "The cache file %s could not be written: %s", path, error)
    return value


def source_digest(path: str) -> str:
    """Return a short digest of a source file, for the name of what it makes: changed code finds no stale value."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]


def _prepare(directory: Path) -> str | None:
    """Make `directory` for this user alone; return why it must not be used, or None."""
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = directory.lstat()
    except OSError as error:
        return f"{error}."
    if not stat.S_ISDIR(status.st_mode):
        return "it is not a directory (a link is not followed). Remove it."
    if not hasattr(os, "getuid"):  # Windows: the user's own folder, where neither owner nor mode is told
        return None
    if status.st_uid != os.getuid():
        return f"user {status.st_uid} owns it, expected {os.getuid()}. Change its owner."
    if status.st_mode & 0o077:
        mode = stat.S_IMODE(status.st_mode)
        return f"other users have access to it (mode {mode:04o}, expected 0700). Run `chmod 700` on it."
    return None


def _replace(path: Path, text: str) -> None:
    """Write `text` beside `path` (mode 0600) and rename it over `path`."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
