"""`deepytorch.comm.measure`: every algorithm timed on the group's own tensors, and the fastest taken from then on."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from deepytorch.comm.algorithms import measured
from deepytorch.comm.algorithms.base import KINDS, Choice, DeviceKind, Operation, OperationKind
from deepytorch.comm.algorithms.select import ENGINE, Range, collective, explain
from deepytorch.comm.group.groups import Group, group_of
from deepytorch.comm.group.tables import set_measured
from deepytorch.errors import ConfigError

_SIZES = tuple(1 << power for power in range(10, 29, 2))  # 1 KB .. 256 MB
_ROUNDS, _WARM_UP = 5, 2
_LEAST_SECONDS = 0.002  # of one round: short collectives run several times in it
_MOST_TIMES = 32


def measure(
    group: dist.ProcessGroup | None = None, device: torch.device | str | None = None, most_bytes: int = _SIZES[-1]
) -> measured.Tables:
    """Time each algorithm that can run in `group`, and use the fastest of each size from now on.

    On GPUs this is what makes a group take anything but NCCL: predictions do not. Every rank calls it, at a time when
    nothing else runs; it takes seconds to a minute. What is found of GPUs is kept on disk, so that groups made later on
    the same hosts, GPUs and versions begin with it. Timed is the sum (or move) of float32 values; an algorithm that
    does not take a dtype or a reduction leaves such a call to NCCL or gloo as ever.

    Args:
        group: one of the deepytorch backend; None is the default group.
        device: where the tensors are; None is the current CUDA device.
        most_bytes: the largest payload that is timed; its choice holds for larger ones, too.

    Returns:
        For each kind of collective the ranges of sizes and what runs in them.

    Raises:
        ConfigError: another backend's group, no such device, or a group whose `Options` name an algorithm.
    """
    known = group_of(group)
    if device is None and not torch.cuda.is_available():
        raise ConfigError('measure() found no CUDA device; expected one, or measure(device="cpu")')
    place = torch.device(device) if device is not None else torch.device("cuda", torch.cuda.current_device())
    if known.options.algorithm is not None:
        raise ConfigError(
            f"measure() found a group that runs {known.options.algorithm!r} for every size; expected one made without "
            "Options(algorithm=...)"
        )
    if most_bytes < _SIZES[0]:
        raise ConfigError(f"most_bytes={most_bytes}; expected {_SIZES[0]} or more")
    kind_of_device: DeviceKind = "cuda" if place.type == "cuda" else "cpu"
    tables = {}
    for kind in KINDS:
        times = _times(known, group, kind, place, kind_of_device, [size for size in _SIZES if size <= most_bytes])
        tables[kind] = measured.table_of(times)
    set_measured(known, kind_of_device, tables)
    if known.rank == 0 and kind_of_device == "cuda":
        measured.remember(known.topology, known.gpus, tables)
    return tables


def _times(
    known: Group,
    group: dist.ProcessGroup | None,
    kind: OperationKind,
    place: torch.device,
    device: DeviceKind,
    sizes: list[int],
) -> dict[int, dict[Choice, float]]:
    found: dict[int, dict[Choice, float]] = {}
    before = Choice(ENGINE.name)
    for row in explain(known.topology, known.links, kind=kind, device=device, sizes=sizes):
        size = row.operation.num_bytes
        run = _call(kind, size, place, known.topology.num_ranks, group)
        found[size] = {}
        for prediction in row.predictions:
            choice = prediction.choice
            if choice is None or not _runs(known, choice, row.operation):
                continue
            set_measured(known, device, {kind: (Range(0, choice),)})
            found[size][choice] = _time_us(run, place, group)
        set_measured(known, device, {kind: (Range(0, before),)})
    return found


def _runs(known: Group, choice: Choice, operation: Operation) -> bool:
    algorithm = collective(choice.algorithm)
    shares = known.shares or not algorithm.in_memory
    return shares and algorithm.unsupported(operation, known.topology) is None


def _call(
    kind: OperationKind, num_bytes: int, place: torch.device, num_ranks: int, group: dist.ProcessGroup | None
) -> Callable[[], object]:
    share = max(1, num_bytes // 4 // num_ranks)
    whole = torch.zeros(share * num_ranks, device=place)
    part = torch.zeros(share, device=place)
    if kind == "all_reduce":
        return lambda: dist.all_reduce(whole, group=group)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group)
    source = dist.get_global_rank(group, 0) if group is not None else 0
    return lambda: dist.broadcast(whole, source, group=group)


def _time_us(run: Callable[[], object], place: torch.device, group: dist.ProcessGroup | None) -> float:
    """The fastest round of the slowest rank: noise only adds."""
    for _ in range(_WARM_UP):
        _seconds(run, 1, place)
    one = _slowest([_seconds(run, 1, place)], group)[0]
    times = max(1, min(_MOST_TIMES, int(_LEAST_SECONDS / max(one, 1e-9))))
    return 1e6 * min(_slowest([_seconds(run, times, place) / times for _ in range(_ROUNDS)], group))


def _seconds(run: Callable[[], object], times: int, place: torch.device) -> float:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    begin = time.perf_counter()
    for _ in range(times):
        run()
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter() - begin


def _slowest(seconds: list[float], group: dist.ProcessGroup | None) -> list[float]:
    """Of each round the slowest rank's time; alike on all ranks, who choose by it."""
    told = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    return [float(each) for each in told]
