"""`deepytorch bench hosts`: what it refuses and plans, and the rows, the matrix and the verdict of measured losses."""

from __future__ import annotations

import math
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from deepytorch.bench.hosts import (
    ALL,
    HOSTS,
    RECIPES,
    WITH,
    WITH_AGAIN,
    WITHOUT,
    WITHOUT_AGAIN,
    Hosts,
    HostsOptions,
)
from deepytorch.bench.results import Results, Row, read_result
from deepytorch.bench.table import markdown_of
from deepytorch.errors import ConfigError, DataError, ParityError

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.parametrize(
    ("given", "kind", "words"),
    [
        ({"hosts": ("jax",)}, ConfigError, 'hosts has "jax"'),
        ({"models": ("gpt2",)}, ConfigError, "expected one of llama, bert, t5"),
        ({"size": "huge"}, ConfigError, "expected one of tiny"),
        ({"steps": 3}, ConfigError, "steps is 3; expected 4 or more: the last two"),
        ({"data": Path("gone.json")}, DataError, r"gone\.json is not there"),
    ],
)
def test_options_that_make_no_sense_are_refused(given: dict[str, Any], kind: type[Exception], words: str) -> None:
    with pytest.raises(kind, match=words):
        HostsOptions(**given)


def test_groups_of_hosts_are_named_at_once() -> None:
    cells = Hosts().cells(HostsOptions(hosts=("recipes", "plain", "dpo"), models=("llama",)))
    assert [cell.key["host"] for cell in cells] == [*RECIPES, "plain"]
    assert len(Hosts().cells(HostsOptions())) == 3 * len(HOSTS)


def test_each_goes_on_from_the_checkpoint_of_the_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepytorch.bench.hosts.find_spec", lambda name: object())
    plain, lightning = Hosts().cells(HostsOptions(hosts=("plain", "lightning"), models=("llama",)))
    for cell, then in ((plain, WITHOUT), (lightning, "")):
        jobs = {setup.name: (setup.imports, setup.job.begins, setup.job.then) for setup in cell.setups}
        assert jobs[WITHOUT] == (False, "", "")
        assert jobs[WITH] == (True, "", then)
        assert jobs[WITHOUT_AGAIN] == (False, WITH, "")
    assert jobs[WITH_AGAIN] == (True, WITHOUT, "")


def test_what_cannot_run_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deepytorch.bench.hosts.find_spec", lambda name: None)
    cells = Hosts().cells(HostsOptions(hosts=("plain", "zero1", "trl"), models=("bert",)))
    assert [cell.impossible for cell in cells] == [None, "not installed: deepspeed", "it is for llama"]


def test_the_loop_of_every_host_is_there() -> None:
    for host in ALL.values():
        module, _, name = host.loop.rpartition(".")
        assert hasattr(import_module(f"deepytorch.bench.{module}"), name)


def rank(*losses: float, seconds: float = 2.0, again: tuple[float, ...] = ()) -> dict[str, Any]:
    figures, texts = {"steps_packed": 5, "steps_padded": 1}, {"padding": "in the graph", "fallbacks": ""}
    # the first steps are slow: they compile
    timed = [9.0] * (len(losses) - len(losses) // 2) + [seconds] * (len(losses) // 2)
    return {"losses": [*losses], "seconds": timed, "again": [*again], "figures": figures, "texts": texts}


def rows_of(found: dict[str, list[dict[str, Any]]]) -> list[Row]:
    options = HostsOptions(hosts=("ddp",), models=("llama",), steps=4)
    [cell] = Hosts().cells(options)
    return Hosts().rows(options, cell, found)


LOSSES = (4.0, 3.0, 2.0, 1.0)


def found(losses: tuple[float, ...] = LOSSES, again: tuple[float, ...] = (2.0, 1.0)) -> dict[str, list[dict[str, Any]]]:
    """Return what two ranks of each setup measure. losses, again: of the second rank with the import."""
    return {
        WITHOUT: [rank(*LOSSES), rank(*LOSSES)],
        WITH: [rank(*LOSSES, seconds=1.0, again=(2.0, 1.0)), rank(*losses, seconds=1.0, again=again)],
        WITHOUT_AGAIN: [rank(2.0, 1.0), rank(2.0, 1.0)],
    }


def results_of(rows: list[Row]) -> Results:
    options = {"size": "demo", "batch_size": 8, "max_length": 384, "steps": 4, "data": None}
    return Results(benchmark="hosts", command="", options=options, machine="", versions={}, date="", rows=rows)


def test_a_line_of_the_matrix() -> None:
    rows = rows_of(found(losses=(4.0, 3.0, 2.0, 1.0001)))
    assert Hosts().lines(rows) == ["ddp, llama, 2, equal (1e-04), 2.00x, equal (0e+00), in the graph, 5 of 6 steps"]
    Hosts().verdict(results_of(rows))


@pytest.mark.parametrize(
    "measured",
    [
        found(losses=(4.0, 3.0, 2.0, 1.1)),
        found(losses=(4.0, 3.0, 2.0, math.nan)),
        found(again=(2.0, 1.1)),
        found() | {WITHOUT: [rank(4.0, 3.0, math.nan, 1.0)] * 2},
        found() | {WITHOUT_AGAIN: [rank(2.0, math.nan)] * 2},
    ],
    ids=["a loss", "no number", "a loss behind a checkpoint", "no number without", "no number behind a checkpoint"],
)
def test_losses_that_differ_are_wrong(measured: dict[str, list[dict[str, Any]]]) -> None:
    rows = rows_of(measured)
    assert "DIFFER" in Hosts().lines(rows)[0]
    with pytest.raises(ParityError, match="ddp, llama"):
        Hosts().verdict(results_of(rows))


def test_a_difference_that_is_named_is_none() -> None:
    measured = found(losses=(4.0, 3.0, 2.0, 1.1))
    measured[WITH][0]["texts"]["fallbacks"] = "it draws at random"
    rows = rows_of(measured)
    assert Hosts().lines(rows)[0].endswith("it draws at random")
    Hosts().verdict(results_of(rows))


def test_what_failed_is_named() -> None:
    measured = found()
    del measured[WITHOUT_AGAIN]
    rows = [
        *rows_of(measured),
        Row(key={"host": "ddp", "model": "llama", "ranks": 2, "setup": WITHOUT_AGAIN}, failed="ended"),
    ]
    assert Hosts().lines(rows) == [
        "ddp, llama, 2, equal (0e+00), 2.00x, in the graph, 5 of 6 steps, without, continued: ended"
    ]
    Hosts().verdict(results_of(rows))


def test_where_one_process_cannot_continue_two_new_ones_are_compared() -> None:
    measured = found(again=())
    measured[WITH] = [rank(*LOSSES)] * 2
    assert "checkpoint_rel_diff" not in rows_of(measured)[-1].figures
    rows = rows_of(measured | {WITH_AGAIN: [rank(2.0, 1.0001)] * 2})
    assert rows[2].figures["checkpoint_rel_diff"] == pytest.approx(1e-4)


def test_the_page_on_compatibility_has_the_matrix_of_its_result_file() -> None:
    [table] = Hosts().tables(read_result(Results, DOCS / "results" / "hosts-demo-cpu2.json"))
    assert "\n".join(markdown_of(table)) in (DOCS / "compatibility.md").read_text()
