"""JSON files in the user's cache directory, for values that are slow to make but easy to make again.

Nothing here may stop a run: a cache that cannot be trusted, read or written is ignored, and the value is made anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

from deepytorch.log import once
from deepytorch.private_files import cache_directory, prepare_private, replace_file


def cached_json(name: str, build: Callable[[], Any], *, directory: Path | None = None) -> Any:
    """Return the value of `build()`, from `<directory>/<name>.json` when that file holds one.

    `build` returns plain JSON values, and `name` contains everything that the value depends on (versions included).
    `directory` is the user's cache directory unless given. The file is replaced in one rename, so that a reader never
    sees half a file.
    """
    directory = cache_directory() if directory is None else directory
    refusal = prepare_private(directory)
    if refusal is not None:
        once(logging.WARNING, "The cache directory %s is not used: %s", directory, refusal)
        return build()
    path = directory / f"{name}.json"
    with contextlib.suppress(OSError, ValueError):
        return json.loads(path.read_text(encoding="utf-8"))
    value = build()
    try:
        replace_file(path, json.dumps(value, ensure_ascii=False))
    except OSError as error:
        once(logging.WARNING, "The cache file %s could not be written: %s", path, error)
    return value


def source_digest(path: str) -> str:
    """Return a short digest of a source file, for the name of its cached value: changed code finds no stale value."""
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]
