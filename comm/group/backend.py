"""The c10d backend "deepytorch": `init_process_group("deepytorch")` on CPU and CUDA tensors.

It composes stock gloo and nccl with algorithms of its own (`csrc`), by a table that `select` makes of measured links.
Everything that all ranks of a group must share goes through the group's store, as JSON.
"""

from __future__ import annotations

import itertools
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from deepytorch.comm.algorithms import measured
from deepytorch.comm.algorithms.base import KINDS, Choice, Compression, DeviceKind, OperationKind
from deepytorch.comm.algorithms.select import COLLECTIVES, Range, collective, table
from deepytorch.comm.group import change_over, native, nccl, symmetric
from deepytorch.comm.group.areas import area_bytes, near_node, num_areas, room_bytes
from deepytorch.comm.group.inner_backends import Streams, inner_backends, stock_group
from deepytorch.comm.group.rendezvous import share_segment
from deepytorch.comm.topology.calibrate import STREAMS, Bench, calibrated
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.topology import Topology, discover_host, gather_topology
from deepytorch.config import Environment, process_environment
from deepytorch.errors import ConfigError
from deepytorch.log import logger, once

_NATIVE = tuple(found.name for found in COLLECTIVES)
_WITHOUT_END = (1 << 64) - 1


@dataclass(frozen=True)
class Options:
    """What a group may be told: `init_process_group("deepytorch", pg_options=Options(...))`, likewise `new_group`.

    algorithm: one for every size, in place of the choice by measurement ("engine" leaves all to gloo and nccl).
    compress: "bf16" or "fp16": sums and averages of float32 may be cast to it between hosts, where that is faster.
    quantize: "int8" or "fp8": reduce_scatter_tensor and all_gather_into_tensor of floats on the CPU, of 16,384 values
        or more, take a byte for each value between hosts, with error feedback from step to step (a step ends with
        `optimizer.step()`); for ZeRO. For FSDP2 see `deepytorch.comm.quantize`.
    links: measured costs to choose by; None measures them, or takes what was remembered for this topology.
    chunk_bytes, num_streams: settings of a forced `algorithm`; 0 leaves them to it.
    area_bytes: shared memory of each rank for a chunk on its way; 0 fits it to the caches, or for CPU-Reduce to PCIe.
    one_shot_bytes: payloads up to this are read by every rank as a whole.
    """

    algorithm: str | None = None
    compress: Compression | None = None
    quantize: str | None = None
    links: Links | None = None
    chunk_bytes: int = 0
    num_streams: int = 0
    area_bytes: int = 0
    one_shot_bytes: int = 1 << 15

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that makes no sense."""
        if self.algorithm is not None and self.algorithm not in _NATIVE:
            raise ConfigError(f"algorithm={self.algorithm!r}; expected None or one of {', '.join(_NATIVE)}")
        if self.compress not in (None, "bf16", "fp16"):
            raise ConfigError(
                f"compress={self.compress!r}; expected None, 'bf16' or 'fp16' (fp8 needs error feedback: "
                "deepytorch.comm.all_reduce(tensor, compress='fp8', key=...))"
            )
        if self.quantize not in (None, "int8", "fp8"):
            raise ConfigError(f"quantize={self.quantize!r}; expected None, 'int8' or 'fp8'")
        for name in ("num_streams", "one_shot_bytes"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name}={getattr(self, name)}; expected 0 or more")
        if 0 < self.chunk_bytes < 64 or self.chunk_bytes < 0:
            raise ConfigError(f"chunk_bytes={self.chunk_bytes}; expected 0, or 64 or more")
        if self.area_bytes < 0 or self.area_bytes % 4096:
            raise ConfigError(f"area_bytes={self.area_bytes}; expected 0 or a multiple of 4096")


@dataclass(frozen=True)
class Group:
    """What is known of one group of this process: its native backend, and what the choice was made by.

    `backend` is None in what is remembered: a group's memory goes with its `ProcessGroup`.
    """

    backend: Any
    topology: Topology
    links: Links
    options: Options
    store: dist.Store
    rank: int
    timeout: timedelta
    shares: bool = False  # whether the ranks of each host share memory
    gpus: tuple[str, ...] = ()  # their names, all ranks' where there are any
    allocations: Iterator[int] = field(default_factory=itertools.count)


_GROUPS: dict[str, Group] = {}  # by the name of the process group


def group_of(group: dist.ProcessGroup | None = None) -> Group:
    """What deepytorch knows of a process group (None: the default one). `ConfigError` where it is another backend's."""
    process_group = dist.group.WORLD if group is None else group
    name = None if process_group is None else process_group.group_name
    backend = None if process_group is None else _native_backend(process_group)
    if name is None or name not in _GROUPS or backend is None:
        raise ConfigError(
            'this is not a process group of the "deepytorch" backend; expected one made by '
            'init_process_group("deepytorch") or new_group(backend="deepytorch"), with its C++ compiled: that is done '
            "beside a first run, and `deepytorch build` does it ahead"
        )
    return replace(_GROUPS[name], backend=backend)


