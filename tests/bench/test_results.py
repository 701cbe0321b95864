"""Result files hold what was measured in the layout of their dataclasses, and nothing that no run can give."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from deepytorch.bench.results import Record, decoded, read_result, write_json, write_text
from deepytorch.errors import DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Inner(Record):
    what = "part"

    seconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Outer(Record):
    name: str
    steps: int
    ratio: float | None
    packed: bool
    arms: list[Inner]
    ms: dict[str, float]
    quartiles: dict[str, list[float]]
    links: dict[str, Any] | None = None


@dataclass(frozen=True)
class Plan:
    sizes: tuple[int, ...]
    data: Path | None = None
    inner: Inner | None = None


RESULT = Outer(
    name="one", steps=2, ratio=None, packed=True, arms=[Inner(seconds=0.5)], ms={"a": 1.0}, quartiles={"a": [1, 2, 3]}
)


def test_a_result_is_the_same_after_writing_and_reading(tmp_path):
    path = tmp_path / "result.json"
    write_json(path, RESULT.to_json())
    assert read_result(Outer, path) == RESULT
    older = {name: value for name, value in RESULT.to_json().items() if name != "links"}  # it has a default
    assert decoded(Outer, older) == RESULT


@pytest.mark.parametrize("plan", [Plan((1, 2)), Plan((), Path("rows.json"), Inner(seconds=1.0))])
def test_a_plan_is_the_same_after_a_trip_through_json(plan):
    assert decoded(Plan, json.loads(json.dumps(asdict(plan), default=str))) == plan


@pytest.mark.parametrize(
    ("wrong", "expected"),
    [
        ({"name": 3}, "text"),
        ({"steps": -1}, "a count"),
        ({"steps": 1.5}, "a count"),
        ({"steps": True}, "a count"),
        ({"ratio": math.inf}, "a finite number, 0 or more, or null"),
        ({"ratio": "fast"}, "a finite number"),
        ({"packed": 1}, "true or false"),
        ({"arms": {}}, "a list"),
        ({"arms": [1.0]}, "a list"),
        ({"ms": {"a": math.nan}}, "an object"),
        ({"ms": {"a": None}}, "an object"),
        ({"ms": [1.0]}, "an object"),
        ({"quartiles": {"a": [1.0, -1.0]}}, "an object"),
        ({"links": []}, "an object"),
    ],
)
def test_values_that_no_run_gives_are_refused(wrong, expected):
    with pytest.raises(DataError, match=f"^{next(iter(wrong))} of the result is .*, expected {expected}"):
        replace(RESULT, **wrong)


def test_another_layout_is_refused():
    content = RESULT.to_json()
    with pytest.raises(DataError, match="result is a list, expected one JSON object"):
        decoded(Outer, [])
    with pytest.raises(DataError, match=r"result lacks \['steps'\] and has the unknown \['speed'\]"):
        decoded(Outer, {name: value for name, value in content.items() if name != "steps"} | {"speed": 1})
    with pytest.raises(DataError, match=r"part lacks \['seconds'\]"):
        decoded(Outer, content | {"arms": [{}]})
    with pytest.raises(DataError, match="seconds of the part is 'x', expected a finite number"):
        decoded(Outer, content | {"arms": [{"seconds": "x"}]})


def test_files_that_cannot_be_read_or_written_are_named(tmp_path):
    with pytest.raises(DataError, match=r"none\.json cannot be read"):
        read_result(Outer, tmp_path / "none.json")
    with pytest.raises(DataError, match=r"page\.md cannot be written: .*Give another --markdown path"):
        write_text(tmp_path / "no" / "page.md", "", "--markdown")
