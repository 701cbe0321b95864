"""Settings for NCCL, made before it starts, where its own choice wastes bandwidth. Not yet run on several hosts."""

from __future__ import annotations

import math
from collections.abc import Mapping, MutableMapping
from pathlib import Path

from deepytorch.comm.topology.nominal import TCP_STREAM_BYTES_PER_S, TCP_UNKNOWN_MBIT
from deepytorch.comm.topology.topology import Topology
from deepytorch.config import process_environment

_THREADS, _SOCKETS = "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"
_MOST_SOCKETS = 64  # NCCL's limit for the product of the two
_TUNES_ITSELF = ("amazon", "google")  # NCCL has settings for these clouds, and uses 1 x 1 elsewhere
_VENDOR = Path("/sys/devices/virtual/dmi/id/sys_vendor")


def prepare(topology: Topology, environment: MutableMapping[str, str] | None = None) -> None:
    """Set NCCL's socket threads for this topology, unless the user has set them; NCCL reads them when it starts."""
    environment = process_environment() if environment is None else environment
    environment.update(socket_settings(topology, environment, _vendor()))


def socket_settings(topology: Topology, environment: Mapping[str, str], vendor: str = "") -> dict[str, str]:
    """Return threads, and sockets per thread, for NCCL over TCP: enough connections to fill the link, up to 64.

    The result is empty on one host, without GPUs, with RDMA, on clouds that NCCL itself tunes for, and if the user has
    set either value.
    """
    if topology.num_hosts == 1 or not all(host.gpus for host in topology.host_kinds):
        return {}
    if any(host.speed_mbit("rdma") for host in topology.host_kinds) or {_THREADS, _SOCKETS} & set(environment):
        return {}
    if any(cloud in vendor.lower() for cloud in _TUNES_ITSELF):
        return {}
    mbit = min(host.speed_mbit("tcp") or TCP_UNKNOWN_MBIT for host in topology.host_kinds)
    wanted = math.ceil(2 * mbit * 1e6 / 8 / TCP_STREAM_BYTES_PER_S)  # twice what fills the link: connections are uneven
    threads = min(8, max(2, math.ceil(math.sqrt(wanted))))
    sockets = min(_MOST_SOCKETS // threads, max(2, math.ceil(wanted / threads)))
    return {_THREADS: str(threads), _SOCKETS: str(sockets)}


def _vendor() -> str:
    try:
        return _VENDOR.read_text().strip()
    except OSError:
        return ""
