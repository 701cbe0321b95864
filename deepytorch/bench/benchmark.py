"""The shape of a benchmark: options, what it measures one after the other, and how results are shown.

A benchmark is one file: a frozen dataclass of options, which is the command's option list too, and a class with the
methods below. Starting ranks, turns, writing and reading results, tables, plots and the report are written elsewhere
once. The file loads no torch, so that `--help` answers at once: torch is for the ranks (`training`).
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Generic, TypeVar

from deepytorch.bench.plots import Plot
from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table
from deepytorch.errors import ConfigError

OptionsOf = TypeVar("OptionsOf")


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """The ranks of a job: on this machine, or on hosts of the lab if `rate` is given.

    rate, flow_rate: bits per second of each host, and of one connection, as in `deepytorch lab`. threads: of each rank;
    None leaves it to torch.
    """

    hosts: int = 1
    ranks: int = 1  # of each host
    rate: str | None = None
    flow_rate: str | None = None
    threads: int | None = 1

    @classmethod
    def of(
        cls, hosts: int, ranks: int, rate: str | None = None, flow_rate: str | None = None, threads: int | None = 1
    ) -> Place:
        """Return all of torchrun's ranks, if it has started this process; else this machine, or hosts of the lab.

        rate: of several hosts; None is 1 Gbit.
        """
        shape = torchrun_shape()
        if shape is not None:
            return cls(hosts=shape[1], ranks=shape[0], threads=threads)
        rate = (rate or "1gbit") if hosts > 1 else None
        return cls(hosts=hosts, ranks=ranks, rate=rate, flow_rate=flow_rate, threads=threads)

    @property
    def all_ranks(self) -> int:
        """Return the number of ranks of all hosts."""
        return self.hosts * self.ranks

    @property
    def key(self) -> dict[str, Any]:
        """Return what the keys of rows say of it."""
        return {"hosts": self.hosts, "ranks": self.ranks, "rate": self.rate}


def places(hosts: Sequence[int], ranks: int, rates: Sequence[str]) -> list[Place]:
    """Return the places of so many hosts: one without a network, several at each rate; torchrun's as they are."""
    shape = torchrun_shape()
    if shape is not None:
        return [Place(hosts=number, ranks=shape[0]) for number in hosts]
    pairs = [(number, rate) for number in hosts for rate in (rates if number > 1 else (None,))]
    return [Place.of(number, ranks, rate) for number, rate in pairs]


def torchrun_shape() -> tuple[int, int] | None:
    """Return (ranks of a host, hosts) when torchrun started this process, else None. Raises `ConfigError`."""
    if "RANK" not in os.environ:
        return None
    try:
        ranks = int(os.environ["WORLD_SIZE"])
        local = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
    except (KeyError, ValueError) as error:
        raise ConfigError(
            f"RANK is set, but WORLD_SIZE or LOCAL_WORLD_SIZE is not a number ({error}). Start with torchrun, or unset "
            "RANK."
        ) from error
    return local, max(1, ranks // local)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setup:
    """One way to run a job: a process for each rank, in an environment of its own.

    Attributes:
        name: The way, as tables name it.
        job: What each rank does: a dataclass that `kind` takes, as JSON in the end. If it has a field `scratch`, that
            becomes a folder which the setups of the cell share while it is measured.
        imports: Whether the processes have `import deepytorch`; without it DEEPYTORCH is off there.
        environment: Further variables.
    """

    name: str
    job: Any
    imports: bool = False
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A part that is measured together: setups that take turns, step by step, on the same work.

    Attributes:
        key: The common part of the keys of its rows.
        setups: What takes turns.
        place: Where the ranks are.
        kind: What the processes do: one of `worker.KINDS`.
        impossible: Why nothing of it can run here, which all its rows say; None if it can.
        keeps_processes: Whether the processes of a setup may serve the next cell as well, which saves their start; not
            where compiled code of one would be in the way of the other.
        rows: The setups of its rows, where processes of one setup compare several ways by themselves; else the setups.
        row_key: What those are named by in the keys of rows.
    """

    key: Mapping[str, Any]  # texts, numbers or None
    setups: Sequence[Setup]
    place: Place
    kind: str = "training"
    impossible: str | None = None
    keeps_processes: bool = False
    rows: Sequence[str] = ()
    row_key: str = "setup"

    @property
    def keys(self) -> list[dict[str, Any]]:
        """Return the keys of its rows."""
        return [{**self.key, self.row_key: name} for name in self.rows or [setup.name for setup in self.setups]]


class Benchmark(ABC, Generic[OptionsOf]):
    """A benchmark: see this module. The docstring of its options' class is the command's help.

    selects: The options that say what is measured, and not how: a run that goes on with a file may have others.
    """

    name: ClassVar[str]
    options: ClassVar[type]
    selects: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def cells(self, options: OptionsOf) -> Sequence[Cell]:
        """Return what is to be measured, in order. Raises `ConfigError`."""

    def measure(
        self, options: OptionsOf, cell: Cell, timeout_s: float, notify: Callable[[str], None]
    ) -> dict[str, list[dict[str, Any]]] | None:
        """Return what `rows` takes, for processes that are no ranks which serve jobs; None: `run` starts such ranks."""
        return None

    @abstractmethod
    def rows(self, options: OptionsOf, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return the rows of a cell. found: by setup, what each rank has returned; setups that failed are left out."""

    def head(self, rows: Sequence[Row]) -> list[str]:
        """Return what is printed above a cell's lines, unless it stands above those before already."""
        return []

    def lines(self, rows: Sequence[Row]) -> list[str]:
        """Return what is printed of a cell's rows as soon as they are there."""
        return [
            ", ".join(
                [
                    *(str(value) for value in row.key.values() if value is not None),
                    *([row.failed] if row.failed else (f"{name} {value:.4g}" for name, value in row.figures.items())),
                ]
            )
            for row in rows
        ]

    @abstractmethod
    def tables(self, results: Results) -> list[Table]:
        """Return the tables of a result file, which may be a part of the whole."""

    def derived(self, options: OptionsOf, results: Results) -> list[Row]:
        """Return rows that are computed from what was measured, such as predictions, once all is measured."""
        return []

    def plots(self, results: Results) -> list[Plot]:
        """Return the plots of a result file."""
        return []

    def keeps(self, options: OptionsOf) -> bool:
        """Return whether there is a result file where none is asked for: not where nothing is measured."""
        return True

    def verdict(self, results: Results) -> None:
        """Raise an error, once all is written and shown, if results are wrong; the command ends with status 2."""
        return
