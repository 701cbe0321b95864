"""Running a benchmark: its cells one after the other, each setup in processes of its own, steps in turns.

Each finished row is in the result file at once. A run that is stopped, by Ctrl-C or by a fault, keeps what it has, and
goes on from there when it is started again with the same file.
"""

from __future__ import annotations

import contextlib
import datetime
import platform
import shlex
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup, torchrun_shape
from deepytorch.bench.beside import Beside
from deepytorch.bench.channel import NO_MEMORY
from deepytorch.bench.hardware import machine
from deepytorch.bench.lab import Lab
from deepytorch.bench.launch import Notify, RankError, Ranks, lab_of, scratch
from deepytorch.bench.results import Record, Results, Row, read_result, write_json
from deepytorch.errors import ConfigError

_PACKAGES = (
    "torch",
    "triton",
    "transformers",
    "accelerate",
    "deepspeed",
    "lightning",
    "peft",
    "trl",
    "diffusers",
    "liger-kernel",
    "megatron-core",
)


def run_benchmark(
    benchmark: Benchmark[Any],
    options: Any,
    out: Path | None = None,
    notify: Notify = lambda text: None,
    on_rows: Callable[[list[Row]], None] = lambda rows: None,
    timeout_s: float = 600.0,
    again: bool = False,
) -> Results:
    """Measure what `out` does not have yet, and return all results.

    Args:
        benchmark: The benchmark.
        options: Its options.
        out: The result file, which takes each row when it is there; None: no file.
        notify: Is told what is being done, and when the end is expected.
        on_rows: Gets the rows of a cell as soon as they are there.
        timeout_s: For which a setup may give no sign of life.
        again: Measure rows anew that the file has.

    Raises `ConfigError` if the file is of another benchmark or of other options. A setup that fails is a row that says
    why. `KeyboardInterrupt` leaves the file with what is done.
    """
    shape = torchrun_shape()
    beside = None if shape is None else Beside(*shape)
    if beside is not None and beside.rank > 0:
        out, notify, on_rows = None, lambda text: None, lambda rows: None
    results = _begin(benchmark, options, out, again)
    cells = benchmark.cells(options)
    left = [number for number, cell in enumerate(cells) if not _is_done(results, cell)]
    cells = [cells[number] for number in (left if beside is None else beside.told(left))]
    taken: list[float] = []
    with _Processes(timeout_s, beside) as processes:
        for number, cell in enumerate(cells):
            began = time.monotonic()
            about = f"{number + 1} of {len(cells)}{_left(taken, len(cells) - number)}: {words_of(cell.key)}"
            notify(about)
            rows = _measured(benchmark, options, cell, processes, partial(_tell, notify, about))
            results = _with(results, rows, out)
            on_rows(rows)
            taken.append(time.monotonic() - began)
    measured = [row for row in results.rows if row.key.get("kind") != "predicted"]  # none of an earlier run's
    results = replace(results, rows=measured)
    return _with(results, benchmark.derived(options, results), out)


def _measured(benchmark: Benchmark[Any], options: Any, cell: Cell, processes: _Processes, notify: Notify) -> list[Row]:
    impossible = cell.impossible or processes.impossible(cell.place)
    if impossible is not None:
        return [Row(key=key, failed=impossible) for key in cell.keys]
    own = benchmark.measure(options, cell, processes.timeout_s, notify)
    found, failed = processes.measure(cell, notify) if own is None else (own, {})
    rows = benchmark.rows(options, cell, found)
    if cell.rows:  # one setup for all of them
        return [*rows, *(Row(key=key, failed=reason) for reason in [*failed.values()][:1] for key in cell.keys)]
    return [*rows, *(Row(key={**cell.key, "setup": name}, failed=reason) for name, reason in failed.items())]


