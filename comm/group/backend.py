"""The c10d backend "deepytorch": `init_process_group("deepytorch")` on CPU and CUDA tensors.

The backend combines stock gloo and nccl with algorithms of its own (`csrc`). A table that `select` makes from measured
links says which of them runs. Everything that all ranks of a group must share goes through the group's store, as JSON.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.optim.optimizer import register_optimizer_step_post_hook

from deepytorch.comm.group.areas import area_bytes, near_node, num_areas, room_bytes
from deepytorch.comm.group.groups import Group, remember, remember_stock
from deepytorch.comm.group.inner_backends import Streams, inner_backends, stock_group
from deepytorch.comm.group.link_costs import links_of, try_again
from deepytorch.comm.group.native import native
from deepytorch.comm.group.options import Options
from deepytorch.comm.group.rendezvous import same_everywhere, share_segment
from deepytorch.comm.group.tables import num_streams_of, tables_of, with_remembered
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.discover import discover_host
from deepytorch.comm.topology.topology import Topology, from_all, gather_topology
from deepytorch.config import Environment, process_environment
from deepytorch.errors import ConfigError
from deepytorch.extension import BUILD_TIMEOUT
from deepytorch.log import once


def create(options: Any, group_options: Any) -> Any:
    """Make the backend of one group for c10d: a native one, or a stock group if not all ranks have the same C++ build.

    A group never changes from one to the other.
    """
    rank, size, timeout = options.group_rank, options.group_size, options.timeout
    if not isinstance(timeout, timedelta):
        timeout = timedelta(seconds=float(timeout))
    if group_options is not None and not isinstance(group_options, Options):
        raise ConfigError(
            f"pg_options of the deepytorch backend is a {type(group_options).__name__}; expected "
            "deepytorch.comm.Options(...) or None"
        )
    wanted = group_options or Options()
    # The prefix counts the earlier groups of this name, whose answers must not be read. The count grows only after all
    # ranks have answered: a rank that tries again because others were late still meets them under the same prefix.
    asked = dist.PrefixStore(f"asked/{options.store.add(f'lives/{rank}', 0)}", options.store)
    environment = Environment.read()
    module, mine = None, _NONE
    if environment.enabled:  # a user who gives options waits for the C++ that they need
        module, mine = _module(asked, rank, environment.wait or wanted != Options())
    found = _said_by_all(asked, rank, size, mine, timeout)
    store = _of_this_life(options.store, rank)
    if module is not None and set(found) == {mine}:
        group = _make(module, store, options.group_id, rank, size, timeout, wanted)
        remember(options.group_id, group)
        return group.backend
    if environment.enabled:
        why = _why_stock(found)
        remember_stock(options.group_id, why)
        _tell_of_stock(found, why, rank)
    return stock_group(store, rank, size, timeout)


_LATER, _NONE = "later", "none"  # answers of a rank whose native module is being compiled, or is not available


def _module(asked: dist.Store, rank: int, waits: bool) -> tuple[Any | None, str]:
    """Return this rank's native module (None if not ready), and the rank's answer to the other ranks."""
    if native.is_built() or waits:
        if not native.is_built():
            asked.set(f"compiles/{rank}", "")
        module = native.load()
        return module, _NONE if module is None else native.digest()
    failure = native.failed()
    if failure is None:
        native.build_in_background()
        return None, _LATER
    once(
        logging.WARNING,
        "the deepytorch process group runs on stock gloo and nccl: %s. `deepytorch doctor` says what is missing, "
        "`deepytorch build` tries again",
        failure,
    )
    return None, _NONE


def _why_stock(found: Sequence[str]) -> str:
    """Return why a group whose ranks gave these answers runs on stock gloo and nccl."""
    none, later = ([rank for rank, said in enumerate(found) if said == word] for word in (_NONE, _LATER))
    if none:
        return f"ranks {none} lack deepytorch's native code"
    if later:
        return f"deepytorch's C++ was not compiled yet on ranks {later} when it was made"
    return "ranks have different builds of deepytorch"


def _tell_of_stock(found: Sequence[str], why: str, rank: int) -> None:
    """Log that a group runs on stock gloo and nccl, unless all its ranks answered that they have no native module."""
    if _LATER in found and _NONE not in found:
        if rank == 0 and len(found) > 1:  # one line for all ranks and groups of a process
            once(
                logging.WARNING,
                "deepytorch's C++ is not compiled yet: process groups that are made meanwhile run on stock gloo and "
                "nccl to their end. It is compiled in the background while this run lasts, for groups that are made "
                "later and for the next run. `deepytorch build` compiles it ahead",
            )
    elif len(set(found)) > 1:
        once(logging.WARNING, "%s: the group runs on stock gloo and nccl", why)


def _said_by_all(store: dist.Store, rank: int, size: int, mine: str, timeout: timedelta) -> list[str]:
    """Exchange answers; return each rank's: the digest of its native module, or one of the two words above.

    Ranks with different builds would wait for each other in vain.
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
        if gone or timeout >= BUILD_TIMEOUT:
            raise dist.DistStoreError(
                f"ranks {gone or late} did not come to make the group within {timeout.total_seconds():g} s; expected "
                f"all {size} ranks: look at what they print, or give a longer timeout"
            ) from None
        store.wait(keys, BUILD_TIMEOUT - timeout)
    return [store.get(key).decode() for key in keys]


