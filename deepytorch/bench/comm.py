"""`deepytorch bench comm`: the time of collectives over size, in the columns of nccl-tests, relative to gloo.

The groups of all setups are in the same processes, one for each rank, and take turns there: `collectives`.
"""

from __future__ import annotations

import math
import re
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Annotated, Any

from typer import Option

from deepytorch.bench.benchmark import Benchmark, Cell, Place, Setup
from deepytorch.bench.comm_show import (
    are_choices,
    bus_factor,
    by_op,
    choices_table,
    head_of,
    itemsize_of,
    lines_of,
    plot,
    table,
)
from deepytorch.bench.figures import step_seconds
from deepytorch.bench.jobs import DTYPES, OPS, PREDICTED_OPS, REDUCING_OPS, ChoicesJob, CollectiveJob, GroupSetup
from deepytorch.bench.measurement import quantiles
from deepytorch.bench.options import FlowRate, NumHosts, RanksOfHost, Rate, check_choice, check_declared, check_hosts
from deepytorch.bench.plots import Plot
from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table
from deepytorch.errors import ConfigError, DeepytorchError, ParityError

AUTO, OURS = "auto", "deepytorch"
BACKENDS = (OURS, "gloo")
COMPRESS = ("none", "bf16", "fp16")
MAX_SIZE_BYTES = 4 << 30
RANKS = "comm"  # the one setup of a cell: processes that hold the groups of all

_BUILT = {"DEEPYTORCH_COMPILE": "wait"}  # native code is built before the first group is opened
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30}


@dataclass(frozen=True, kw_only=True, slots=True)
class CommOptions:
    """Time all_reduce and other collectives of the deepytorch process group against gloo, over buffer sizes.

    Rows have the columns of nccl-tests, and show as they are measured. Starts its ranks and ends them; under torchrun
    it runs on the ranks that are there. Exits with 2 if an element of a result is wrong, or ranks fail.
    """

    ops: Annotated[
        tuple[str, ...],
        Option(
            help="Collectives, with commas: all_reduce, reduce_scatter, all_gather, broadcast, all_to_all, barrier."
        ),
    ] = ("all_reduce",)
    sizes: Annotated[
        str,
        Option(
            metavar="FIRST:LAST[:FACTOR]|LIST",
            help="Buffer sizes in bytes, with K, M or G (powers of 1024). 1K:256M doubles from the first to the last; "
            "a third number is another factor.",
        ),
    ] = "1K:256M"
    backends: Annotated[tuple[str, ...], Option(help="Process groups to compare, with commas.")] = BACKENDS
    algorithms: Annotated[
        tuple[str, ...],
        Option(
            help="Algorithms of the deepytorch group (docs/algorithms.md), with commas, each timed by itself; auto: "
            "the one that it chooses.",
        ),
    ] = (AUTO,)
    compress: Annotated[
        tuple[str, ...],
        Option(
            help="Types that the deepytorch group casts values to between hosts, with commas, each timed by itself: "
            "none, bf16, fp16.",
        ),
    ] = ("none",)
    allocated: Annotated[
        bool,
        Option("--allocated", help="Time each once more with buffers in shared memory, from deepytorch.comm.allocate."),
    ] = False
    dtype: Annotated[
        str,
        Option(metavar="NAME", help="Element type: float32, bfloat16, float16, float64, int32, int64, int8 or uint8."),
    ] = "float32"
    redop: Annotated[
        str, Option(metavar="sum|avg|min|max", help="How all_reduce and reduce_scatter combine values.")
    ] = "sum"
    ranks: RanksOfHost = 2
    hosts: NumHosts = 1
    rate: Rate = None
    flow_rate: FlowRate = None
    rounds: Annotated[int, Option(min=1, help="How often each size of each is timed, in turn with the others.")] = 5
    min_time_ms: Annotated[
        float, Option(metavar="MS", help="Milliseconds for which each size is timed at least, all rounds together.")
    ] = 100.0
    explain: Annotated[
        bool, Option("--explain", help="Show which algorithm would be chosen for each size, and why; time nothing.")
    ] = False

    def __post_init__(self) -> None:
        """Raise `ConfigError` for options that cannot be run."""
        check_declared(self)
        check_hosts(self)
        if not 0 < self.min_time_ms < math.inf:
            raise ConfigError(f"min_time_ms is {self.min_time_ms}, expected a number above 0.")
        if self.ranks * self.hosts < 2:
            raise ConfigError("There is one rank in all, expected at least 2: give --ranks 2.")
        check_choice(self, "ops", OPS)
        check_choice(self, "backends", BACKENDS, repeated=True)
        if self.algorithms != (AUTO,):
            from deepytorch.comm.algorithms.select import COLLECTIVES

            check_choice(self, "algorithms", (AUTO, *(collective.name for collective in COLLECTIVES)))
        check_choice(self, "compress", COMPRESS)
        check_choice(self, "dtype", DTYPES)
        parse_sizes(self.sizes)
        settled = [op for op in self.ops if op not in PREDICTED_OPS]
        if self.explain and settled:
            raise ConfigError(
                f"There is nothing to choose for {', '.join(settled)}, which goes through shared memory on one host, "
                "else by gloo or nccl: leave it out."
            )
        if self.redop == "avg" and "float" not in self.dtype:
            raise ConfigError(f"The average of {self.dtype} has no exact result: take --redop sum or a float dtype.")
        of_ours = self.allocated or self.explain or self.algorithms != (AUTO,) or self.compress != ("none",)
        if of_ours and OURS not in self.backends:
            raise ConfigError(
                f"backends has {', '.join(self.backends)} only, and algorithms, compress, allocated and explain are of "
                "deepytorch: add it, or leave them out."
            )
        if self.backends.count(OURS) > 1:
            raise ConfigError("backends has deepytorch more than once: its setups differ by algorithms and compress.")

    def groups(self) -> tuple[GroupSetup, ...]:
        """Return the setups in the order of the backends, each with its own name."""
        found: list[GroupSetup] = []
        for backend in self.backends:
            if backend == OURS:
                settings = product(self.algorithms, self.compress, (False, True) if self.allocated else (False,))
                found += [_ours(*each) for each in settings]
            else:
                before = sum(each.backend == backend for each in found)
                found.append(GroupSetup(name=f"{backend}#{before + 1}" if before else backend, backend=backend))
        return tuple(found)