def _native_backend(process_group: dist.ProcessGroup) -> Any | None:
    """The native backend of a process group, which may have another one for some device, and may be wrapped."""
    module = native.loaded() if Environment.read().enabled else None
    for device in process_group._device_types:
        found = process_group._get_backend(device)
        found = getattr(found, "wrapped_pg", found)  # TORCH_DISTRIBUTED_DEBUG=DETAIL
        if module is not None and isinstance(found, module.ChangeOver) and found.is_over:
            found = found.ours
        if module is not None and isinstance(found, module.Backend):
            return found
    return None


def averages(group: dist.ProcessGroup) -> bool:
    """Whether the group's all_reduce averages by itself, whatever name the group goes by: ours and nccl's do."""
    return _native_backend(group) is not None or "nccl" in str(dist.get_backend(group))


def chosen(
    group: dist.ProcessGroup | None = None,
    kind: str = "all_reduce",
    num_bytes: int = 1 << 20,
    device: str = "cpu",
) -> Choice:
    """What the group does with a payload of that size."""
    _, algorithm, chunk_bytes, num_streams, wire = group_of(group).backend.chosen(kind, device == "cuda", num_bytes)
    return Choice(algorithm, chunk_bytes, num_streams, None if wire == "exact" else wire)


def create(options: Any, group_options: Any) -> Any:
    """What c10d calls to make the backend of one group: a native backend, or a stock group where that cannot be."""
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=float(timeout))
    if group_options is not None and not isinstance(group_options, Options):
        raise ConfigError(
            f"pg_options of the deepytorch backend is a {type(group_options).__name__}; expected "
            "deepytorch.comm.Options(...) or None"
        )
    wanted = group_options or Options()
    # What was said of an earlier group of this name is not read. A life counts once all have come: whoever tries again,
    # since others were late, meets them.
    asked = dist.PrefixStore(f"asked/{options.store.add(f'lives/{rank}', 0)}", options.store)
    enabled = Environment.read().enabled
    # who asks for something of its own waits for it
    unbuilt = enabled and not native.is_built() and not Environment.read().wait and wanted == Options()
    later = unbuilt and native.failed() is None
    if unbuilt and not later:
        once(
            logging.WARNING,
            "the deepytorch process group runs on stock gloo and nccl: %s. `deepytorch doctor` says what is missing, "
            "`deepytorch build` tries again",
            native.failed(),
        )
    if later:
        native.build_beside()
        logger.info("collectives of this group run on gloo and nccl while deepytorch's are compiled")
    elif enabled and not native.is_built():
        asked.set(f"compiles/{rank}", "")
    module = native.load() if enabled and not unbuilt else None
    mine = native.digest() if module is not None else _LATER if later else _NONE
    found = _said_by_all(asked, rank, size, mine, timeout)
    store = _of_this_life(options.store, rank)
    if module is not None and set(found) == {mine}:
        group = _make(module, store, options.group_id, rank, size, timeout, wanted)
        _GROUPS[options.group_id] = replace(group, backend=None)
        return group.backend
    stock, gloo, has_nccl = stock_group(store, rank, size, timeout)
    if _LATER in found and _NONE not in found and wanted == Options() and size > 1 and not has_nccl:
        make = partial(_make_in_mid_life, options.group_id, rank, size, timeout)
        change_over.begin(stock, gloo, options.group_id, dist.PrefixStore("change over", store), rank, size, make)
    return stock


