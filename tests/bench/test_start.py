"""`deepytorch bench start`: a script's steps are timed from its process's beginning, in every way of running it."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepytorch.bench.launch import RankError
from deepytorch.bench.results import Results, read_result
from deepytorch.bench.run import run_benchmark
from deepytorch.bench.start import COLD, EAGER, WARM, Start, StartOptions, compared
from deepytorch.cli import app
from deepytorch.errors import ConfigError, ScriptError
from tests.bench.trained import results

SCRIPT = """
import os
import sys
import torch
assert os.environ["DEEPYTORCH_COMPILE"] == "background"
if "fail" in sys.argv:
    raise ValueError("as it was told")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
while "train" in sys.argv:
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return str(path)


def test_a_run_is_compared_at_every_step() -> None:
    eager = [4.0, 5.0, 6.0, 7.0]
    assert compared([4.0, 6.0, 6.0, 6.5], eager) == {"least_ratio": 5 / 6, "ahead_from_step": 3}
    assert compared([3.0, 4.0, 5.0, 8.0], eager) == {"least_ratio": 7 / 8}  # behind at the end
    assert compared([3.0, 4.0, 5.0, 6.0], eager) == {"least_ratio": 7 / 6, "ahead_from_step": 1}


def test_rows_and_the_table_are_of_medians() -> None:
    def runs(*ends: float, first_packed: float | None = None, **report: float) -> list[dict[str, Any]]:
        return [
            {"seconds": [4.0 * swing, *ends], "first_packed": first_packed, "report": report} for swing in (1, 2, 0.5)
        ]

    options = StartOptions(steps=3, rounds=3, ranks=2)
    [cell] = Start().cells(options)
    warm = runs(4.5, 5.0, first_packed=4.5, compiles=1, change_over_seconds=4.8)
    rows = Start().rows(options, cell, {EAGER: runs(6.0, 8.0), COLD: runs(7.0, 8.0), WARM: warm})
    assert [row.series["over_s"] for row in rows] == [[4.0, 6.0, 8.0], [4.0, 7.0, 8.0], [4.0, 4.5, 5.0]]
    found = results("start", rows, **asdict(options))
    [table] = Start().tables(found)
    assert table.title == "script start_script.py, ranks 2: seconds since the process began, medians of 3"
    assert table.columns[4] == "step 3"
    assert table.rows == (
        (EAGER, "4.0", "-", "-", "8.0", "", "", ""),
        (COLD, "4.0", "-", "-", "8.0", "1.17x", "3", "0"),
        (WARM, "4.0", "4.5", "4.8", "5.0", "1.00x", "1", "1"),
    )
    [plot] = Start().plots(found)
    assert [(each.name, each.x[-1], each.y[-1]) for each in plot.series] == [
        (EAGER, 8.0, 3),
        (COLD, 8.0, 3),
        (WARM, 5.0, 3),
    ]


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="steps is 0; expected 1 or more"):
        StartOptions(steps=0)
    with pytest.raises(ConfigError, match=r"gone\.py is not there; expected the path of a Python file"):
        StartOptions(command=(str(tmp_path / "gone.py"),))


@pytest.mark.slow
def test_a_script_is_timed_in_every_way(script: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = ["bench", "start", "--steps", "5", "--rounds", "1", "--out", str(file), script, "train", "--steps"]
    shown = CliRunner().invoke(app, command, catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    assert "train.py, ranks 1: seconds since the process began" in shown.output
    found = read_result(Results, file)
    assert found.options["command"] == [script, "train", "--steps"]  # behind the script, options are the script's
    assert [row.key["setup"] for row in found.rows] == [EAGER, COLD, WARM]
    for row in found.rows:
        steps = row.series["over_s"]
        assert len(steps) == 5
        assert 0.3 < steps[0] < 120  # torch was imported before
        assert steps == sorted(steps)
    assert "least_ratio" in found.rows[1].figures


@pytest.mark.slow
def test_a_script_that_fails_is_quoted_and_one_that_does_not_train_is_refused(script: str) -> None:
    with pytest.raises(
        RankError, match=r"(?s)train\.py \(eager\) ended with exit status 1.*ValueError: as it was told"
    ):
        run_benchmark(Start(), StartOptions(command=(script, "fail"), steps=5, rounds=1))
    with pytest.raises(ScriptError, match="made no step of an optimizer"):
        run_benchmark(Start(), StartOptions(command=(script,), steps=5, rounds=1))


BUILDS = """
import os
import sys
import torch
made = os.path.join(os.environ["XDG_CACHE_HOME"], "made")
with open(sys.argv[1], "a") as found:
    found.write(f"{os.path.exists(made)} ")
if "deepytorch" in sys.modules:
    from deepytorch import background
    wait = "from deepytorch.background import end_with_parent; end_with_parent({parent}); import time; time.sleep(4); "
    background.start(wait + f"open({made!r}, 'w').close()")
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(int(sys.argv[2])):
    model(torch.rand(2, 4)).sum().backward()
    optimizer.step()
"""


@pytest.mark.slow
@pytest.mark.parametrize("steps", [3, 9], ids=["a script that ends by itself", "a script that is ended"])
def test_a_warm_run_finds_what_the_cold_one_was_still_making(tmp_path: Path, steps: int) -> None:
    script, found = tmp_path / "builds.py", tmp_path / "found"
    script.write_text(BUILDS)
    run_benchmark(Start(), StartOptions(command=(str(script), str(found), str(steps)), steps=5, rounds=1))
    assert found.read_text().split() == ["False", "False", "False", "True"]  # uncounted, eager, cold, warm
