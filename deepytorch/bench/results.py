"""Results and plans as JSON: one object a file, whose layout is a dataclass and its fields' types.

Every benchmark writes the same layout, `Results`: what was asked for, on which machine, and a `Row` for each thing that
was measured. So one reader serves the report, comparisons with earlier results, and runs that go on where they were
stopped.
"""

from __future__ import annotations

import json
import math
from dataclasses import MISSING, asdict, dataclass, field, is_dataclass
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from deepytorch.errors import DataError

T = TypeVar("T")

_NAMES = {
    str: "text",
    bool: "true or false",
    int: "a count",
    float: "a finite number, 0 or more",
    NoneType: "null",
    Any: "any value",
}


class Record:
    """The base of dataclasses that are written to a result file: a value that no run can give raises `DataError`.

    what: the name of the record in errors.
    """

    what = "result"

    def __post_init__(self) -> None:
        """Compare every field with its type; numbers are finite and 0 or more."""
        for name, kind in get_type_hints(type(self)).items():
            value = getattr(self, name)
            self.require(_fits(value, kind), name, _expected(kind))

    def require(self, condition: bool, name: str, expected: str) -> None:
        """Raise `DataError`, which names the field, unless `condition` holds."""
        if not condition:
            raise DataError(f"{name} of the {self.what} is {getattr(self, name)!r}, expected {expected}.")

    def to_json(self) -> dict[str, Any]:
        """Return the record as plain JSON values."""
        return asdict(self)  # type: ignore[call-overload]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row(Record):
    """One line of a benchmark's tables.

    Attributes:
        key: What was run, by name: model, setup, hosts, ranks, rate, precision, ... Each row of a file has another.
        figures: Numbers by name, which ends with the unit: `step_s`, `examples_per_s`, `peak_mb`, `acc_ratio`.
        series: Numbers that follow each other, for curves; likewise.
        texts: Findings in words.
        failed: Why it could not be measured, such as "out of memory"; empty if it was.
    """

    what = "row"

    key: dict[str, str | int | float | None]
    figures: dict[str, float] = field(default_factory=dict)
    series: dict[str, list[float]] = field(default_factory=dict)
    texts: dict[str, str] = field(default_factory=dict)
    failed: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Results(Record):
    """The result file of any benchmark.

    Attributes:
        benchmark: The command's name behind `deepytorch bench`.
        command: The whole command, to repeat it.
        options: The options by name, defaults among them.
        machine: The machine in words.
        versions: Of Python, torch and other packages that were measured.
        date: The day of the last row, as 2026-11-29.
        rows: What was measured.
        notes: What somebody should know who reads the figures: what else ran, what was left out.
        layout: The version of this layout.
    """

    what = "result file"

    benchmark: str
    command: str
    options: dict[str, Any]
    machine: str
    versions: dict[str, str]
    date: str
    rows: list[Row]
    notes: list[str] = field(default_factory=list)
    layout: int = 1

    def having(self, **key: Any) -> list[Row]:
        """Return the rows whose keys have these values."""
        return [row for row in self.rows if all(row.key.get(name) == value for name, value in key.items())]

    def together(self) -> list[list[Row]]:
        """Return the rows in groups: those that were measured in turns, whose keys differ by the setup."""
        found: dict[tuple[Any, ...], list[Row]] = {}
        for row in self.rows:
            found.setdefault(tuple(pair for pair in row.key.items() if pair[0] != "setup"), []).append(row)
        return list(found.values())


_MORE_IS_BETTER = ("_per_s", "ratio", "linearity", "ddp_acc", "efficiency", "speedup")
_NEITHER = (
    "cpu_",
    "memory_",
    "disk_",
    "network_",
    "gpu_",
    "copy_",
    "predicted_",
    "forward_",
    "backward_",
    "optimizer_",
)
_LESS_IS_BETTER = ("_s", "_ms", "_us", "_mb", "_bytes", "_diff")


def direction(figure: str) -> int:
    """Return 1 for a figure of which more is better, -1 if less is, and 0 if it is neither, by its name."""
    if figure.startswith(_NEITHER):
        return 0
    if figure.endswith(_MORE_IS_BETTER):
        return 1
    return -1 if figure.endswith(_LESS_IS_BETTER) else 0


def decoded(kind: type[T], content: Any) -> T:
    """Return the dataclass `kind` that a JSON value holds. Fields that have a default may be missing.

    Raises `DataError` for another layout, and what `kind` raises for values that it does not accept.
    """
    what = getattr(kind, "what", kind.__name__)
    if not isinstance(content, dict):
        raise DataError(f"The {what} is a {type(content).__name__}, expected one JSON object.")
    kinds = get_type_hints(kind)
    required = {name for name in kinds if not _has_default(kind, name)}
    missing, unknown = sorted(required - set(content)), sorted(set(content) - set(kinds))
    if missing or unknown:
        raise DataError(f"The {what} lacks {missing} and has the unknown {unknown}: written by another version?")
    return kind(**{name: _decoded(kinds[name], value) for name, value in content.items()})


def read_result(kind: type[T], path: Path) -> T:
    """Return the result in a file. Raises `DataError` when it cannot be read or has another layout than `kind`."""
    return decoded(kind, read_json(path))


def read_json(path: Path) -> Any:
    """Return the value in a JSON file. Raises `DataError` when it cannot be read."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise DataError(f"The result file {path} cannot be read: {error}.") from error


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write `content` to `path` as one JSON object. Raises `DataError` when the file cannot be written."""
    write_text(path, json.dumps(content, indent=2) + "\n", "--json")


def write_text(path: Path, text: str, option: str) -> None:
    """Write `text` to the path given with `option`. Raises `DataError` when the file cannot be written."""
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise DataError(f"The file {path} cannot be written: {error.strerror}. Give another {option} path.") from error


def _has_default(kind: Any, name: str) -> bool:
    field = kind.__dataclass_fields__[name]
    return field.default is not MISSING or field.default_factory is not MISSING


def _decoded(kind: Any, value: Any) -> Any:
    """Return a field's value, with tuples, paths and dataclasses as its type asks for; `Record` checks the rest."""
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return None if value is None else _decoded(parts[0], value)
    if origin in (list, tuple) and isinstance(value, list):
        return origin(_decoded(parts[0], each) for each in value)
    if kind is Path:
        return Path(value)
    return decoded(kind, value) if is_dataclass(kind) and isinstance(kind, type) else value


def _fits(value: Any, kind: Any) -> bool:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return any(_fits(value, each) for each in parts)
    if origin in (list, tuple):
        return isinstance(value, origin) and all(_fits(each, parts[0]) for each in value)
    if origin is dict:
        pairs = value.items() if isinstance(value, dict) else [(None, None)]
        return all(_fits(key, parts[0]) and _fits(each, parts[1]) for key, each in pairs)
    if kind in (int, float):
        is_number = isinstance(value, int | kind) and not isinstance(value, bool)
        return is_number and math.isfinite(value) and value >= 0
    return kind is Any or isinstance(value, kind)


def _expected(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is UnionType:
        return ", or ".join(map(_expected, parts))
    if origin in (list, tuple, dict):
        return f"{'an object' if origin is dict else 'a list'} ({_expected(parts[-1 if origin is dict else 0])} each)"
    return _NAMES.get(kind, f"a {getattr(kind, '__name__', kind)}")
