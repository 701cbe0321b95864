"""Folders and files that only their owner can reach, since code loaded from a cache must not be another user's."""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import platformdirs
from filelock import FileLock

_LOCK_SECONDS = 5.0  # for which a process waits for another one that writes the same file


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


def is_private(path: Path) -> bool:
    """Make the two folders that a file lies in for this user alone; return whether they are."""
    return all(prepare_private(folder) is None for folder in (path.parent.parent, path.parent))


def read_private_json(path: Path) -> Any:
    """Return the JSON value of a file in two private folders; None if there is none that can be trusted and read."""
    if not path.exists() or not is_private(path):
        return None
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def write_private_json(path: Path, content: Any) -> None:
    """Write a JSON value to a file in two private folders, if that can be done."""
    if is_private(path):
        with contextlib.suppress(OSError):
            replace_file(path, json.dumps(content, indent=1))


def add_to_private_json(path: Path, key: str, value: Any, most: int = 4096) -> None:
    """Set a key of the JSON object in a file in two private folders, if that can be done: processes may do so at once.

    most: the number of keys that are kept; the oldest ones go.
    """
    if not is_private(path):
        return
    try:
        with FileLock(path.with_suffix(".lock"), timeout=_LOCK_SECONDS, mode=0o600):
            content = read_private_json(path)
            content = content if isinstance(content, dict) else {}
            content.pop(key, None)  # the newest one is the last
            kept = dict([*content.items(), (key, value)][-most:])
            replace_file(path, json.dumps(kept, indent=1))
    except (OSError, NotImplementedError):  # a file system without locks raises one of these
        return


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
