"""Measurement of every algorithm on the group's own tensors (`deepytorch.comm.measure`), and choice of the fastest.

On GPUs, payloads that training sends while it computes (1 MB and more) are timed while a matrix multiplication of about
the same duration runs. Collectives slow computation down by the multiprocessors that they occupy, each to another
degree: the time until both are done counts.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from deepytorch.comm.algorithms import measured
from deepytorch.comm.algorithms.base import KINDS, Choice, DeviceKind, Operation, OperationKind
from deepytorch.comm.algorithms.select import ENGINE, Range, collective, explain
from deepytorch.comm.group.devices.registered import RegisteredMemory, allocate_together, registered_memory
from deepytorch.comm.group.groups import Group, group_of, set_registered_from
from deepytorch.comm.group.tables import set_measured
from deepytorch.errors import ConfigError

_SIZES = tuple(1 << power for power in range(10, 29, 2))  # 1 KB .. 256 MB
_ROUNDS, _WARM_UP = 5, 2
_LEAST_SECONDS = 0.002  # of one round: short collectives are repeated within a round
_MOST_TIMES = 32
_BESIDE_FROM_BYTES = 1 << 20  # smaller payloads are often waited for at once
_MATRIX = 4096  # rows and columns of the computation's matrices


def measure(
    group: dist.ProcessGroup | None = None, device: torch.device | str | None = None, most_bytes: int = _SIZES[-1]
) -> measured.Tables:
    """Time each algorithm that can run in `group`, and use the fastest of each size from now on.

    On GPUs only this measurement, and no prediction, makes a group use anything but NCCL. There payloads of 1 MB and
    more are timed while a matrix multiplication of about the same duration runs, until both are done. If NCCL offers
    registered memory, NCCL's all-reduces are timed in it too; gradients use it from the size from which it is faster.
    Every rank calls this function while nothing else runs; the call takes seconds to a minute. Results for GPUs are
    kept on disk, for later groups on the same hosts, GPUs and versions. float32 values are summed (or moved); an
    algorithm that does not support a dtype or a reduction leaves such a call to NCCL or gloo.

    Args:
        group: one of the deepytorch backend; None is the default group.
        device: where the tensors are; None is the current CUDA device.
        most_bytes: the largest payload that is timed; its choice also holds for larger payloads.

    Returns:
        For each kind of collective, the ranges of sizes and the choice for each range.

    Raises:
        ConfigError: another backend's group, no such device, or a group whose `Options` name an algorithm.
    """
    known = group_of(group)
    group = dist.group.WORLD if group is None else group
    assert group is not None
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
    known.backend.end_trials()  # trials must not replace the choices that are measured here
    kind_of_device: DeviceKind = "cuda" if place.type == "cuda" else "cpu"
    sizes = [size for size in _SIZES if size <= most_bytes]
    tables, registered = {}, None
    for kind in KINDS:
        times = _times(known, group, kind, place, kind_of_device, sizes)
        tables[kind] = measured.table_of(times)
        if kind == "all_reduce" and kind_of_device == "cuda":  # NCCL runs every size at this point
            registered = measured.faster_from(_times_registered(sizes, group, place))
    set_measured(known, kind_of_device, tables)
    if kind_of_device == "cuda":
        torch.cuda.empty_cache()  # frees the registered memory that was tried
        set_registered_from(group, registered)
        if known.rank == 0:
            measured.remember(known.topology, known.gpus, measured.Measured(tables, registered))
    return tables


def _times(
    known: Group,
    group: dist.ProcessGroup,
    kind: OperationKind,
    place: torch.device,
    device: DeviceKind,
    sizes: list[int],
) -> dict[int, dict[Choice, float]]:
    found: dict[int, dict[Choice, float]] = {}
    before = Choice(ENGINE.name)
    set_measured(known, device, {kind: (Range(0, before),)})
    for row in explain(known.topology, known.links, kind=kind, device=device, sizes=sizes):
        size = row.operation.num_bytes
        run = _call(kind, size, place, known.topology.num_ranks, group)
        run = _beside(run, size, place, group)
        found[size] = {}
        for prediction in row.predictions:
            choice = prediction.choice
            if choice is None or not _runs(known, choice, row.operation):
                continue
            set_measured(known, device, {kind: (Range(0, choice),)})
            found[size][choice] = _time_us(run, place, group)
        set_measured(known, device, {kind: (Range(0, before),)})
    return found


def _times_registered(
    sizes: list[int], group: dist.ProcessGroup, place: torch.device
) -> dict[int, tuple[float, float]]:
    """Return the us of NCCL's all-reduces in plain and in registered memory; nothing if NCCL offers none."""
    memory: RegisteredMemory | None = registered_memory(group, place)
    found = {}
    for size in sizes:
        if size < _BESIDE_FROM_BYTES:
            continue
        made = allocate_together(memory, [size], group, place)
        if made is None:
            return {}
        plain = torch.zeros_like(made[0]).view(torch.float32)
        ways = [_all_reduce(tensor, group) for tensor in (plain, made[0].view(torch.float32))]
        times = _times_of_computation(ways[0], size, place, group)  # the same for both ways
        first, second = (_time_us(_with_computation(run, times, place), place, group) for run in ways)
        found[size] = first, second
    return found


