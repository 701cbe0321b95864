"""JSON values read with a check of their layout; errors say what was found, what was expected, and where."""

from __future__ import annotations

import json
import math
from collections.abc import Collection
from pathlib import Path
from typing import Any

from deepytorch.errors import DataError


def read_file(path: Path, what: str) -> Any:
    """Return the JSON value in the file `path`.

    Raises:
        DataError: the file, which the error calls `what`, cannot be read.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"The {what} {path} cannot be read: {error}. Give a JSON file.") from error


def as_object(value: Any, where: str, required: Collection[str], optional: Collection[str] = ()) -> dict[str, Any]:
    """Return `value` as a JSON object with all `required` keys and no others besides the `optional` ones."""
    if not isinstance(value, dict):
        raise DataError(f"{where} is {_shown(value)}, expected a JSON object with {', '.join(sorted(required))}.")
    missing = sorted(set(required) - set(value))
    unknown = sorted(set(value) - set(required) - set(optional))
    if missing or unknown:
        known = ", ".join([*sorted(required), *(f"{name} (optional)" for name in sorted(optional))])
        raise DataError(f"{where} lacks {missing} and has the unknown {unknown}. It may hold: {known}.")
    return value


def as_list(value: Any, where: str) -> list[Any]:
    """Return `value` as a JSON list."""
    if not isinstance(value, list):
        raise DataError(f"{where} is {_shown(value)}, expected a list.")
    return value


def as_text(value: Any, where: str, accepted: Collection[str] = ()) -> str:
    """Return `value` as text; one of `accepted`, if any are given."""
    if not isinstance(value, str) or (accepted and value not in accepted):
        expected = f"one of {', '.join(accepted)}" if accepted else "text"
        raise DataError(f"{where} is {_shown(value)}, expected {expected}.")
    return value


def as_count(value: Any, where: str, minimum: int = 0) -> int:
    """Return `value` as a whole number of at least `minimum`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise DataError(f"{where} is {_shown(value)}, expected a whole number, {minimum} or more.")
    return value


def as_number(value: Any, where: str, *, above_zero: bool = False) -> float:
    """Return `value` as a finite number that is 0 or more, or above 0."""
    good = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < 0 or (above_zero and value == 0):
        raise DataError(f"{where} is {_shown(value)}, expected a finite number {'above 0' if above_zero else '>= 0'}.")
    return float(value)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
