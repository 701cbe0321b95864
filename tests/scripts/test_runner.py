"""The runner of scenarios finds what it is there to find."""

from __future__ import annotations

import math
import textwrap
from pathlib import Path

import pytest

from tests.scripts.runner import Outcome, Runner, Scenario, compare, differences


def script(folder: Path, text: str) -> Scenario:
    path = folder / "script.py"
    path.write_text(textwrap.dedent(text))
    (found,) = Scenario.read(path)
    return found


def outcome(*history: list[float], raised: str | None = None) -> Outcome:
    return Outcome(list(history), [raised], "", "", 0.0, None)


def test_constants_of_a_script_are_read_without_running_it(tmp_path: Path) -> None:
    found = script(tmp_path, 'DEFAULT = True\nRANKS = 2\nLOWERING = "inductor"\nEXPECT = "packed"\nraise ValueError\n')
    assert found == Scenario(tmp_path / "script.py", True, 2, "inductor", expect="packed")
    assert script(tmp_path, "history = []") == Scenario(tmp_path / "script.py")


def test_cases_of_a_script_are_read_and_each_is_run_by_its_name(runner: Runner, tmp_path: Path) -> None:
    path = tmp_path / "cases.py"
    path.write_text(
        "import sys\nRANKS = 2\ncase = lambda *_, **__: lambda function: function\nhistory = [len(sys.argv[1])]\n"
        "@case\ndef one(): pass\n@case(ranks=1, default=True)\ndef other(): pass\ndef neither(): pass\n"
    )
    one, other = Scenario.read(path)
    assert one == Scenario(path, ranks=2, case="one")
    assert other == Scenario(path, default=True, ranks=1, case="other")
    found, imported = compare(other, runner, tmp_path)
    assert (found, imported.history) == ([], [[5.0]])


def test_a_script_that_knows_of_the_import_differs(runner: Runner, tmp_path: Path) -> None:
    text = """
        import os, sys
        history = ["deepytorch" in sys.modules, os.environ.get("DEEPYTORCH") == "off", __name__ == "__main__"]
    """
    found, imported = compare(script(tmp_path, text), runner, tmp_path)
    assert len(found) == 2
    assert imported.history == [[1.0], [0.0], [1.0]]
    assert imported.report is not None


def test_a_script_that_does_not_know_of_it_is_the_same(runner: Runner, tmp_path: Path) -> None:
    text = """
        import torch
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 3)).mean().backward()
        optimizer.step()
        history = [model.weight, {"bias": [model.bias]}]
    """
    found, imported = compare(script(tmp_path, text), runner, tmp_path)
    assert found == []
    assert [len(entry) for entry in imported.history] == [3, 1]


def test_an_exception_with_the_import_is_a_difference_and_what_was_recorded_is_kept(
    runner: Runner, tmp_path: Path
) -> None:
    text = """
        import sys
        history = [1.0]
        if "deepytorch" in sys.modules:
            raise ValueError("of the script")
    """
    found, imported = compare(script(tmp_path, text), runner, tmp_path)
    assert found == ["raised ['ValueError'], without the import [None]"]
    assert imported.history == [[1.0]]
    assert "of the script" in imported.error


def test_a_traceback_in_the_log_is_a_difference(runner: Runner, tmp_path: Path) -> None:
    text = """
        import sys
        history = []
        if "deepytorch" in sys.modules:
            sys.stderr.write("Traceback (most recent call last)\\n")
    """
    found, imported = compare(script(tmp_path, text), runner, tmp_path)
    assert found == ["a traceback in the log"]
    assert "Traceback" in imported.log


def test_a_script_that_does_not_end_is_killed_at_its_deadline(runner: Runner, tmp_path: Path) -> None:
    with pytest.raises(TimeoutError, match=r"script \(off\) was killed after 0.5 s\nbegun"):
        runner.run(
            script(tmp_path, "import time\nprint('begun', flush=True)\ntime.sleep(60)"), "off", tmp_path, deadline_s=0.5
        )
    (tmp_path / "again").mkdir()
    assert runner.run(script(tmp_path, "history = [2]"), "off", tmp_path / "again").history == [[2.0]]


def test_a_script_that_dies_is_an_error(runner: Runner, tmp_path: Path) -> None:
    with pytest.raises(ChildProcessError, match=r"ended with \[3\]"):
        runner.run(script(tmp_path, "import os\nos._exit(3)"), "off", tmp_path)