def _make(
    module: Any, store: dist.Store, name: str, rank: int, size: int, timeout: timedelta, options: Options
) -> Group:
    """Make a group's native backend on top of stock ones, with its tables of algorithms."""
    topology = gather_topology(dist.PrefixStore("topology", store), rank, size, discover_host(), timeout)
    if all(host.gpus for host in topology.host_kinds):
        from deepytorch.comm.group.devices import nccl

        nccl.prepare(topology)
    cpu, cuda = inner_backends(store, rank, size, timeout, topology.num_hosts == 1)
    host = topology.host_of[rank]
    local = topology.ranks_on(host)
    local_rank = local.index(rank)
    single = topology.num_hosts == 1
    segment = _segment(module, store, topology, host, local_rank, cuda is not None, options, timeout)
    shares = same_everywhere(store, topology, rank, segment is not None or len(local) == 1, timeout)
    streams = Streams(store, topology, rank, timeout, shares)
    group = Group(None, topology, Links(), options, dist.PrefixStore("group", store), rank, timeout, shares)
    group = replace(group, links=links_of(group, module, cpu, streams))
    tables = tables_of(group)
    between = streams.up_to(num_streams_of(group, tables, cuda is not None))
    del streams  # closes the connections that only the measurement needed
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
        from deepytorch.comm.group.devices.symmetric import SymmetricCollectives

        backend.set_symmetric(SymmetricCollectives(name))
        if segment is not None:
            backend.set_pin(partial(pin, segment))
    group = replace(group, backend=backend, gpus=_gpus(group) if cuda is not None else ())
    for (kind, device, fixed), rows in tables.items():
        backend.set_table(kind, device == "cuda", rows, fixed)
    if cuda is not None and options.algorithm is None:
        group = with_remembered(group)
    measures = options.algorithm is None and options.links is None
    if measures and shares and topology.num_ranks > 1 and (single or between):
        try_again(group, name, len(between))
    return group


def _gpus(group: Group) -> tuple[str, ...]:
    """Return the names of the GPUs of all ranks' hosts; no device is selected or started for this."""
    mine = sorted({torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())})
    found = from_all(group.store, "gpus", group.rank, group.topology.num_ranks, group.timeout, mine)
    return tuple(sorted({name for names in found for name in names}))


def _tell_of_steps(backend: Any) -> None:
    """Notify the backend of every optimizer step, as long as the backend exists."""
    mark = backend.step_marker()

    def stepped(*_: Any) -> None:
        if not mark():
            hook.remove()

    hook = register_optimizer_step_post_hook(stepped)


def _of_this_life(store: dist.Store, rank: int) -> dist.Store:
    """Return the group's part of the store, apart from an earlier group of the same name in the same store.

    Every rank counts how often it has made the group. The counts agree, since all ranks make the group together.
    """
    return dist.PrefixStore(f"life/{store.add(f'lives/{rank}', 1)}", store)


def _with_deadline(store: Any) -> dist.Store:
    """Return a separate connection to the store, for a thread that must not wait long for an answer."""
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
    """Register a segment with CUDA until the segment is unmapped, so that copies from and to GPUs use DMA."""
    runtime, address = torch.cuda.cudart(), segment.address()
    result = runtime.cudaHostRegister(address, segment.num_bytes, 1)  # 1: for all devices of this process
    if int(result) != 0:
        once(logging.WARNING, "shared memory could not be pinned (CUDA error %s): copies to it are slower", result)
    else:
        segment.set_unpin(partial(runtime.cudaHostUnregister, address))
