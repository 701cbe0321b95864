"""Collectives of one size in the groups of every setup, as one rank of `deepytorch bench comm`.

One process holds all groups, so that they take turns within each round and a change of the machine's speed affects all
of them alike. Messages between ranks (times, counts) go through the default group, outside of the timed parts.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from deepytorch import comm
from deepytorch.bench.channel import DOING, Turns
from deepytorch.bench.comm_patterns import Buffers, Pattern
from deepytorch.bench.jobs import PREDICTED_OPS, CollectiveJob, GroupSetup
from deepytorch.bench.measurement import rotated
from deepytorch.bench.prediction import predicted_us
from deepytorch.comm.group.groups import group_of
from deepytorch.comm.group.native import native
from deepytorch.errors import ConfigError
from deepytorch.switch import SWITCH

Job = CollectiveJob

COPY_BYTES = 64 << 20  # larger than every cache that a rank has to itself

_REDOPS = {"sum": dist.ReduceOp.SUM, "avg": dist.ReduceOp.AVG, "min": dist.ReduceOp.MIN, "max": dist.ReduceOp.MAX}
_MAX_ITERATIONS = 2000  # per round
_MANY_ITERATIONS = 4
_CALIBRATION_S = 5e-3  # a single collective of a microsecond is too short: calibrate over this time
_PATIENCE = 5  # the slowest group may take this many times its share of the time, for the benefit of the fastest

_GROUPS: dict[GroupSetup, ProcessGroup] = {}  # they stay for the next size


def run(job: CollectiveJob, turns: Turns) -> dict[str, Any]:
    """Check, calibrate, time all groups in turns, and check again.

    Return `copy_gb_per_s`, what `copy_` reaches while every rank copies (bytes read and written), the `iterations` of a
    round, and by group its `seconds` of a collective in each round, its `wrong` elements, both on this rank, its
    `algorithm`, and if the cost model knows it `predicted_us`. Raises `ConfigError` if no sum of the type is exact.
    """
    join(job.timeout_s)
    return _Bench(job, turns).run()


def join(timeout_s: float) -> None:
    """Open the group over which ranks exchange measurements, unless an earlier job has.

    From then on a group is deepytorch's only if it is asked for by name.
    """
    SWITCH.enabled = False
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=timedelta(seconds=timeout_s))


def open_group(setup: GroupSetup, timeout_s: float, tell: Callable[[str], None]) -> ProcessGroup:
    """Return a setup's group, of all ranks; they call this in the same order. tell: is told what takes a while."""
    if setup not in _GROUPS:
        options: Any = None
        tell(f"opening the group {setup.name}")
        if setup.backend == "deepytorch":
            build_native(tell)
            options = comm.Options(algorithm=setup.algorithm, compress=setup.compress)  # type: ignore[arg-type]
        group = dist.new_group(backend=setup.backend, pg_options=options, timeout=timedelta(seconds=timeout_s))
        assert isinstance(group, ProcessGroup)  # every rank is in it
        _GROUPS[setup] = group
    return _GROUPS[setup]


def build_native(tell: Callable[[str], None]) -> None:
    """Compile the C++ of deepytorch's group, unless that has been done, and tell so: its first group waits for it."""
    if not native.is_built():
        tell("compiling the C++ of the process group, once: it takes up to half a minute on two cores")
        native.load()


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


