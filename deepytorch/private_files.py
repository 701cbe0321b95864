"""Folders and files that only their owner can reach, since code loaded from a cache must not be another user's."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile
from pathlib import Path

import platformdirs


def cache_directory() -> Path:
    """Return the folder for files that can be made again: `~/.cache/deepytorch` on Linux, or below `XDG_CACHE_HOME`."""
    return Path(platformdirs.user_cache_dir("deepytorch"))


def prepare_private(directory: Path) -> str | None:
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


def replace_file(path: Path, text: str) -> None:
    """Write `text` to a new file in the folder of `path` (mode 0600) and rename that file to `path`."""
    handle, temporary = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        Path(temporary).replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            Path(temporary).unlink()
        raise
