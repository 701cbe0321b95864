"""The hardware of one host: processors, GPUs, the links between them, network devices. Plain values, also as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from typing import Any, Literal

from deepytorch.comm.topology.checked_json import as_count, as_list, as_object, as_text
from deepytorch.errors import DataError

NetworkKind = Literal["tcp", "rdma"]
PcieKind = Literal["same_switch", "host_bridge", "across_sockets"]
PCIE_KINDS: tuple[PcieKind, ...] = ("same_switch", "host_bridge", "across_sockets")  # the nearest first

# Hopper and Blackwell GPUs have this many NVLinks. A GPU whose links to its peers add up to more uses a switch.
MOST_NVLINKS = 18


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. None stands for an unknown value."""

    index: int
    name: str
    memory_bytes: int | None = None
    numa_node: int | None = None
    pcie_generation: int | None = None
    pcie_width: int | None = None  # lanes


@dataclass(frozen=True, slots=True)
class NetworkDevice:
    """One network device. `speed_mbit`: the negotiated speed of the link, in 10^6 bits per second."""

    name: str
    kind: NetworkKind
    speed_mbit: int | None = None
    numa_node: int | None = None


@dataclass(frozen=True, slots=True)
class NumaNode:
    """One NUMA node. `cpulist` is in the kernel's spelling, such as "0-31,64-95"."""

    index: int
    cpulist: str


@dataclass(frozen=True, slots=True)
class Host:
    """One host: a unit that shares memory, and is reached from elsewhere through its network devices.

    `id` is equal for two processes exactly when they can share memory: see `discover.host_id`. `nvlinks` holds `(gpu,
    gpu, number of NVLinks)` for pairs with the lower index first; GPUs that share an NVSwitch make a full matrix, each
    pair with all the links that a GPU has. `pcie_paths` holds `(gpu, gpu, kind)`.
    """

    id: str
    cpus: int  # logical processors
    numa_nodes: tuple[NumaNode, ...] = ()
    gpus: tuple[Gpu, ...] = ()
    nvlinks: tuple[tuple[int, int, int], ...] = ()
    pcie_paths: tuple[tuple[int, int, PcieKind], ...] = ()
    network: tuple[NetworkDevice, ...] = ()
    name: str = ""  # shown in tables and messages

    def num_nvlinks(self, gpu: int, peer: int) -> int:
        """Return the number of NVLinks between two GPUs, 0 if there is none."""
        low, high = min(gpu, peer), max(gpu, peer)
        return sum(links for a, b, links in self.nvlinks if (a, b) == (low, high))

    def pcie_path(self, gpu: int, peer: int) -> PcieKind | None:
        """Return what PCIe traffic between two GPUs has to cross, or None if it is not known."""
        low, high = min(gpu, peer), max(gpu, peer)
        return next((kind for a, b, kind in self.pcie_paths if (a, b) == (low, high)), None)

    @property
    def fully_nvlinked(self) -> bool:
        """Return whether every two of the GPUs (at least two) are joined by NVLink."""
        indices = [gpu.index for gpu in self.gpus]
        pairs = [(a, b) for a in indices for b in indices if a < b]
        return bool(pairs) and all(self.num_nvlinks(a, b) for a, b in pairs)

    @property
    def ring_nvlinked(self) -> bool:
        """Return whether a ring through NVLinks alone visits all of the GPUs, as on 8 V100 in a hybrid cube mesh."""
        return _has_nvlink_ring(self)

    @property
    def has_reducing_nvswitch(self) -> bool:
        """Return whether the NVLinks go through a switch of Hopper's generation or later.

        NVLinks go through a switch if there are more of them than a GPU has.
        """
        through_switch = any(sum(self._links_of(gpu.index)) > MOST_NVLINKS for gpu in self.gpus)
        return through_switch and self.nvlinks_of_a_gpu >= MOST_NVLINKS

    @property
    def nvlinks_of_a_gpu(self) -> int:
        """Return the number of NVLinks of the GPU with the fewest: through a switch, all of them serve any peer."""
        counts = [self._links_of(gpu.index) for gpu in self.gpus]
        return min((max(links) if sum(links) > MOST_NVLINKS else sum(links) for links in counts if links), default=0)

    def speed_mbit(self, kind: NetworkKind) -> int | None:
        """Return the speed of the devices of one kind in 10^6 bits per second, if known.

        RDMA devices add up; of TCP devices the fastest counts.
        """
        speeds = [device.speed_mbit for device in self.network if device.kind == kind and device.speed_mbit]
        if not speeds:
            return None
        return sum(speeds) if kind == "rdma" else max(speeds)

    def _links_of(self, gpu: int) -> list[int]:
        return [links for a, b, links in self.nvlinks if gpu in (a, b)]

    def to_json(self) -> dict[str, Any]:
        """Return the host as plain JSON values."""
        content: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return content

    @staticmethod
    def from_json(content: Any, where: str = "the host") -> Host:
        """Return the host that a JSON value holds.

        Raises:
            DataError: the value, which the error calls `where`, has another layout.
        """
        optional = ("numa_nodes", "gpus", "nvlinks", "pcie_paths", "network", "name")
        values = as_object(content, where, ("id", "cpus"), optional)
        gpus = tuple(_gpu(value, f"{where}, gpu {at}") for at, value in _items(values, where, "gpus"))
        indices = [gpu.index for gpu in gpus]
        if len(set(indices)) != len(indices):
            raise DataError(f"{where} has GPUs with the indices {indices}, expected each once.")
        nvlinks = []
        for at, value in _items(values, where, "nvlinks"):
            low, high, links = _pair(value, f"{where}, nvlink {at}", indices)
            nvlinks.append((low, high, as_count(links, f"{where}, nvlink {at}, number of links", 1)))
        paths = []
        for at, value in _items(values, where, "pcie_paths"):
            low, high, kind = _pair(value, f"{where}, pcie path {at}", indices)
            paths.append((low, high, _pcie_kind(kind, f"{where}, pcie path {at}, kind")))
        return Host(
            id=as_text(values["id"], f"{where}, id"),
            cpus=as_count(values["cpus"], f"{where}, cpus", 1),
            numa_nodes=tuple(_numa(value, f"{where}, node {at}") for at, value in _items(values, where, "numa_nodes")),
            gpus=gpus,
            nvlinks=tuple(sorted(nvlinks)),
            pcie_paths=tuple(sorted(paths)),
            network=tuple(_network(value, f"{where}, device {at}") for at, value in _items(values, where, "network")),
            name=as_text(values.get("name", ""), f"{where}, name"),
        )