def test_a_script_that_ends_the_fork_server_costs_no_other_one(runner: Runner, tmp_path: Path) -> None:
    ending = script(tmp_path, "import os, signal\nos.kill(os.getppid(), signal.SIGTERM)")
    with pytest.raises(ChildProcessError, match="the fork server ended with status -15"):
        runner.run(ending, "off", tmp_path)
    (tmp_path / "again").mkdir()
    assert runner.run(script(tmp_path, "history = [2]"), "off", tmp_path / "again").history == [[2.0]]


def test_ranks_find_each_other(runner: Runner, tmp_path: Path) -> None:
    text = """
        import torch, torch.distributed as dist
        RANKS = 2
        dist.init_process_group("gloo")
        total = torch.tensor(dist.get_rank() + 1.0)
        dist.all_reduce(total)
        history = [dist.get_rank(), total]
        dist.destroy_process_group()
    """
    found = runner.run(script(tmp_path, text), "off", tmp_path)
    assert found.history == [[0.0], [3.0], [1.0], [3.0]]
    assert found.raised == [None, None]


def test_weights_are_moved_once_by_their_last_bit(runner: Runner, tmp_path: Path) -> None:
    text = """
        import torch
        PRECISION = "PRECISION_HERE"
        weight = torch.nn.Parameter(torch.ones(100))
        torch.optim.SGD([weight], lr=0.1)
        torch.optim.Adam([weight], lr=0.1)
        history = [weight - 1, torch.rand(1)]
    """
    for precision, steps in {"float32": {2.0**-23, -(2.0**-24)}, "bfloat16": {2.0**-8, -(2.0**-8)}}.items():
        (tmp_path / precision).mkdir()
        scenario = script(
            tmp_path,
            "import torch\ntorch.manual_seed(0)\n" + textwrap.dedent(text.replace("PRECISION_HERE", precision)),
        )
        moved = runner.run(scenario, "moved-0", tmp_path / precision)
        off = runner.run(scenario, "off", tmp_path / precision)
        assert set(moved.history[0]) == steps
        assert set(off.history[0]) == {0.0}
        assert moved.history[1] == off.history[1]


def test_numbers_are_equal_within_the_tolerance() -> None:
    reference = outcome([1.0, 0.0], [math.nan, math.inf])
    assert differences(reference, outcome([1.00009, 1e-7], [math.nan, math.inf])) == []
    assert len(differences(reference, outcome([1.00011, 1e-5], [0.0, -math.inf]))) == 4
    assert len(differences(reference, outcome([math.nan, math.inf], [math.nan, math.inf]))) == 2


def test_the_tolerance_is_ten_times_what_a_last_bit_changes() -> None:
    reference, moved = outcome([1.0, 1.0], [1.0]), outcome([1.001, 1.0], [math.inf])
    assert differences(reference, outcome([1.009, 1.0], [1.0]), [moved]) == []
    assert len(differences(reference, outcome([1.011, 1.0], [1.0]), [moved])) == 1
    assert len(differences(reference, outcome([1.0, 1.009], [1.009]), [moved])) == 2
    near = outcome([1.0, 1.0001], [1.0])
    assert differences(reference, outcome([1.009, 1.0009], [1.0]), [near, moved]) == []
    assert len(differences(reference, outcome([1.0, 1.0011], [1.0]), [near, moved])) == 1


def test_other_counts_and_other_exceptions_are_differences() -> None:
    assert differences(outcome([1.0]), outcome([1.0], [2.0])) == ["recorded [1, 1] numbers, without the import [1]"]
    assert differences(outcome([1.0]), outcome([1.0], raised="KeyError")) != []
    assert differences(outcome([1.0], raised="KeyError"), outcome([1.0], raised="KeyError")) == []


def test_entries_are_numbers_tensors_or_made_of_these(runner: Runner, tmp_path: Path) -> None:
    text = """
        import torch
        history = [True, {"a": [1, (2.5, range(2))]}, torch.eye(2, requires_grad=True), float("nan")]
    """
    [one, two, three, [last]] = runner.run(script(tmp_path, text), "off", tmp_path).history
    assert (one, two, three) == ([1.0], [1.0, 2.5, 0.0, 1.0], [1.0, 0.0, 0.0, 1.0])
    assert math.isnan(last)