def _ours(algorithm: str, compress: str, allocated: bool = False) -> GroupSetup:
    parts = [OURS if algorithm == AUTO else f"{OURS}:{algorithm}"]
    parts += [compress] if compress != "none" else []
    parts += ["allocated"] if allocated else []
    return GroupSetup(
        name="+".join(parts),
        backend=OURS,
        algorithm=None if algorithm == AUTO else algorithm,
        compress=None if compress == "none" else compress,
        allocated=allocated,
    )


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return the sizes in bytes that `text` names: `1K:256M` (powers of two), `1K:256M:4` (a factor), `1K,3M`.

    K, M and G are 2**10, 2**20 and 2**30. Raises `ConfigError`.
    """
    sizes: list[int] = []
    for part in text.split(","):
        first, *rest = part.split(":")
        if len(rest) > 2:
            raise ConfigError(
                f'The sizes "{part}" have {len(rest) + 1} parts, expected FIRST:LAST or FIRST:LAST:FACTOR.'
            )
        size = _parse_size(first)
        last = _parse_size(rest[0]) if rest else size
        factor = _parse_factor(rest[1]) if len(rest) == 2 else 2
        if last < size:
            raise ConfigError(f'The sizes "{part}" end below their beginning.')
        while size <= last:
            sizes.append(size)
            size *= factor
    return tuple(dict.fromkeys(sizes))


def _parse_size(text: str) -> int:
    match = re.fullmatch(r"(\d+)([KMG]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 0 < size <= MAX_SIZE_BYTES:
        raise ConfigError(f'The size is "{text}", expected bytes such as 512, 64K, 16M or 1G, at most 4G.')
    return size


def _parse_factor(text: str) -> int:
    if not text.strip().isdecimal() or int(text) < 2:
        raise ConfigError(f'The factor between sizes is "{text}", expected a whole number, 2 or more.')
    return int(text)


class Comm(Benchmark[CommOptions]):
    """See this module."""

    name = "comm"
    options = CommOptions

    def cells(self, options: CommOptions) -> Sequence[Cell]:
        """Return a cell for each op and size: all groups are in the same processes."""
        place = Place.of(options.hosts, options.ranks, options.rate, options.flow_rate)
        itemsize = itemsize_of(options.dtype)
        # at least one element for each rank, and the same number for each
        least = itemsize * place.all_ranks
        sizes = tuple(dict.fromkeys(max(1, size // least) * least for size in parse_sizes(options.sizes)))
        cells = []
        for op in options.ops:
            given: dict[str, Any] = {"op": op, "dtype": options.dtype, "redop": options.redop}
            where = place.key | {"flow_rate": place.flow_rate}
            key = given | where | {"redop": options.redop if op in REDUCING_OPS else "none"}  # as nccl-tests shows it
            if options.explain:
                for compress in options.compress:
                    job = ChoicesJob(**given, sizes=sizes, group=_ours(AUTO, compress))
                    cells.append(_cell(key, place, "choices", job, [job.group.name]))
                continue
            given |= {"rounds": options.rounds, "min_time_ms": options.min_time_ms, "groups": options.groups()}
            for size in sizes:
                collective = CollectiveJob(**given, count=size // itemsize)
                names = [group.name for group in collective.groups]
                cells.append(_cell({**key, "bytes": size}, place, "collectives", collective, names))
        return cells

    def rows(self, options: CommOptions, cell: Cell, found: Mapping[str, list[dict[str, Any]]]) -> list[Row]:
        """Return a row for each setup; where choices are explained, for each size."""
        job = cell.setups[0].job
        if RANKS not in found:
            return []
        if cell.kind == "choices":
            return _explained(cell, job, found[RANKS][0])
        ranks = found[RANKS]
        copied = statistics.fmean(rank["copy_gb_per_s"] for rank in ranks)
        times = {name: [1e6 * each for each in step_seconds(_of(ranks, name))] for name in ranks[0]["groups"]}
        gloo = next((statistics.median(times[each.name]) for each in job.groups if each.backend == "gloo"), None)
        rows = []
        for setup in job.groups:
            about = ranks[0]["groups"][setup.name]
            time_us, quartiles = statistics.median(times[setup.name]), quantiles(times[setup.name], 4)
            algbw = float(cell.key["bytes"] or 0) / time_us / 1e3
            figures = {
                "time_us": time_us,
                "first_quartile_us": quartiles[0],
                "third_quartile_us": quartiles[2],
                "algbw_gb_per_s": algbw,
                "busbw_gb_per_s": algbw * bus_factor(job.op, cell.place.all_ranks),
                "wrong": sum(rank["wrong"] for rank in _of(ranks, setup.name)),
                "iterations": ranks[0]["iterations"],
                "copy_gb_per_s": copied,
            }
            figures |= {} if gloo is None else {"gloo_ratio": gloo / time_us}
            if job.op == "all_reduce" and cell.place.hosts == 1:
                figures["copy_efficiency"] = 2 * algbw / copied
            if "predicted_us" in about:
                figures["predicted_us"] = about["predicted_us"]
            key = {**cell.key, "setup": setup.name}
            rows.append(Row(key=key, figures=figures, texts={"algorithm": about["algorithm"]}))
        return rows

    def head(self, rows: Sequence[Row]) -> list[str]:
        """Return the op and its settings, the columns of nccl-tests, and their units."""
        return [] if are_choices(rows) else head_of(rows)

    def lines(self, rows: Sequence[Row]) -> list[str]:
        """Return rows in the columns of nccl-tests."""
        return [] if are_choices(rows) else lines_of(rows)

    def tables(self, results: Results) -> list[Table]:
        """Return a table for each op: the time of each setup over size; or what is chosen, and what is predicted."""
        return [choices_table(rows) if are_choices(rows) else table(rows) for rows in by_op(results)]

    def plots(self, results: Results) -> list[Plot]:
        """Return a plot for each op: algorithm bandwidth over size, with what the hardware allows."""
        return [plot(rows) for rows in by_op(results) if not are_choices(rows) and rows[0].key["op"] != "barrier"]

    def keeps(self, options: CommOptions) -> bool:
        """Return whether something is measured."""
        return not options.explain

    def verdict(self, results: Results) -> None:
        """Raise `ParityError` when an element was wrong, since times mean nothing then, and another if ranks failed."""
        wrong = [row for row in results.rows if row.figures.get("wrong")]
        if wrong:
            first = wrong[0]
            raise ParityError(
                f"{first.figures['wrong']} elements of {first.key['op']} with {first.key['bytes']} bytes in "
                f"{first.key['setup']} are wrong, expected none"
                + (f"; {len(wrong) - 1} other rows have wrong elements too. " if len(wrong) > 1 else ". ")
                + "The times of these rows mean nothing."
            )
        failed = [row for row in results.rows if row.failed]
        if failed:
            raise DeepytorchError(f"{len(failed)} rows were not measured. The first: {failed[0].failed}.")


def _cell(key: dict[str, Any], place: Place, kind: str, job: Any, rows: Sequence[str]) -> Cell:
    setup = Setup(name=RANKS, job=job, imports=True, environment=_BUILT)
    return Cell(key=key, setups=[setup], place=place, kind=kind, keeps_processes=True, rows=rows)


def _of(ranks: Sequence[Mapping[str, Any]], name: str) -> list[Mapping[str, Any]]:
    """Return what each rank has found of a group."""
    return [rank["groups"][name] for rank in ranks]


def _explained(cell: Cell, job: ChoicesJob, found: Mapping[str, Any]) -> list[Row]:
    return [
        Row(
            key={**cell.key, "bytes": num_bytes, "setup": job.group.name},
            figures={f"{name}_us": value for name, value in size["predicted_us"].items()},
            texts={
                **{f"{name} cannot": reason for name, reason in size["reasons"].items()},
                "chosen": size["chosen"],
                "links": "as measured, now or before" if found["measured"] else "nominal: the native code is not built",
            },
        )
        for num_bytes, size in zip(job.sizes, found["sizes"], strict=True)
    ]
