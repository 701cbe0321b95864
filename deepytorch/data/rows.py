"""Instruction -> response rows: the embedded ones, or those of a file in the Alpaca layout."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from deepytorch.errors import DataError


@dataclass(frozen=True, slots=True)
class Row:
    """One example of instruction tuning. `input` may be empty, the two others are not."""

    instruction: str
    input: str
    output: str


def load_rows(path: str | Path | None = None) -> list[Row]:
    """Return the rows of the Alpaca-layout JSON file `path`, or the embedded ones (`library_rows`) when it is None.

    Raises `DataError` when the file cannot be read or has another layout.
    """
    if path is None:
        from deepytorch.data.library_docs import library_rows

        return library_rows()
    return read_alpaca(Path(path))


def read_alpaca(path: Path) -> list[Row]:
    """Read a JSON list of objects with "instruction", "output" and, optionally, "input" (text each).

    Other keys are not read. Rows with an empty output are left out: there is nothing to learn from them. Raises
    `DataError`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(
            f"The data file {path} cannot be read: {error.strerror}. Check the path given with --data."
        ) from error
    except ValueError as error:  # raised for bad JSON and for text that is not UTF-8
        raise DataError(f"The data file {path} is not JSON: {error}. {_LAYOUT}") from error
    if not isinstance(content, list):
        raise DataError(f"The data file {path} holds one {type(content).__name__}, not a list. {_LAYOUT}")
    rows = [_row(path, index, item) for index, item in enumerate(content)]
    rows = [row for row in rows if row.output]
    if not rows:
        raise DataError(f"The data file {path} has no row with an output. {_LAYOUT}")
    return rows


def _row(path: Path, index: int, item: Any) -> Row:
    if not isinstance(item, dict):
        raise DataError(f"Item {index} of the data file {path} is a {type(item).__name__}, not an object. {_LAYOUT}")
    texts = {key: item.get(key, "" if key == "input" else None) for key in ("instruction", "input", "output")}
    checked: dict[str, str] = {}
    for key, text in texts.items():
        if not isinstance(text, str):
            found = "missing" if text is None else f"a {type(text).__name__}"
            raise DataError(f'"{key}" of item {index} of the data file {path} is {found}, expected text. {_LAYOUT}')
        checked[key] = text
    return Row(**checked)


_LAYOUT = 'Expected the Alpaca layout: a JSON list of {"instruction": text, "input": text, "output": text}.'