_LATER, _NONE = "later", "none"  # what a rank says that compiles its native module, and one that has and will have none


def _said_by_all(store: dist.Store, rank: int, size: int, mine: str, timeout: timedelta) -> list[str]:
    """Which native module each rank has; one of the two words above where it has none.

    Ranks that differ would wait for each other in vain.
    """
    store.set(f"native/{rank}", mine)
    keys = [f"native/{peer}" for peer in range(size)]
    try:
        store.wait(keys, timeout)
    except RuntimeError:  # a DistStoreError, of most stores
        late = [peer for peer, key in enumerate(keys) if not store.check([key])]
        if not late:
            raise
        gone = [peer for peer in late if not store.check([f"compiles/{peer}"])]
        if gone or timeout >= native.BUILD_TIMEOUT:
            raise dist.DistStoreError(
                f"ranks {gone or late} did not come to make the group within {timeout.total_seconds():g} s; expected "
                f"all {size} ranks: look at what they print, or give a longer timeout"
            ) from None
        store.wait(keys, native.BUILD_TIMEOUT - timeout)
    found = [store.get(key).decode() for key in keys]
    without = [peer for peer, digest in enumerate(found) if digest == _NONE]
    if len(set(found)) > 1 and _LATER not in found:
        if without:
            once(
                logging.WARNING,
                "ranks %s lack deepytorch's native code: the group runs on stock gloo and nccl",
                without,
            )
        else:
            once(logging.WARNING, "ranks have different builds of deepytorch: the group runs on stock gloo and nccl")
    return found


def _make_in_mid_life(
    name: str, rank: int, size: int, timeout: timedelta, module: Any, store: dist.Store, gloo: Any
) -> tuple[Any, Callable[[], None]]:
    """The native backend of a group that runs on `gloo` already, on which nothing is measured meanwhile.

    Also returns what makes it known, once it is in place.
    """
    within = change_over.MAKE_TIMEOUT
    topology = gather_topology(dist.PrefixStore("topology", store), rank, size, discover_host(), within)
    if topology.num_hosts > 1:
        raise change_over.Stays(
            "its ranks are on several hosts, where an error has to close connections that torch holds"
        )
    by_formula = Options(links=Links())
    group = _compose(module, store, topology, gloo, None, name, rank, timeout, by_formula, within)
    if not group.shares:
        raise change_over.Stays("its ranks share no memory")
    known = replace(group, backend=None, options=Options())
    return group.backend, partial(_GROUPS.__setitem__, name, known)


def _make(
    module: Any, store: dist.Store, name: str, rank: int, size: int, timeout: timedelta, options: Options
) -> Group:
    topology = gather_topology(dist.PrefixStore("topology", store), rank, size, discover_host(), timeout)
    nccl.prepare(topology)
    cpu, cuda = inner_backends(store, rank, size, timeout, topology.num_hosts == 1)
    return _compose(module, store, topology, cpu, cuda, name, rank, timeout, options)


