"""`deepytorch bench start`: a script's steps are timed from its process's beginning, in every way of running it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from deepytorch.bench.start import COLD, EAGER, WARM, Arm, StartOptions, run_start
from deepytorch.cli import app
from deepytorch.errors import ConfigError, ScriptError

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


def test_an_arm_is_compared_at_every_step() -> None:
    eager = Arm(name=EAGER, steps=(4.0, 5.0, 6.0, 7.0))
    cold = Arm(name=COLD, steps=(4.0, 6.0, 6.0, 6.5))
    assert cold.ratios(eager) == [1.0, 1.2, 1.0, 6.5 / 7.0]
    assert cold.ahead_from(eager) == 3
    assert Arm(name=COLD, steps=(3.0, 4.0, 5.0, 8.0)).ahead_from(eager) is None
    assert Arm(name=COLD, steps=(3.0, 4.0, 5.0, 6.0)).ahead_from(eager) == 1


def test_what_cannot_be_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="steps is 0; expected 1 or more"):
        StartOptions(steps=0)
    with pytest.raises(ConfigError, match=r"gone\.py is not there; expected the path of a Python file"):
        StartOptions(command=(str(tmp_path / "gone.py"),))


@pytest.mark.slow
def test_a_script_is_timed_in_every_way(script: str, tmp_path: Path) -> None:
    file = tmp_path / "found.json"
    command = ["bench", "start", "--steps", "5", "--rounds", "1", "--json", str(file), script, "train"]
    shown = CliRunner().invoke(app, command, catch_exceptions=False)
    assert shown.exit_code == 0, shown.output
    assert "train.py: seconds since the process began" in shown.output
    found = json.loads(file.read_text())
    assert found["options"]["command"] == ["train.py", "train"]
    assert [arm["name"] for arm in found["arms"]] == [EAGER, COLD, WARM]
    for arm in found["arms"]:
        assert len(arm["steps"]) == 5
        assert 0.3 < arm["steps"][0] < 120  # torch was imported before
        assert arm["steps"] == sorted(arm["steps"])
        assert arm["worst"] >= arm["steps"][4] / found["arms"][0]["steps"][4]


@pytest.mark.slow
def test_a_script_that_fails_is_quoted_and_one_that_does_not_train_is_refused(script: str) -> None:
    with pytest.raises(ScriptError, match=r"(?s)train\.py \(eager\) ended with 1.*ValueError: as it was told"):
        run_start(StartOptions(command=(script, "fail"), steps=5, rounds=1))
    with pytest.raises(ScriptError, match="made no step of an optimizer"):
        run_start(StartOptions(command=(script,), steps=5, rounds=1))


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
    run_start(StartOptions(command=(str(script), str(found), str(steps)), steps=5, rounds=1))
    assert found.read_text().split() == ["False", "False", "False", "True"]  # uncounted, eager, cold, warm