def _runs(known: Group, choice: Choice, operation: Operation) -> bool:
    algorithm = collective(choice.algorithm)
    shares = known.shares or not algorithm.in_memory
    return shares and algorithm.unsupported(operation, known.topology) is None


_Run = Callable[[], "dist.Work | None"]  # starts one collective


def _call(kind: OperationKind, num_bytes: int, place: torch.device, num_ranks: int, group: dist.ProcessGroup) -> _Run:
    share = max(1, num_bytes // 4 // num_ranks)
    whole = torch.zeros(share * num_ranks, device=place)
    part = torch.zeros(share, device=place)
    if kind == "all_reduce":
        return _all_reduce(whole, group)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group, async_op=True)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
    return lambda: dist.broadcast(whole, group=group, group_src=0, async_op=True)


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup) -> _Run:
    return lambda: dist.all_reduce(tensor, group=group, async_op=True)


def _beside(run: _Run, num_bytes: int, place: torch.device, group: dist.ProcessGroup) -> _Run:
    """Return `run`; on GPUs with a computation queued after it that takes as long as `run` alone, as now chosen."""
    return _with_computation(run, _times_of_computation(run, num_bytes, place, group), place)


def _times_of_computation(run: _Run, num_bytes: int, place: torch.device, group: dist.ProcessGroup) -> int:
    """Return how many computations take as long as `run` alone; 0 if `run` is timed without computation."""
    if place.type != "cuda" or num_bytes < _BESIDE_FROM_BYTES:
        return 0
    return max(1, round(_time_us(run, place, group) / _time_us(_computation(place), place, group)))


def _with_computation(run: _Run, times: int, place: torch.device) -> _Run:
    if not times:
        return run
    compute = _computation(place)

    def both() -> dist.Work | None:
        work = run()
        for _ in range(times):
            compute()
        return work

    return both


def _computation(place: torch.device) -> _Run:
    """Return a matrix multiplication on the current stream."""
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    matrix = torch.randn(_MATRIX, _MATRIX, device=place).to(dtype)
    product = torch.empty_like(matrix)

    def multiply() -> None:
        torch.mm(matrix, matrix, out=product)

    return multiply


def _time_us(run: _Run, place: torch.device, group: dist.ProcessGroup) -> float:
    """Return the us of the fastest round of the slowest rank: noise only adds time."""
    for _ in range(_WARM_UP):
        _seconds(run, 1, place)
    one = _slowest([_seconds(run, 1, place)], group)[0]
    times = max(1, min(_MOST_TIMES, int(_LEAST_SECONDS / max(one, 1e-9))))
    return 1e6 * min(_slowest([_seconds(run, times, place) / times for _ in range(_ROUNDS)], group))


def _seconds(run: _Run, times: int, place: torch.device) -> float:
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    begin = time.perf_counter()
    for _ in range(times):
        work = run()
        if work is not None:
            work.wait()
    if place.type == "cuda":
        torch.cuda.synchronize(place)
    return time.perf_counter() - begin


def _slowest(seconds: list[float], group: dist.ProcessGroup) -> list[float]:
    """Return the slowest rank's time of each round, equal on all ranks, so that all make the same choice."""
    told = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    return [float(each) for each in told]
