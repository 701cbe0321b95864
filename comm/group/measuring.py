"""`deepytorch.comm.measure`: every algorithm timed on the group's own tensors, and the fastest taken from then on.

On GPUs, what training moves while it computes (1 MB and more) is timed beside a matrix multiplication that takes about
as long: collectives slow it down, each as much as it takes of the processors, and what counts is when both are done.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
import torch.distributed as dist

from deepytorch.comm.algorithms import measured
from deepytorch.comm.algorithms.base import KINDS, Choice, DeviceKind, Operation, OperationKind
from deepytorch.comm.algorithms.select import ENGINE, Range, collective, explain
from deepytorch.comm.group.groups import Group, group_of, set_registered_from
from deepytorch.comm.group.registered import RegisteredMemory, allocate_together, registered_memory
from deepytorch.comm.group.tables import set_measured
from deepytorch.errors import ConfigError

_SIZES = tuple(1 << power for power in range(10, 29, 2))  # 1 KB .. 256 MB
_ROUNDS, _WARM_UP = 5, 2
_LEAST_SECONDS = 0.002  # of one round: short collectives run several times in it
_MOST_TIMES = 32
_BESIDE_FROM_BYTES = 1 << 20  # what is smaller is waited for as often as not
_MATRIX = 4096  # of the computation's rows and columns


def measure(
    group: dist.ProcessGroup | None = None, device: torch.device | str | None = None, most_bytes: int = _SIZES[-1]
) -> measured.Tables:
    """Time each algorithm that can run in `group`, and use the fastest of each size from now on.

    On GPUs this is what makes a group take anything but NCCL: predictions do not. There 1 MB and more are timed beside
    a matrix multiplication that takes about as long, until both are done. Where NCCL offers memory that it is told of,
    its all-reduces are timed in that, too: gradients lie in it from the size on from which it is faster. Every rank
    calls it, at a time when nothing else runs; it takes seconds to a minute. What is found of GPUs is kept on disk, so
    that groups made later on the same hosts, GPUs and versions begin with it. Timed is the sum (or move) of float32
    values; an algorithm that does not take a dtype or a reduction leaves such a call to NCCL or gloo as ever.

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
    known.backend.end_trials()  # what is measured here is chosen by from now on
    kind_of_device: DeviceKind = "cuda" if place.type == "cuda" else "cpu"
    sizes = [size for size in _SIZES if size <= most_bytes]
    tables, registered = {}, None
    for kind in KINDS:
        times = _times(known, group, kind, place, kind_of_device, sizes)
        tables[kind] = measured.table_of(times)
        if kind == "all_reduce" and kind_of_device == "cuda":  # while NCCL runs them all
            registered = measured.faster_from(_times_registered(sizes, group, place))
    set_measured(known, kind_of_device, tables)
    if kind_of_device == "cuda":
        torch.cuda.empty_cache()  # registered memory that was tried goes back
        set_registered_from(group, registered)
        if known.rank == 0:
            measured.remember(known.topology, known.gpus, measured.Measured(tables, registered))
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
    sizes: list[int], group: dist.ProcessGroup | None, place: torch.device
) -> dict[int, tuple[float, float]]:
    """What NCCL's all-reduces take, and in memory that it was told of; nothing where there is none."""
    process_group = dist.group.WORLD if group is None else group
    assert process_group is not None
    memory: RegisteredMemory | None = registered_memory(process_group, place)
    found = {}
    for size in sizes:
        if size < _BESIDE_FROM_BYTES:
            continue
        made = allocate_together(memory, [size], process_group, place)
        if made is None:
            return {}
        plain = torch.zeros_like(made[0]).view(torch.float32)
        ways = [_all_reduce(tensor, group) for tensor in (plain, made[0].view(torch.float32))]
        times = _times_of_computation(ways[0], size, place, group)  # for both
        first, second = (_time_us(_with_computation(run, times, place), place, group) for run in ways)
        found[size] = first, second
    return found


def _runs(known: Group, choice: Choice, operation: Operation) -> bool:
    algorithm = collective(choice.algorithm)
    shares = known.shares or not algorithm.in_memory
    return shares and algorithm.unsupported(operation, known.topology) is None


_Run = Callable[[], "dist.Work | None"]  # begins one collective


def _call(
    kind: OperationKind, num_bytes: int, place: torch.device, num_ranks: int, group: dist.ProcessGroup | None
) -> _Run:
    share = max(1, num_bytes // 4 // num_ranks)
    whole = torch.zeros(share * num_ranks, device=place)
    part = torch.zeros(share, device=place)
    if kind == "all_reduce":
        return _all_reduce(whole, group)
    if kind == "reduce_scatter":
        return lambda: dist.reduce_scatter_tensor(part, whole, group=group, async_op=True)
    if kind == "all_gather":
        return lambda: dist.all_gather_into_tensor(whole, part, group=group, async_op=True)
    source = dist.get_global_rank(group, 0) if group is not None else 0
    return lambda: dist.broadcast(whole, source, group=group, async_op=True)


def _all_reduce(tensor: torch.Tensor, group: dist.ProcessGroup | None) -> _Run:
    return lambda: dist.all_reduce(tensor, group=group, async_op=True)


def _beside(run: _Run, num_bytes: int, place: torch.device, group: dist.ProcessGroup | None) -> _Run:
    """`run`, on GPUs with a computation that begins behind it and takes as long as it alone, as now chosen, does."""
    return _with_computation(run, _times_of_computation(run, num_bytes, place, group), place)


def _times_of_computation(run: _Run, num_bytes: int, place: torch.device, group: dist.ProcessGroup | None) -> int:
    """How often a computation takes as long as `run` does alone; 0 where nothing is computed beside."""
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
    """A matrix multiplication, on the current stream."""
    dtype = torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16
    matrix = torch.randn(_MATRIX, _MATRIX, device=place).to(dtype)
    product = torch.empty_like(matrix)

    def multiply() -> None:
        torch.mm(matrix, matrix, out=product)

    return multiply


def _time_us(run: _Run, place: torch.device, group: dist.ProcessGroup | None) -> float:
    """The fastest round of the slowest rank: noise only adds."""
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


def _slowest(seconds: list[float], group: dist.ProcessGroup | None) -> list[float]:
    """Of each round the slowest rank's time; alike on all ranks, who choose by it."""
    told = torch.tensor(seconds, dtype=torch.float64)
    dist.all_reduce(told, dist.ReduceOp.MAX, group=group)
    return [float(each) for each in told]