def _compose(
    module: Any,
    store: dist.Store,
    topology: Topology,
    cpu: Any,
    cuda: Any | None,
    name: str,
    rank: int,
    timeout: timedelta,
    options: Options,
    within: timedelta | None = None,
) -> Group:
    """The native backend over these inner ones, with its choices. within: how long ranks wait for each other here."""
    within = within or timeout
    host = topology.host_of[rank]
    local = topology.ranks_on(host)
    local_rank = local.index(rank)
    single = topology.num_hosts == 1
    segment = _segment(module, store, topology, host, local_rank, cuda is not None, options, within)
    shares = _same_everywhere(store, topology, rank, segment is not None or len(local) == 1, within)
    streams = Streams(store, topology, rank, within, shares)
    group = Group(None, topology, Links(), options, dist.PrefixStore("group", store), rank, timeout, shares)
    group = replace(group, links=_links(group, module, cpu, streams))
    tables = _tables(group)
    between = streams.up_to(_num_streams(group, tables, cuda is not None))
    del streams  # and what was connected to measure alone
    backend = module.Backend(
        rank=rank,
        size=topology.num_ranks,
        timeout_ms=int(timeout.total_seconds() * 1000),
        cpu=cpu,
        cuda=cuda,
        segment=segment,
        between=between,
        num_hosts=topology.num_hosts,
        host=host,
        ranks=_ranks_by_host(topology),
        store=None if single else _with_deadline(dist.PrefixStore("health", store)),
        exchanges=shares and single and options.algorithm in (None, "shared_memory"),
    )
    backend.set_one_shot_bytes(options.one_shot_bytes)
    if options.quantize is not None and between:
        backend.set_quantize(options.quantize)
        _tell_of_steps(backend)
    if cuda is not None:
        backend.set_symmetric(symmetric.SymmetricAllReduce(name))
        if segment is not None:
            backend.set_pin(partial(pin, segment))
    group = replace(group, backend=backend, gpus=_gpus(group) if cuda is not None else ())
    for (kind, device, fixed), rows in tables.items():
        backend.set_table(kind, device == "cuda", rows, fixed)
    if cuda is not None and options.algorithm is None:
        _set_remembered(group)
    return group


def _gpus(group: Group) -> tuple[str, ...]:
    """The names of the GPUs of all ranks' hosts; no device is chosen or started for that."""
    mine = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    group.store.set(f"gpus/{group.rank}", json.dumps(mine))
    keys = [f"gpus/{rank}" for rank in range(group.topology.num_ranks)]
    group.store.wait(keys, group.timeout)
    return tuple(sorted({name for key in keys for name in json.loads(group.store.get(key))}))


def _set_remembered(group: Group) -> None:
    """What rank 0 remembers to have been measured on these GPUs (`deepytorch.comm.measure`), for all ranks."""
    if group.rank == 0:
        found = measured.remembered(group.topology, group.gpus)
        group.store.set("measured", json.dumps(None if found is None else measured.to_json(found)))
    group.store.wait(["measured"], group.timeout)
    content = json.loads(group.store.get("measured"))
    if content is not None:
        set_measured(group, "cuda", measured.from_json(content))


def set_measured(group: Group, device: DeviceKind, tables: Mapping[OperationKind, Sequence[Range]]) -> None:
    """Let the group run what was measured to be fastest. Every rank sets the same tables."""
    for kind, ranges in tables.items():
        group.backend.set_table(kind, device == "cuda", _rows(group, kind, device, ranges), False)


def shares_memory(group: Group) -> bool:
    """Whether the ranks of each host share memory."""
    return group.shares


def _tell_of_steps(backend: Any) -> None:
    """Let the backend know when an optimizer has stepped, for as long as it lives."""
    mark = backend.step_marker()

    def stepped(*_: Any) -> None:
        if not mark():
            hook.remove()

    hook = register_optimizer_step_post_hook(stepped)


def _of_this_life(store: dist.Store, rank: int) -> dist.Store:
    """The group's keys, apart from those of an earlier group of the same name in the same store.

    Every rank counts how often it has made the group: all count alike, since they make it together.
    """
    return dist.PrefixStore(f"life/{store.add(f'lives/{rank}', 1)}", store)


