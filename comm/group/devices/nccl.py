"""Settings for NCCL, made before it starts, where its own choice wastes bandwidth. Not yet run on several hosts."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

from deepytorch.comm.topology.nominal import TCP_STREAM_BYTES_PER_S, TCP_UNKNOWN_MBIT
from deepytorch.comm.topology.topology import Topology
from deepytorch.config import process_environment
from deepytorch.errors import ConfigError

_THREADS, _SOCKETS = "NCCL_SOCKET_NTHREADS", "NCCL_NSOCKS_PERTHREAD"
MOST_SOCKETS = 64  # NCCL's limit for the product of the two
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
    sockets = min(MOST_SOCKETS // threads, max(2, math.ceil(wanted / threads)))
    return {_THREADS: str(threads), _SOCKETS: str(sockets)}


@dataclass(frozen=True)
class TunerRow:
    """One line for NCCL's tuner plugin (the CSV form of its example): the settings for a range of sizes.

    collective: "allreduce" and so on. algorithm: "tree", "ring", "nvls", ...; protocol: "ll", "ll128", "simple".
    channels, num_nodes, num_ranks: -1 leaves the number open.
    """

    collective: str
    min_bytes: int
    max_bytes: int
    algorithm: str
    protocol: str
    channels: int = -1
    num_nodes: int = -1
    num_ranks: int = -1


def write_tuner_file(path: Path, rows: Sequence[TunerRow]) -> None:
    """Write the file that `NCCL_TUNER_CONFIG_FILE` names, for NCCL's CSV tuner plugin (`NCCL_TUNER_PLUGIN`).

    Raises `ConfigError` for ranges that overlap or are empty.
    """
    for first in rows:
        if first.min_bytes > first.max_bytes:
            raise ConfigError(
                f"a tuner row from {first.min_bytes} to {first.max_bytes} bytes; expected the smaller first"
            )
        for second in rows:
            same = (first.collective, first.num_nodes, first.num_ranks) == (
                second.collective,
                second.num_nodes,
                second.num_ranks,
            )
            if (
                first is not second
                and same
                and first.min_bytes <= second.max_bytes
                and second.min_bytes <= first.max_bytes
            ):
                raise ConfigError(
                    f"tuner rows for {first.collective} overlap: {first.min_bytes} to {first.max_bytes} and "
                    f"{second.min_bytes} to {second.max_bytes} bytes; expected each size once"
                )
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows(astuple(row) for row in rows)


def _vendor() -> str:
    try:
        return _VENDOR.read_text().strip()
    except OSError:
        return ""
