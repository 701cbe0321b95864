"""`deepytorch bench hosts`: what it refuses and plans, and the rows, the matrix and the verdict of measured losses."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from deepytorch.bench.hosts import ALL, HOSTS, RECIPES, WITH, WITH_AGAIN, WITHOUT, WITHOUT_AGAIN, Hosts, HostsOptions
from deepytorch.bench.results import Results, Row, read_result
from deepytorch.bench.table import markdown_of
from deepytorch.cli import app
from deepytorch.errors import ConfigError, DataError, ParityError
from tests.bench.trained import results

DOCS = Path(__file__).parents[2] / "docs"
LOSSES = (4.0, 3.0, 2.0, 1.0)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"hosts": ("jax",)}, 'hosts has "jax"'),
        ({"models": ("gpt2",)}, "expected one of llama, bert, t5"),
        ({"size": "huge"}, "expected one of tiny"),
        ({"steps": 3}, "steps is 3; expected 4 or more: the last two"),
        ({"data": Path("gone.json")}, r"gone\.json is not there"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(DataError if "data" in given else ConfigError, match=words):
        HostsOptions(**given)


def test_groups_of_hosts_are_named_at_once_and_every_loop_is_there() -> None:
    cells = Hosts().cells(HostsOptions(hosts=("recipes", "plain", "dpo"), models=("llama",)))
    assert [cell.key["host"] for cell in cells] == [*RECIPES, "plain"]
    assert len(Hosts().cells(HostsOptions())) == 3 * len(HOSTS)
    for host in ALL.values():
        module, _, name = host.loop.rpartition(".")
        assert hasattr(import_module(f"deepytorch.bench.{module}"), name)


def test_each_goes_on_from_the_checkpoint_of_the_other() -> None:
    plain, lightning = Hosts().cells(HostsOptions(hosts=("plain", "lightning"), models=("llama",)))
    for cell, then in ((plain, WITHOUT), (lightning, "")):
        jobs = {setup.name: (setup.imports, setup.job.begins, setup.job.then) for setup in cell.setups}
        assert jobs.pop(WITHOUT) == (False, "", "")
        assert jobs.pop(WITH) == (True, "", then)
        assert jobs.pop(WITHOUT_AGAIN) == (False, WITH, "")
        assert jobs == ({} if then else {WITH_AGAIN: (True, WITHOUT, "")})


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepytorch.bench.hosts.find_spec", lambda name: None)
    cells = Hosts().cells(HostsOptions(hosts=("plain", "zero1", "trl"), models=("bert",)))
    assert [cell.impossible for cell in cells] == [None, "not installed: deepspeed", "it is for llama"]


def rank(*losses: float, seconds: float = 2.0, again: tuple[float, ...] = (), said: str = "") -> dict[str, Any]:
    """Return what a rank measures: its last two steps take `seconds`, and those before, which compile, 9 s."""
    texts = {"padding": "in the graph", "fallbacks": said}
    timed = [*[9.0] * (len(losses) - 2), seconds, seconds]
    figures = {"steps_packed": 5, "steps_padded": 1}
    return {"losses": [*losses], "seconds": timed, "again": [*again], "figures": figures, "texts": texts}


def found(last: float = 1.0, again: float = 1.0, said: str = "") -> dict[str, list[dict[str, Any]]]:
    """Return what two ranks of each setup measure. last, again: the last losses of one with the import."""
    ours = [
        rank(*LOSSES[:3], loss, seconds=1.0, again=(2.0, more), said=said) for loss, more in ((1.0, 1.0), (last, again))
    ]
    return {WITHOUT: [rank(*LOSSES)] * 2, WITH: ours, WITHOUT_AGAIN: [rank(2.0, 1.0)] * 2}


def rows_of(measured: dict[str, list[dict[str, Any]]]) -> list[Row]:
    options = HostsOptions(hosts=("ddp",), models=("llama",), steps=4)
    [cell] = Hosts().cells(options)
    failed = [Row(key={**cell.key, "setup": each.name}, failed="ended") for each in cell.setups]
    return [*Hosts().rows(options, cell, measured), *(row for row in failed if row.key["setup"] not in measured)]


def results_of(rows: list[Row]) -> Results:
    return results("hosts", rows, size="demo", batch_size=8, max_length=384, steps=4, data=None)


def judged(measured: dict[str, list[dict[str, Any]]]) -> tuple[str, list[Row]]:
    """Return the line of the matrix and the rows, once these are found to be right."""
    rows = rows_of(measured)
    Hosts().verdict(results_of(rows))
    [line] = Hosts().lines(rows)
    return line, rows


def test_a_line_of_the_matrix() -> None:
    line, _ = judged(found(last=1.0001))
    assert line == "ddp, llama, 2, equal (1e-04), 2.00x, equal (0e+00), in the graph, 5 of 6 steps"


@pytest.mark.parametrize(
    "measured",
    [
        found(last=1.1),
        found(last=math.nan),
        found(again=1.1),
        found() | {WITHOUT: [rank(4.0, 3.0, math.nan, 1.0)] * 2},
        found() | {WITHOUT_AGAIN: [rank(2.0, math.nan)] * 2},
    ],
    ids=["a loss", "no number", "a loss behind a checkpoint", "no number without", "no number behind a checkpoint"],
)
def test_losses_that_differ_are_wrong(measured: dict[str, list[dict[str, Any]]]) -> None:
    with pytest.raises(ParityError, match="for no known reason: ddp, llama"):
        judged(measured)


def test_a_difference_that_is_named_is_none_and_what_failed_is_named() -> None:
    line, _ = judged(found(last=1.1, said="it draws at random"))
    assert "DIFFER (1e-01)" in line
    assert line.endswith(", it draws at random")
    measured = found()
    del measured[WITHOUT_AGAIN]
    line, _ = judged(measured)
    assert line.endswith("2.00x, in the graph, 5 of 6 steps, without, continued: ended")


def test_where_one_process_cannot_continue_two_new_ones_are_compared() -> None:
    measured = found() | {WITH: [rank(*LOSSES)] * 2, WITH_AGAIN: [rank(2.0, 1.0001)] * 2}
    _, rows = judged(measured)
    assert rows[2].figures["checkpoint_rel_diff"] == pytest.approx(1e-4)


def test_losses_that_differ_are_an_error_of_the_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("deepytorch.bench.run.run_benchmark", lambda *_: results_of(rows_of(found(last=1.1))))
    shown = CliRunner().invoke(app, ["bench", "hosts", "--out", str(tmp_path / "hosts.json")])
    assert isinstance(shown.exception, ParityError)
    assert "for no known reason: ddp, llama" in str(shown.exception)


def test_the_page_on_compatibility_has_the_matrix_of_its_result_file() -> None:
    [table] = Hosts().tables(read_result(Results, DOCS / "results" / "hosts-demo-cpu2.json"))
    assert "\n".join(markdown_of(table)) in (DOCS / "compatibility.md").read_text()