def _with(results: Results, rows: Sequence[Row], out: Path | None) -> Results:
    """Return the results with these rows, and write them."""
    keys = [row.key for row in rows]
    kept = [row for row in results.rows if row.key not in keys]
    results = replace(results, rows=[*kept, *rows], date=_today() if rows else results.date)
    if out is not None:
        write_results(out, results)
    return results


def _tell(notify: Notify, about: str, text: str) -> None:
    notify(f"{about}; {text}")


def write_results(path: Path, results: Record) -> None:
    """Write the file anew, so that at any moment there is a whole one. Raises `DataError`."""
    unfinished = path.with_name(f".{path.name}.unfinished")
    write_json(unfinished, results.to_json())
    unfinished.replace(path)


def words_of(key: Mapping[str, Any]) -> str:
    """Return a key in words, without what is None."""
    return ", ".join(f"{name} {value}" for name, value in key.items() if value is not None)


def _begin(benchmark: Benchmark[Any], options: Any, out: Path | None, again: bool) -> Results:
    given = _plain(asdict(options))
    fresh = Results(
        benchmark=benchmark.name,
        command=_command(),
        options=given,
        machine=machine(),
        versions=versions(),
        date=_today(),
        rows=[],
    )
    if out is None or again or not out.exists():
        return fresh
    before = read_result(Results, out)
    if before.benchmark != benchmark.name:
        raise ConfigError(
            f"{out} holds results of bench {before.benchmark}, expected those of {benchmark.name}: give another --out."
        )
    now = {**given, "machine": fresh.machine, **fresh.versions}
    then = {**before.options, "machine": before.machine, **before.versions}
    differ = sorted(name for name in now if then.get(name) != now[name] and name not in benchmark.selects)
    if differ:
        raise ConfigError(
            f"{out} holds results for {', '.join(f'{name} {then.get(name)}' for name in differ)}, asked for "
            f"{', '.join(f'{name} {now[name]}' for name in differ)}: give another --out, or --again to begin anew."
        )
    return replace(fresh, notes=before.notes, date=before.date, rows=[row for row in before.rows if not row.failed])


def _command() -> str:
    """Return this command without the place of its results, which is each user's own."""
    words = ["deepytorch", *sys.argv[1:]]
    kept = [word for before, word in zip(["", *words], words, strict=False) if "--out" not in (before, word)]
    return shlex.join(word for word in kept if word != "--again" and not word.startswith("--out="))


def _is_done(results: Results, cell: Cell) -> bool:
    return bool(cell.setups) and all(results.having(**key) for key in cell.keys)


