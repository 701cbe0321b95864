"""`import deepytorch` never changes what a script trains: scripts as users write them, with the import and without."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from deepytorch.comm.group.native import native
from tests.scripts.runner import Runner, Scenario, compare

FOLDER = Path(__file__).with_name("scenarios")
HELPERS = {"tiny.py"}
ALWAYS = {"lightning_loop"}  # in `.ci/run`: the only one of its framework
SCENARIOS = [Scenario.read(path) for path in sorted(FOLDER.glob("*.py")) if path.name not in HELPERS]


def _marks(number: int, scenario: Scenario) -> list[pytest.MarkDecorator]:
    """The default suite runs the chosen ones, `.ci/run` every 18th of the others too, `-m "slow or matrix"` all."""
    if scenario.default:
        return []
    return [pytest.mark.slow if number % 18 == 0 or scenario.name in ALWAYS else pytest.mark.matrix]


@pytest.mark.parametrize(
    "scenario",
    [pytest.param(each, id=each.name, marks=_marks(number, each)) for number, each in enumerate(SCENARIOS)],
)
def test_a_script_records_the_same_numbers_with_the_import(
    scenario: Scenario, runner: Runner, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    if scenario.ranks > 1:
        native.load()  # compiled here, where no deadline runs
    found, imported = compare(scenario, runner, tmp_path)
    record_property("report", json.dumps(imported.report))
    shown = "\n".join([*found[:12], *(["..."] if len(found) > 12 else []), imported.error, imported.log])
    assert not found, f"{len(found)} differences\n{shown}"
    assert imported.report is not None
    steps = {name: imported.report[f"steps_{name}"] for name in ("packed", "padded")}
    if scenario.expect == "packed":
        assert steps["packed"] > 0, (steps, imported.report)
        assert steps["padded"] <= 1, (steps, imported.report)
    elif scenario.expect == "padded":
        assert steps["padded"] > 0, (steps, imported.report)