@lru_cache
def _has_nvlink_ring(host: Host) -> bool:
    peers = {
        gpu.index: {b if a == gpu.index else a for a, b, _ in host.nvlinks if gpu.index in (a, b)} for gpu in host.gpus
    }
    if len(peers) < 2:
        return False
    first = host.gpus[0].index

    def closes(at: int, left: frozenset[int]) -> bool:
        return any(closes(peer, left - {peer}) for peer in peers[at] & left) if left else first in peers[at]

    return closes(first, frozenset(peers) - {first})


def _items(values: dict[str, Any], where: str, key: str) -> Sequence[tuple[int, Any]]:
    return list(enumerate(as_list(values.get(key, []), f"{where}, {key}")))


def _optional_count(values: dict[str, Any], where: str, key: str) -> int | None:
    return None if values.get(key) is None else as_count(values[key], f"{where}, {key}")


def _gpu(content: Any, where: str) -> Gpu:
    known = ("memory_bytes", "numa_node", "pcie_generation", "pcie_width")
    values = as_object(content, where, ("index", "name"), known)
    index, name = as_count(values["index"], f"{where}, index"), as_text(values["name"], f"{where}, name")
    return Gpu(index, name, **{key: _optional_count(values, where, key) for key in known})


def _network(content: Any, where: str) -> NetworkDevice:
    values = as_object(content, where, ("name", "kind"), ("speed_mbit", "numa_node"))
    kind: NetworkKind = "rdma" if as_text(values["kind"], f"{where}, kind", ("tcp", "rdma")) == "rdma" else "tcp"
    speed, node = (_optional_count(values, where, key) for key in ("speed_mbit", "numa_node"))
    return NetworkDevice(as_text(values["name"], f"{where}, name"), kind, speed, node)


def _numa(content: Any, where: str) -> NumaNode:
    values = as_object(content, where, ("index", "cpulist"))
    return NumaNode(as_count(values["index"], f"{where}, index"), as_text(values["cpulist"], f"{where}, cpulist"))


def _pair(content: Any, where: str, indices: Sequence[int]) -> tuple[int, int, Any]:
    values = as_list(content, where)
    if len(values) != 3 or values[0] not in indices or values[1] not in indices or values[0] == values[1]:
        raise DataError(f"{where} is {values}, expected [gpu, gpu, value] with two of the GPUs {list(indices)}.")
    return min(values[:2]), max(values[:2]), values[2]


def _pcie_kind(value: Any, where: str) -> PcieKind:
    as_text(value, where, PCIE_KINDS)
    return next(kind for kind in PCIE_KINDS if kind == value)