def _plain(value: Any) -> Any:
    """Return a value as JSON would give it back."""
    if isinstance(value, dict):
        return {name: _plain(each) for name, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return value.name if isinstance(value, Path) else value


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages whose code is measured, as far as they are installed."""
    found = {"python": platform.python_version()}
    for name in _PACKAGES:
        with contextlib.suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _today() -> str:
    return datetime.datetime.now(tz=datetime.timezone.utc).date().isoformat()


def _left(taken: Sequence[float], cells: int) -> str:
    """Return when the end is expected, in words, once it can be told."""
    if not taken:
        return ""
    seconds = statistics.fmean(taken) * cells
    end = datetime.datetime.now() + datetime.timedelta(seconds=seconds)
    return f", about {seconds / 60:.0f} min left, until {end:%H:%M}"


class _Processes:
    """The processes of setups, which stay for the next cell where it is of the same kind."""

    def __init__(self, timeout_s: float, beside: Beside | None = None) -> None:
        self.timeout_s, self._beside = timeout_s, beside
        self._place: Place | None = None
        self._lab: Lab | None = None
        self._ranks: dict[str, Ranks] = {}
        self._open = contextlib.ExitStack()

    def __enter__(self) -> _Processes:
        self._folder = self._open.enter_context(scratch())
        return self

    def __exit__(self, *_: object) -> None:
        self._leave(at_once=True)
        self._open.close()
        if self._beside is not None:
            self._beside.close()

    def impossible(self, place: Place) -> str | None:
        """Return why a place cannot be had here; None if it can."""
        return None if self._beside is None else self._beside.impossible(place)

    def measure(self, cell: Cell, notify: Notify) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
        """Return what the ranks of each setup have found, and why others have failed.

        Setups that take turns are in memory at once. Where it does not suffice for all, each is measured alone.
        """
        found, failed = self._in_turns(cell, cell.setups, notify)
        if len(cell.setups) > 1 and any(NO_MEMORY in reason for reason in failed.values()):
            for setup in cell.setups:
                self._leave(at_once=False)
                own, reason = self._in_turns(cell, [setup], notify)
                for rank in own.get(setup.name, []):
                    rank["alone"] = True
                found, failed = (
                    {**found, **own},
                    {name: why for name, why in failed.items() if name not in own} | reason,
                )
        if not cell.keeps_processes:
            self._leave(at_once=False)
        return found, failed

    def _in_turns(
        self, cell: Cell, setups: Sequence[Setup], notify: Notify
    ) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
        if cell.place != self._place or not cell.keeps_processes:
            self._leave(at_once=False)
        if self._lab is None and (hosts := lab_of(cell.place)) is not None:
            self._lab = Lab(replace(hosts, logs=self._folder)).__enter__()
        self._place = cell.place
        failed: dict[str, str] = {}
        left = []
        shared = tempfile.mkdtemp(dir=self._folder)
        for setup in setups:
            has_steps = False
            with self._failing(setup.name, failed):
                job = asdict(setup.job)
                job |= {"scratch": shared} if "scratch" in job else {}
                has_steps = self._start(setup, cell.place, notify).give(cell.kind, job, notify)
            self._agree(setup.name, failed)
            if setup.name not in failed and self._any(has_steps):
                left.append(setup.name)
        while left:
            for name in [*left]:
                has_steps = False
                with self._failing(name, failed):
                    has_steps = self._ranks[name].step(notify)
                self._agree(name, failed)
                if name in failed or not self._any(has_steps):
                    left.remove(name)
        found = {setup.name: self._ranks[setup.name].found() for setup in setups if setup.name not in failed}
        shutil.rmtree(shared, ignore_errors=True)
        if self._beside is not None:
            found = self._beside.gathered(found)
        return found, failed

    def _agree(self, name: str, failed: dict[str, str]) -> None:
        """Let a setup that failed in another of torchrun's processes fail in this one; wait for all of these."""
        if self._beside is None:
            return
        reasons = [reason for reason in self._beside.everyones(failed.get(name)) if reason is not None]
        if reasons:
            own_faults = [reason for reason in reasons if "Connection" not in reason and "closed by peer" not in reason]
            failed[name] = (own_faults or reasons)[0]
            if name in self._ranks:
                self._ranks.pop(name).end()

    def _any(self, has_steps: bool) -> bool:
        """Return whether a rank of any of torchrun's processes has a step left: some have no part in a setup."""
        return has_steps if self._beside is None else any(self._beside.everyones(has_steps))

    def _start(self, setup: Setup, place: Place, notify: Notify) -> Ranks:
        if setup.name not in self._ranks:
            notify(f"{setup.name}: starting")
            own = None if self._beside is None else self._beside.variables(place)
            self._ranks[setup.name] = Ranks(setup, place, self._folder, self.timeout_s, self._lab, own)
        return self._ranks[setup.name]

    @contextlib.contextmanager
    def _failing(self, name: str, failed: dict[str, str]) -> Iterator[None]:
        """Turn the error of a setup's ranks into its reason, and end them."""
        try:
            yield
        except RankError as error:
            failed[name] = error.reason
            sys.stderr.write(f"{error}\n")
            self._ranks.pop(name).end()

    def _leave(self, *, at_once: bool) -> None:
        for ranks in self._ranks.values():
            ranks.end(at_once=at_once)
        self._ranks.clear()
        if self._lab is not None:
            self._lab.__exit__(None, None, None)
        self._lab = self._place = None
