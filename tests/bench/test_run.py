"""Running benchmarks: turns, rows that are written at once, runs that go on, setups that fail, and Ctrl-C."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import pytest
from typer import Option

from deepytorch.bench import run as running
from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup
from deepytorch.bench.launch import RankError
from deepytorch.bench.options import names
from deepytorch.bench.results import Results, Row, read_result
from deepytorch.bench.run import run_benchmark
from deepytorch.bench.suite import BENCHMARKS
from deepytorch.bench.table import Table
from deepytorch.errors import ConfigError, DataError


@dataclass(frozen=True, kw_only=True, slots=True)
class Toys:
    """Measure toys."""

    toys: Annotated[tuple[str, ...], Option(help="Toys.")] = ("ball", "kite")
    turns: Annotated[int, Option(help="Turns of each.")] = 2


class Toy(Benchmark[Toys]):
    name = "toy"
    options = Toys

    def cells(self, options: Toys) -> Sequence[Cell]:
        setups = [Setup(name=name, job=options) for name in ("one", "other")]
        impossible = {"unicorn": "it does not exist"}
        return [
            Cell(key={"toy": toy}, setups=setups, place=Place(), keeps_processes=True, impossible=impossible.get(toy))
            for toy in options.toys
        ]

    def rows(self, options: Toys, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        return [
            Row(key={**cell.key, "setup": name}, figures={"step_s": ranks[0]["step_s"]})
            for name, ranks in found.items()
        ]

    def tables(self, results: Results) -> list[Table]:
        return []


class Processes:
    """In place of `launch.Ranks`: what happens is written down, and `fails[setup]` says at which toy."""

    happened: ClassVar[list[str]] = []
    fails: ClassVar[dict[str, str]] = {}
    stops: str = ""

    def __init__(self, setup: Setup, *_: Any) -> None:
        self.name, self._left, self._toy = setup.name, 0, -1
        self.happened.append(f"{self.name} starts")

    def give(self, kind: str, job: Mapping[str, Any], notify: Any) -> bool:
        self._toy += 1
        if self.stops == f"{self.name} {self._toy}":
            raise KeyboardInterrupt
        if self.fails.get(self.name) == str(self._toy):
            raise RankError("A long story.", "it broke")
        self._left = job["turns"]
        return True

    def step(self, notify: Any) -> bool:
        self.happened.append(self.name)
        self._left -= 1
        return self._left > 0

    def found(self) -> list[dict[str, Any]]:
        return [{"step_s": 1.0 + self._toy}]

    def end(self, *, at_once: bool = True) -> None:
        self.happened.append(f"{self.name} ends")


@pytest.fixture(autouse=True)
def processes(monkeypatch: pytest.MonkeyPatch) -> type[Processes]:
    Processes.happened, Processes.fails, Processes.stops = [], {}, ""
    monkeypatch.setattr(running, "Ranks", Processes)
    return Processes


def test_setups_take_turns_and_their_processes_serve_the_next_cell(processes: type[Processes]) -> None:
    results = run_benchmark(Toy(), Toys())
    turns = ["one", "other", "one", "other"]
    assert processes.happened == ["one starts", "other starts", *turns, *turns, "one ends", "other ends"]
    assert [(row.key["toy"], row.key["setup"], row.figures["step_s"]) for row in results.rows] == [
        ("ball", "one", 1.0), ("ball", "other", 1.0), ("kite", "one", 2.0), ("kite", "other", 2.0),
    ]  # fmt: skip


def test_a_setup_that_fails_is_a_row_and_the_others_go_on(processes: type[Processes], tmp_path: Path) -> None:
    processes.fails = {"other": "0"}
    results = run_benchmark(Toy(), Toys(), tmp_path / "toy.json")
    assert [row.failed for row in results.having(toy="ball")] == ["", "it broke"]
    assert processes.happened.count("other starts") == 2  # anew for the next cell, where it fails once more
    processes.fails = {}
    again = run_benchmark(Toy(), Toys(), tmp_path / "toy.json")
    assert [row.failed for row in again.rows] == [""] * 4
    assert read_result(Results, tmp_path / "toy.json") == again


def test_what_is_impossible_is_named_and_not_started(processes: type[Processes]) -> None:
    results = run_benchmark(Toy(), Toys(toys=("unicorn",)))
    assert [row.failed for row in results.rows] == ["it does not exist"] * 2
    assert processes.happened == []


def test_ctrl_c_leaves_what_is_done_and_the_next_run_goes_on(processes: type[Processes], tmp_path: Path) -> None:
    path, processes.stops = tmp_path / "toy.json", "one 1"
    with pytest.raises(KeyboardInterrupt):
        run_benchmark(Toy(), Toys(), path)
    assert [row.key["toy"] for row in read_result(Results, path).rows] == ["ball", "ball"]
    assert processes.happened[-2:] == ["one ends", "other ends"]
    processes.stops, processes.happened = "", []
    said: list[str] = []
    results = run_benchmark(Toy(), Toys(), path, said.append)
    assert [row.key["toy"] for row in results.rows] == ["ball", "ball", "kite", "kite"]
    assert processes.happened[:3] == ["one starts", "other starts", "one"]
    assert said[0].startswith("1 of 1: toy kite")


def test_the_end_is_told_once_it_can_be(tmp_path: Path) -> None:
    said: list[str] = []
    run_benchmark(Toy(), Toys(), None, said.append)
    assert "min left, until" in next(text for text in said if text.startswith("2 of 2"))


def test_a_file_of_something_else_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    results = run_benchmark(Toy(), Toys(), path)
    with pytest.raises(ConfigError, match=r"holds results for turns 2, asked for turns 3"):
        run_benchmark(Toy(), Toys(turns=3), path)
    assert run_benchmark(Toy(), Toys(turns=3), path, again=True).options["turns"] == 3
    path.write_text(json.dumps(asdict(replace(results, benchmark="jet"))))
    with pytest.raises(ConfigError, match="results of bench jet, expected those of toy"):
        run_benchmark(Toy(), Toys(), path)
    path.write_text("{")
    with pytest.raises(DataError, match="cannot be read"):
        run_benchmark(Toy(), Toys(), path)


def test_a_file_goes_on_with_other_options_that_only_select(tmp_path: Path) -> None:
    class Selecting(Toy):
        selects = ("toys",)

    path = tmp_path / "toy.json"
    run_benchmark(Selecting(), Toys(toys=("ball",)), path)
    results = run_benchmark(Selecting(), Toys(toys=("kite",)), path)
    assert [row.key["toy"] for row in results.rows] == ["ball", "ball", "kite", "kite"]
    assert results.options["toys"] == ["kite"]
    with pytest.raises(ConfigError, match=r"holds results for turns 2, asked for turns 3"):
        run_benchmark(Selecting(), Toys(toys=("kite",), turns=3), path)


def test_where_memory_does_not_suffice_for_all_each_is_measured_alone(processes: type[Processes]) -> None:
    together: list[str] = []

    class Memory(Processes):
        """In which two are too many at a time."""

        def give(self, kind: str, job: Mapping[str, Any], notify: Any) -> bool:
            if together and together != [self.name]:
                raise RankError("A long story.", "out of memory")
            together.append(self.name)
            return super().give(kind, job, notify)

        def end(self, *, at_once: bool = True) -> None:
            if self.name in together:
                together.remove(self.name)
            super().end(at_once=at_once)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(running, "Ranks", Memory)
        results = run_benchmark(Toy(), Toys(toys=("ball",)))
    assert [(row.key["setup"], row.failed) for row in results.rows] == [("one", ""), ("other", "")]


def test_a_run_on_another_machine_or_of_another_torch_is_not_mixed_in(tmp_path: Path) -> None:
    path = tmp_path / "toy.json"
    results = run_benchmark(Toy(), Toys(), path)
    path.write_text(json.dumps(asdict(replace(results, machine="a cluster"))))
    with pytest.raises(ConfigError, match="holds results for machine a cluster"):
        run_benchmark(Toy(), Toys(), path)
    path.write_text(json.dumps(asdict(replace(results, versions={**results.versions, "torch": "1.0"}))))
    with pytest.raises(ConfigError, match=r"torch 1\.0"):
        run_benchmark(Toy(), Toys(), path)


@pytest.mark.parametrize("name", BENCHMARKS)
def test_the_defaults_of_a_list_can_be_written_with_commas(name: str) -> None:
    lists = [given for each in fields(BENCHMARKS[name].options) if isinstance(given := each.default, tuple)]
    assert all(names(",".join(map(str, given))) == tuple(map(str, given)) for given in lists)