def _with_deadline(store: Any) -> dist.Store:
    """A connection of its own, for a thread that must not wait long for an answer."""
    made: dist.Store = store.clone()
    made.set_timeout(timedelta(seconds=5))
    return made


def _ranks_by_host(topology: Topology) -> list[int]:
    if not topology.is_regular:
        return []
    return [rank for host in range(topology.num_hosts) for rank in topology.ranks_on(host)]


def _segment(
    module: Any,
    store: dist.Store,
    topology: Topology,
    host: int,
    local_rank: int,
    has_cuda: bool,
    options: Options,
    timeout: timedelta,
) -> Any | None:
    num_ranks = len(topology.ranks_on(host))
    if num_ranks == 1:
        return None
    through_host = has_cuda or options.algorithm == "cpu_reduce"
    areas = num_areas(topology, through_host)
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else local_rank
    return share_segment(
        module,
        dist.PrefixStore(f"segment/{host}", store),
        local_rank,
        num_ranks,
        areas,
        area_bytes(topology, areas, num_ranks, options.area_bytes),
        timeout,
        room_bytes=room_bytes(areas, num_ranks) if through_host and not options.area_bytes else 0,
        node=near_node(topology.hosts[host], device, process_environment()) if has_cuda else -1,
    )


def pin(segment: Any) -> None:
    """Make a segment known to CUDA until it is unmapped, so that copies from and to GPUs go by DMA."""
    runtime, address = torch.cuda.cudart(), segment.address()
    result = runtime.cudaHostRegister(address, segment.num_bytes, 1)  # 1: for all of this process's devices
    if int(result) != 0:
        once(logging.WARNING, "shared memory could not be pinned (CUDA error %s): copies to it are slower", result)
    else:
        segment.set_unpin(partial(runtime.cudaHostUnregister, address))


def _same_everywhere(store: dist.Store, topology: Topology, rank: int, mine: bool, timeout: timedelta) -> bool:
    """Whether the ranks of every host share memory: an algorithm of all hosts needs it on each."""
    store.set(f"shares/{rank}", "yes" if mine else "no")
    keys = [f"shares/{peer}" for peer in range(topology.num_ranks)]
    store.wait(keys, timeout)
    return all(store.get(key) == b"yes" for key in keys)


def _links(group: Group, module: Any, cpu: Any, streams: Streams) -> Links:
    if group.options.links is not None:
        return group.options.links
    if group.topology.num_ranks == 1 or group.options.algorithm is not None:
        return Links()

    def prepare() -> Bench:
        local = _local_backend(group, module) if group.shares and group.topology.ranks_per_host > 1 else None
        store = dist.PrefixStore("measuring", group.store)
        if not _same_everywhere(store, group.topology, group.rank, local is not None, group.timeout):
            local = None  # what one host cannot measure, none does
        return _bench(group, cpu, streams.up_to(max(STREAMS)), local)

    return calibrated(prepare, group.topology, group.store, group.rank, group.timeout)


def _local_backend(group: Group, module: Any) -> Any | None:
    """A native backend among the ranks of this host, to measure shared memory with."""
    host = group.topology.host_of[group.rank]
    local_rank, num_ranks = group.topology.local_rank(group.rank), len(group.topology.ranks_on(host))
    store = dist.PrefixStore(f"calibration/{host}", group.store)
    size = area_bytes(group.topology, 3, num_ranks)
    segment = share_segment(module, store, local_rank, num_ranks, 3, size, group.timeout)
    if segment is None:
        return None
    local = module.Backend(
        rank=local_rank,
        size=num_ranks,
        timeout_ms=int(group.timeout.total_seconds() * 1000),
        cpu=None,
        cuda=None,
        segment=segment,
        between=[],
        num_hosts=1,
        host=0,
        ranks=list(range(num_ranks)),
    )
    for fixed in (False, True):
        local.set_table("all_reduce", False, [(_WITHOUT_END, *_settings(Choice("shared_memory")))], fixed)
    return local


