"""The common part of all result files: one JSON object per file, with fields that a dataclass checks."""

from __future__ import annotations

import json
import math
from dataclasses import fields
from pathlib import Path
from typing import Any

from deepytorch.errors import DataError


def read_json(path: Path) -> Any:
    """Return the contents of a result file. Raises `DataError` when it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"The result file {path} cannot be read: {error}.") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path` as one JSON object. Raises `DataError` when the file cannot be written."""
    try:
        path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise DataError(
            f"The result file {path} cannot be written: {error.strerror}. Give another --json path."
        ) from error


def match_fields(content: Any, kind: Any, what: str) -> None:
    """Raise `DataError` unless `content` is an object with exactly the fields of the dataclass `kind`."""
    if not isinstance(content, dict):
        raise DataError(f"The {what} is a {type(content).__name__}, expected one JSON object.")
    expected = {field.name for field in fields(kind)}
    missing, unknown = sorted(expected - set(content)), sorted(set(content) - expected)
    if missing or unknown:
        raise DataError(f"The {what} lacks {missing} and has the unknown {unknown}: written by another version?")


def is_number(value: Any) -> bool:
    """Return whether `value` is a finite number."""
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def require(condition: bool, what: str, name: str, value: Any, expected: str) -> None:
    """Raise `DataError`, which names the field, unless `condition` holds."""
    if not condition:
        raise DataError(f"{name} of the {what} is {value!r}, expected {expected}.")
