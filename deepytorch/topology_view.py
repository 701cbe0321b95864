"""Tables of hosts, GPUs, links and network devices: `deepytorch doctor --topology`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deepytorch.comm.topology.discover import discover_host
from deepytorch.comm.topology.host import Host
from deepytorch.comm.topology.topology import Topology, read_topology

_PCIE_WORDS = {"same_switch": "switch", "host_bridge": "bridge", "across_sockets": "sockets"}


def collect_topology(file: Path | None = None) -> Topology:
    """Return the topology in `file`, or this host with a rank for each GPU (one rank without any).

    Raises `DataError` if the file cannot be read or has another layout.
    """
    if file is not None:
        return read_topology(file)
    host = discover_host()
    return Topology((host,), (0,) * max(1, len(host.gpus)))


def render_topology(topology: Topology) -> RenderableType:
    """Return a topology as tables for a `rich` console; hosts that differ in name and id only are shown once."""
    per_host = f"{topology.ranks_per_host} on each" if topology.is_regular else "not as many on each"
    counts = f"{_counted(topology.num_hosts, 'host')}, {_counted(topology.num_ranks, 'rank')}"
    parts: list[RenderableType] = [
        Text(counts if topology.num_hosts == 1 else f"{counts}, {per_host}"),
        Text(f"digest {topology.digest}, of the shape alone {topology.shape_digest}"),
    ]
    for kind in topology.host_kinds:
        hosts = [host for host in topology.hosts if replace(host, id="", name="") == kind]
        parts += ["", _host(hosts), *_gpus(kind), *_links(kind), *_network(kind)]
    return Group(*parts)


def _host(hosts: Sequence[Host]) -> RenderableType:
    first, last = (f"{host.name or 'host'} ({host.id})" for host in (hosts[0], hosts[-1]))
    nodes = ", ".join(f"{node.index}: {node.cpulist}" for node in hosts[0].numa_nodes) or "not known"
    names = first if len(hosts) == 1 else f"{len(hosts)} hosts, {first} to {last}"
    return Group(Text(names, style="bold"), Text(f"{_counted(hosts[0].cpus, 'processor')}; NUMA nodes {nodes}"))


def _gpus(host: Host) -> list[RenderableType]:
    if not host.gpus:
        return [Text("No GPU found.")]
    table = _table("GPUs", ("gpu", "name", "memory", "NUMA", "PCIe"))
    for gpu in host.gpus:
        memory = None if gpu.memory_bytes is None else f"{gpu.memory_bytes / 2**30:.0f} GiB"
        pcie = None if gpu.pcie_generation is None else f"gen {gpu.pcie_generation} x{gpu.pcie_width}"
        table.add_row(*map(_cell, (gpu.index, gpu.name, memory, gpu.numa_node, pcie)))
    return [table]


def _links(host: Host) -> list[RenderableType]:
    """Return a matrix as `nvidia-smi topo -m` prints it: NV18 for 18 NVLinks, else what PCIe traffic has to cross."""
    if len(host.gpus) < 2:
        return []
    table = _table("Links between GPUs", ("", *(str(gpu.index) for gpu in host.gpus)))
    for gpu in host.gpus:
        table.add_row(str(gpu.index), *(_link(host, gpu.index, peer.index) for peer in host.gpus))
    return [table]


def _link(host: Host, gpu: int, peer: int) -> str:
    if gpu == peer:
        return "."
    links = host.num_nvlinks(gpu, peer)
    return f"NV{links}" if links else _PCIE_WORDS.get(host.pcie_path(gpu, peer) or "", "?")


def _network(host: Host) -> list[RenderableType]:
    if not host.network:
        return [Text("No network device found.")]
    table = _table("Network", ("device", "kind", "Mbit/s", "NUMA"))
    for device in host.network:
        speed = None if device.speed_mbit is None else f"{device.speed_mbit:,}"
        table.add_row(*map(_cell, (device.name, device.kind, speed, device.numa_node)))
    return [table]


def _table(title: str, headings: Sequence[str]) -> Table:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_edge=False, padding=(0, 1))
    for heading in headings:
        table.add_column(heading, no_wrap=True)
    return table


def _cell(value: object) -> Text:
    return Text("not known" if value is None else str(value))


def _counted(number: int, noun: str) -> str:
    return f"{number:,} {noun}{'' if number == 1 else 's'}"