def _bench(group: Group, cpu: Any, between: Sequence[Any], local: Any | None) -> Bench:
    def engine(tensor: torch.Tensor) -> None:
        cpu.allreduce([tensor], dist.AllreduceOptions()).wait()

    def memory(tensor: torch.Tensor) -> None:
        assert local is not None
        local.allreduce([tensor], dist.AllreduceOptions()).wait()

    def across(tensor: torch.Tensor, connections: int) -> None:
        parts = tensor.chunk(2 * connections if connections > 1 else 1)
        works = [
            between[index % connections].allreduce([part], dist.AllreduceOptions()) for index, part in enumerate(parts)
        ]
        for work in works:
            work.wait()

    def agree(numbers: Sequence[float]) -> list[float]:
        tensor = torch.tensor(numbers, dtype=torch.float64)
        largest = dist.AllreduceOptions()
        largest.reduceOp = dist.ReduceOp(dist.ReduceOp.MAX)
        cpu.allreduce([tensor], largest).wait()
        return [float(number) for number in tensor]

    return Bench(group.topology, engine, memory if local is not None else None, across if between else None, agree)


def _settings(choice: Choice) -> tuple[str, int, int, str]:
    return choice.algorithm, choice.chunk_bytes, choice.num_streams, choice.compress or "exact"


_Rows = list[tuple[int, str, int, int, str]]  # as the native backend takes them: each up to which size
_Tables = dict[tuple[OperationKind, DeviceKind, bool], _Rows]


def _num_streams(group: Group, tables: _Tables, has_cuda: bool) -> int:
    """How many connections to other hosts the tables make use of; rank 0's number, so that all connect."""
    if group.topology.num_hosts == 1:
        return 0
    if has_cuda and group.options.algorithm is None:
        return max(STREAMS)  # `measure` may come to more than is predicted
    if group.rank == 0:
        group.store.set("streams", str(max([1, *(row[3] for rows in tables.values() for row in rows)])))
    group.store.wait(["streams"], group.timeout)
    return min(max(STREAMS), int(group.store.get("streams")))


def _tables(group: Group) -> _Tables:
    """The native backend's choices, by kind, device and whether they are for deterministic sums.

    Only what it can run on this group's hosts is looked at.
    """
    topology, options = group.topology, group.options
    found: _Tables = {}
    devices: tuple[DeviceKind, ...] = ("cpu", "cuda")
    for device, fixed in itertools.product(devices, (False, True)):
        links = Links() if fixed else group.links  # completed by formula, the same in every run
        ranges_of = {} if options.algorithm else table(topology, links, device=device, allow_compress=options.compress)
        for kind in KINDS:
            rows: _Rows = []
            if options.algorithm is not None:
                choice = Choice(options.algorithm, options.chunk_bytes, max(1, options.num_streams), options.compress)
                rows = [(_WITHOUT_END, *_settings(_possible(choice, kind, topology, group.shares, device)))]
            elif device == "cpu":  # on GPUs nccl, until `measure` has found ours to be faster on that machine
                rows = _rows(group, kind, device, ranges_of[kind])
            found[kind, device, fixed] = rows
    return found


def _rows(group: Group, kind: OperationKind, device: DeviceKind, ranges: Sequence[Range]) -> _Rows:
    rows = []
    for index, entry in enumerate(ranges):
        end = ranges[index + 1].from_bytes - 1 if index + 1 < len(ranges) else _WITHOUT_END
        rows.append((end, *_settings(_possible(entry.choice, kind, group.topology, group.shares, device))))
    return rows


def _possible(choice: Choice, kind: OperationKind, topology: Topology, shares: bool, device: DeviceKind) -> Choice:
    """`choice` where this group can run it, else the engine. shares: whether the ranks of each host share memory."""
    algorithm = collective(choice.algorithm)
    runs = (shares or not algorithm.in_memory) and algorithm.unavailable(kind, device, topology) is None
    return choice if runs else Choice("engine")