class _Bench:
    """One op of one size in every group."""

    def __init__(self, job: CollectiveJob, turns: Turns) -> None:
        self.job = job
        self.dtype: torch.dtype = getattr(torch, job.dtype)
        self.num_bytes = job.count * self.dtype.itemsize
        self.tell = lambda text: turns.say(DOING, f"{job.op}, {self.num_bytes} bytes: {text}")
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.groups = [open_group(setup, job.timeout_s, self.tell) for setup in job.groups]
        self.pattern = Pattern(self.dtype, job.redop, self.ranks, any(setup.compress for setup in job.groups))
        shared = self._buffers(lambda count: torch.empty(count, dtype=self.dtype))
        self.buffers = [
            self._buffers(partial(_allocate, self.dtype, group)) if setup.allocated else shared
            for setup, group in zip(job.groups, self.groups, strict=True)
        ]

    def run(self) -> dict[str, Any]:
        every = range(len(self.groups))
        self.tell("copy bandwidth")
        copied = _copy_gb_per_s()
        self.tell("first check")
        wrong = [self._check(at) for at in every]
        for buffers in self.buffers:
            buffers.clear()
        iterations = self._calibrate()
        seconds: list[list[float]] = [[] for _ in every]
        for turn in range(self.job.rounds):
            for at in rotated(every, turn):
                self.tell(f"round {turn + 1} of {self.job.rounds}, {self.job.groups[at].name}")
                seconds[at].append(self._timed(at, iterations))
        self.tell("second check")
        wrong = [max(before, self._check(at)) for at, before in zip(every, wrong, strict=True)]
        return {
            "copy_gb_per_s": copied,
            "iterations": iterations,
            "groups": {
                setup.name: {"seconds": seconds[at], "wrong": wrong[at], **self._about(setup, self.groups[at])}
                for at, setup in enumerate(self.job.groups)
            },
        }

    def _check(self, at: int) -> int:
        """Run once on numbers whose result is known; return the number of wrong elements of this rank."""
        self.pattern.fill(self.buffers[at], self.rank)
        self._timed(at, 1)
        return self.pattern.num_wrong(self.job.op, self.buffers[at], self.rank)

    def _calibrate(self) -> int:
        """Return the number of collectives per round, of every group: the cost of starting together counts equally.

        The fastest group gets its share of the time, unless the slowest then takes too many times as long. The number
        is the same on all ranks, since it decides what they call.
        """
        seconds = []
        for at in range(len(self.groups)):
            once = _slowest(self._timed(at, 1))
            again = min(20, int(_CALIBRATION_S / once))
            seconds.append(min([once, *(_slowest(self._timed(at, again)) for _ in range(2 if again > 1 else 0))]))
        share = self.job.min_time_ms / 1e3 / self.job.rounds
        wanted = min(share / min(seconds), _PATIENCE * share / max(seconds))
        return min(_MAX_ITERATIONS, max(1, round(wanted)))

    def _timed(self, at: int, iterations: int) -> float:
        """Return the seconds per collective that this rank took over `iterations` of them, started together.

        If there are many, one more runs first: it wakes the group's threads and brings the ranks closer together.
        """
        given = (self.job.op, self.buffers[at], self.job.redop, self.groups[at])
        dist.barrier()
        if iterations >= _MANY_ITERATIONS:
            run_collective(*given)
        start = time.perf_counter()
        for _ in range(iterations):
            run_collective(*given)
        return (time.perf_counter() - start) / iterations

    def _buffers(self, make_input: Callable[[int], Tensor]) -> Buffers:
        count, op = self.job.count, self.job.op
        if op == "reduce_scatter":
            return Buffers(make_input(count), torch.empty(count // self.ranks, dtype=self.dtype))
        if op == "all_gather":
            return Buffers(make_input(count // self.ranks), torch.empty(count, dtype=self.dtype))
        buffer = make_input(count)
        return Buffers(buffer, torch.empty(count, dtype=self.dtype) if op == "all_to_all" else buffer)

    def _about(self, setup: GroupSetup, group: ProcessGroup) -> dict[str, Any]:
        """Return the algorithm that ran, and what the cost model predicts of it from the links that were measured."""
        algorithm = self._algorithm(setup, group)
        if setup.allocated or algorithm == "delegated" or self.job.op not in PREDICTED_OPS:
            return {"algorithm": algorithm}
        for one, opened in zip(self.job.groups, self.groups, strict=True):
            with contextlib.suppress(ConfigError):  # of a group that is not deepytorch's
                known = group_of(opened)
                if one.algorithm is None:
                    given = (algorithm, setup.compress, known.topology, known.links)
                    found = predicted_us(self.job, self.num_bytes, *given)
                    return {"algorithm": algorithm} | ({} if found is None else {"predicted_us": found})
        return {"algorithm": algorithm}

    def _algorithm(self, setup: GroupSetup, group: ProcessGroup) -> str:
        if setup.backend != "deepytorch":
            return "default"
        try:
            if self.job.op in PREDICTED_OPS:
                return comm.chosen(group, self.job.op, self.num_bytes).algorithm
            known = group_of(group)  # such an op goes through memory if all ranks share some, else by gloo
            shares = known.topology.num_hosts == 1 and known.backend.segment is not None
            return "shared_memory" if shares and setup.algorithm in _IN_MEMORY else "engine"
        except ConfigError:
            return "delegated"  # the native code cannot be built here: stock backends are used


_IN_MEMORY = (None, "shared_memory")


def _allocate(dtype: torch.dtype, group: ProcessGroup, count: int) -> Tensor:
    return comm.allocate(count * dtype.itemsize, group).view(dtype)


def _slowest(seconds: float) -> float:
    """Return the largest of the ranks' figures, on every rank."""
    figure = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(figure, dist.ReduceOp.MAX)
    return float(figure)


def _copy_gb_per_s(times: int = 5) -> float:
    """Return at what rate this rank reads and writes `COPY_BYTES`, while all ranks copy: the median of some times."""
    source = torch.ones(COPY_BYTES, dtype=torch.uint8)
    target = torch.zeros_like(source)
    seconds = []
    for _ in range(times):
        dist.barrier()
        start = time.perf_counter()
        target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return 2 * COPY_BYTES / statistics.median(seconds) / 1e9
