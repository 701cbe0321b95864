"""The program of each rank of `deepytorch bench comm`: `python -m deepytorch.bench.comm_worker PLAN.json`.

One process holds the groups of every arm, so that the arms take turns within each round and a change of the machine's
speed affects all of them alike. Messages between ranks (times, counts) go through the default group, outside of the
timed parts.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepytorch import comm
from deepytorch.bench.comm_options import AUTO, CommArm, CommOptions
from deepytorch.bench.comm_patterns import Buffers, Pattern
from deepytorch.bench.comm_schema import NO_REDOP, PREDICTED_OPS, REDUCING_OPS, CommCell, bus_factor
from deepytorch.bench.measurement import quantiles, rotated
from deepytorch.bench.rank_process import Tell, run_rank
from deepytorch.comm.group.groups import group_of
from deepytorch.errors import ConfigError

COPY_BYTES = 64 << 20  # larger than every cache that a rank has to itself

_REDOPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_MAX_ITERATIONS = 2000  # per round
_MANY_ITERATIONS = 4
_CALIBRATION_S = 5e-3  # a single collective of a microsecond is too short: calibrate over this time
_PATIENCE = 5  # the slowest arm may take this many times its share of the time, for the benefit of the fastest

# (op, buffers, redop, group): runs one collective and waits for it.
Collective = Callable[[str, Buffers, str, ProcessGroup], None]


@dataclass(frozen=True, slots=True)
class CopyBandwidth:
    """The bandwidth of `copy_` while every rank copies: bytes read and written, in GB/s."""

    rank: float  # mean of the ranks
    total: float  # sum of the ranks
    measured_by: dict[str, Any] | None = None  # topology and links behind the deepytorch backend's choices, as JSON


def run_collective(op: str, buffers: Buffers, redop: str, group: ProcessGroup) -> None:
    """Run `op` once, as a user calls it, and wait for it. The root of a broadcast is rank 0."""
    if op == "all_reduce":
        dist.all_reduce(buffers.output, _REDOPS[redop], group=group)
    elif op == "reduce_scatter":
        _reduce_scatter(buffers.output, buffers.input, _REDOPS[redop], group=group)
    elif op == "all_gather":
        _all_gather(buffers.output, buffers.input, group=group)
    elif op == "all_to_all":
        dist.all_to_all_single(buffers.output, buffers.input, group=group)
    elif op == "barrier":
        dist.barrier(group)
    else:
        dist.broadcast(buffers.output, 0, group=group)


# torch 2.13 renamed both; under the old names each call warns, which takes time.
_reduce_scatter: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def measure(
    options: CommOptions,
    on_cells: Callable[[list[CommCell]], None],
    notify: Callable[[str], None] = lambda text: None,
    collective: Collective = run_collective,
) -> CopyBandwidth:
    """Measure every cell of `options`; the default group already exists, on CPU. All ranks call this function.

    Rank 0 calls `on_cells` with the arms' cells of one op and size as soon as they are measured, and `notify` with the
    current activity. Returns the copy bandwidth, measured before and after the cells.
    """
    notify("Opening the groups of every arm")
    groups = [_open_group(arm, options.timeout_s) for arm in options.arms()]
    notify("Measuring the copy bandwidth")
    seconds = _copy_seconds()
    for op in options.ops:
        for size_bytes in options.sizes_bytes:
            bench = _SizeBench(options, op, size_bytes, groups, collective)
            cells = bench.run(notify)
            if dist.get_rank() == 0:
                on_cells(cells)
    notify("Measuring the copy bandwidth once more")
    seconds += _copy_seconds()
    rate = torch.tensor([2 * COPY_BYTES / statistics.median(seconds) / 1e9], dtype=torch.float64)
    dist.all_reduce(rate)
    return CopyBandwidth(float(rate) / dist.get_world_size(), float(rate), _chosen_by(groups))


def _chosen_by(groups: Sequence[ProcessGroup]) -> dict[str, Any] | None:
    for group in groups:
        with contextlib.suppress(ConfigError):
            known = group_of(group)
            if known.options.algorithm is None:
                return {"topology": known.topology.to_json(), "links": known.links.to_json()}
    return None


def describe(options: CommOptions) -> dict[str, Any] | None:
    """Return, as plain JSON values, the choices of groups of the deepytorch backend, with their topology and links.

    `chosen[compress][op]` has one entry per size: the fields of a `Choice`. None if the backend leaves everything to
    the stock backends, because its native code cannot be built.
    """
    content: dict[str, Any] = {"chosen": {}}
    for compress in dict.fromkeys(arm.compress for arm in options.arms() if arm.backend == "deepytorch"):
        group = _open_group(CommArm(name="", backend="deepytorch", compress=compress), options.timeout_s)
        try:
            known = group_of(group)
        except ConfigError:
            return None
        content |= {"topology": known.topology.to_json(), "links": known.links.to_json()}
        content["chosen"][compress or "none"] = {
            op: [asdict(comm.chosen(group, op, size)) for size in options.sizes_bytes]
            for op in options.ops
            if op in PREDICTED_OPS
        }
    return content


class _SizeBench:
    """One op of one size in every arm."""

    def __init__(
        self, options: CommOptions, op: str, size_bytes: int, groups: Sequence[ProcessGroup], collective: Collective
    ) -> None:
        self.options, self.op, self.groups, self.collective = options, op, groups, collective
        self.arms = options.arms()
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.dtype: torch.dtype = getattr(torch, options.dtype)
        # at least one element for each rank, and the same number for each
        self.count = max(1, size_bytes // (self.dtype.itemsize * self.ranks)) * self.ranks
        self.pattern = Pattern(self.dtype, options.redop, self.ranks, any(arm.compress for arm in self.arms))
        shared = self._buffers(lambda count: torch.empty(count, dtype=self.dtype))
        self.buffers = [
            self._buffers(partial(_allocate, self.dtype, group)) if arm.allocated else shared
            for arm, group in zip(self.arms, groups, strict=True)
        ]

    def run(self, notify: Callable[[str], None]) -> list[CommCell]:
        """Check, calibrate, measure in alternation, check again; return one cell per arm (of use on rank 0 only)."""
        arms, what = range(len(self.groups)), f"{self.op}, {self.count * self.dtype.itemsize} bytes"
        notify(f"{what}: first check")
        wrong_before = [self._check(arm) for arm in arms]
        for buffers in self.buffers:
            buffers.clear()
        iterations = self._calibrate()
        seconds = torch.zeros(len(arms), self.options.rounds, dtype=torch.float64)
        for turn in range(self.options.rounds):
            for arm in rotated(list(arms), turn):
                notify(f"{what}: round {turn + 1} of {self.options.rounds}, {self.arms[arm].name}")
                seconds[arm, turn] = self._timed(arm, iterations)
        notify(f"{what}: second check")
        wrong_after = [self._check(arm) for arm in arms]
        wrong = torch.tensor([max(both) for both in zip(wrong_before, wrong_after, strict=True)])
        dist.all_reduce(seconds, dist.ReduceOp.MAX)
        dist.all_reduce(wrong)
        return [self._cell(arm, seconds[arm].tolist(), iterations, int(wrong[arm])) for arm in arms]

    def _check(self, arm: int) -> int:
        """Run once on numbers whose result is known; return the number of wrong elements of this rank."""
        buffers = self.buffers[arm]
        self.pattern.fill(buffers, self.rank)
        self._timed(arm, 1)
        return self.pattern.num_wrong(self.op, buffers, self.rank)

    def _calibrate(self) -> int:
        """Return the number of collectives per round, in every arm: the cost of starting together then counts equally.

        The fastest arm gets its share of the time, unless the slowest then takes too many times as long. The number is
        the same on all ranks, since it decides what they call.
        """
        seconds = []
        for arm in range(len(self.groups)):
            once = _slowest(self._timed(arm, 1))
            again = min(20, int(_CALIBRATION_S / once))
            seconds.append(min([once, *(_slowest(self._timed(arm, again)) for _ in range(2 if again > 1 else 0))]))
        share = self.options.min_time_ms / 1e3 / self.options.rounds
        wanted = min(share / min(seconds), _PATIENCE * share / max(seconds))
        return min(_MAX_ITERATIONS, max(1, round(wanted)))

    def _timed(self, arm: int, iterations: int) -> float:
        """Return the seconds per collective that this rank took over `iterations` of them, started together.

        If there are many, one more runs first: it wakes the arm's threads and brings the ranks closer together.
        """
        buffers, group = self.buffers[arm], self.groups[arm]
        dist.barrier()
        if iterations >= _MANY_ITERATIONS:
            self.collective(self.op, buffers, self.options.redop, group)
        start = time.perf_counter()
        for _ in range(iterations):
            self.collective(self.op, buffers, self.options.redop, group)
        return (time.perf_counter() - start) / iterations

    def _buffers(self, make_input: Callable[[int], Tensor]) -> Buffers:
        share = self.count // self.ranks
        if self.op == "reduce_scatter":
            return Buffers(make_input(self.count), torch.empty(share, dtype=self.dtype))
        if self.op == "all_gather":
            return Buffers(make_input(share), torch.empty(self.count, dtype=self.dtype))
        buffer = make_input(self.count)
        if self.op == "all_to_all":
            return Buffers(buffer, torch.empty(self.count, dtype=self.dtype))
        return Buffers(buffer, buffer)

    def _cell(self, index: int, seconds: list[float], iterations: int, wrong: int) -> CommCell:
        arm, num_bytes = self.arms[index], self.count * self.dtype.itemsize
        times_us = [1e6 * second for second in seconds]
        time_us = statistics.median(times_us)
        algbw = num_bytes / time_us / 1e3
        return CommCell(
            op=self.op,
            backend=arm.backend,
            algorithm=_algorithm(arm, self.groups[index], self.op, num_bytes),
            dtype=self.options.dtype,
            redop=self.options.redop if self.op in REDUCING_OPS else NO_REDOP,
            bytes=num_bytes,
            ranks=self.ranks,
            hosts=self.options.hosts,
            time_us=time_us,
            time_us_quartiles=quantiles(times_us, 4),
            algbw=algbw,
            busbw=algbw * bus_factor(self.op, self.ranks),
            wrong=wrong,
            arm=arm.name,
            compress=arm.compress,
            allocated=arm.allocated,
            iterations=iterations,
        )


def _open_group(arm: CommArm, timeout_s: float) -> ProcessGroup:
    options = None
    if arm.backend == "deepytorch":
        options = comm.Options(algorithm=None if arm.algorithm == AUTO else arm.algorithm, compress=arm.compress)
    group = dist.new_group(backend=arm.backend, pg_options=options, timeout=timedelta(seconds=timeout_s))
    assert isinstance(group, ProcessGroup)  # every rank is in it
    return group


def _algorithm(arm: CommArm, group: ProcessGroup, op: str, num_bytes: int) -> str:
    if arm.backend != "deepytorch":
        return "default"
    try:
        if op not in PREDICTED_OPS:  # through memory if all ranks share some, else by gloo
            known = group_of(group)
            shares = known.topology.num_hosts == 1 and known.backend.segment is not None
            return "shared_memory" if shares and known.options.algorithm in (None, "shared_memory") else "engine"
        return comm.chosen(group, op, num_bytes).algorithm
    except ConfigError:
        return "delegated"  # the native code cannot be built here: stock backends are used


def _allocate(dtype: torch.dtype, group: ProcessGroup, count: int) -> Tensor:
    return comm.allocate(count * dtype.itemsize, group).view(dtype)


def _slowest(seconds: float) -> float:
    """Return the largest of the ranks' figures, on every rank."""
    figure = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(figure, dist.ReduceOp.MAX)
    return float(figure)


def _copy_seconds(times: int = 5) -> list[float]:
    """Return the seconds that this rank takes to copy `COPY_BYTES`, while all ranks copy, `times` times."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return seconds


def main(collective: Collective = run_collective) -> None:
    """Run as one rank: report the current activity and the cells, and return the copy bandwidth, or `describe`'s."""

    def work(options: CommOptions, tell: Tell) -> dict[str, Any] | None:
        if options.explain:
            tell(doing="Measuring the links")
            return describe(options)

        def tell_cells(cells: list[CommCell]) -> None:
            tell(cells=[asdict(cell) for cell in cells])

        return asdict(measure(options, tell_cells, lambda text: tell(doing=text), collective))

    run_rank(CommOptions, work)


if __name__ == "__main__":
    main()
