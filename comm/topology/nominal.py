"""Assumed values for links that were not measured, and the inner backend's own all-reduce composed of its hops.

Assumed figures serve planning and the first choice on a new machine; calibration replaces them. The source of every
constant is given; "assumed" marks those that come from no measurement of the project.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from deepytorch.comm.topology.cost import Link, Links, all_reduce_link, ring_share
from deepytorch.comm.topology.host import Gpu, Host
from deepytorch.comm.topology.topology import Topology

# TCP: the part of a link's speed that carries payload, and the rate of one connection on a fast link (torchcomms'
# lanes: 10.8, 15.8, 23.1 GB/s for 1, 2, 4 on hardware made for it; assumed 2.5 GB/s for the kernel's TCP).
TCP_LATENCY_US = 30.0  # assumed: in a data centre, including gloo's own work
TCP_EFFICIENCY = 0.94
TCP_STREAM_BYTES_PER_S = 2.5e9
TCP_UNKNOWN_MBIT = 10_000  # virtual devices do not report their speed
TCP_STREAMS = (1, 2, 4, 8, 16)

RDMA_LATENCY_US = 3.0  # assumed
RDMA_EFFICIENCY = 0.90

NVLINK_LATENCY_US = 2.0  # assumed: a barrier among GPUs through NVLink
NVLINK_BYTES_PER_S = 25e9  # each direction of one link, NVLink 2 to 4
NVLINK_EFFICIENCY = 0.82

PCIE_LATENCY_US = 25.0  # assumed: an asynchronous copy, and the flag that marks its end
PCIE_LANE_BYTES_PER_S = {1: 0.19e9, 2: 0.38e9, 3: 0.75e9, 4: 1.5e9, 5: 3.0e9, 6: 6.0e9}  # 3/4 of the raw rate
PCIE_UNKNOWN = (4, 16)  # generation, lanes

LOOPBACK = Link(25.0, 7.9e-4)  # gloo on a VM: 16 MB between 2 ranks in 13.2 ms
MEMORY_LATENCY_US = 10.0  # of the barriers; 64 KB among 2 ranks take 40 to 60 us on a VM with 2 cores
COPY_BYTES_PER_S_OF_A_NODE = 60e9  # assumed: 8 channels of DDR4 read and write about this much
MEMORY_PASSES = 3.0  # copies of the payload that each rank makes in the two-shot algorithm: in, reduce, out

NCCL_START_US = 8.0  # vLLM reports 11 us for 0.5 MB on 8 NVLinked GPUs
NCCL_PCIE_HOP_US = 10.0  # assumed
NCCL_FAR_PCIE_FRACTION = 0.75  # assumed: without peer access each byte is copied through the host's memory
NCCL_SOCKET_STREAMS = 2  # one thread and one socket for each of two channels, unless configured before NCCL starts


def complete(links: Links, topology: Topology, device: str) -> Links:
    """Return `links` with nominal values, named in `nominal`, for all links that were not measured.

    The engine's link is composed of the other links. If the network's rate was not measured, a measured engine
    determines the rate. device: "cpu" or "cuda", the engine's.
    """
    hosts, per_host = topology.host_kinds, topology.ranks_per_host
    if links.copy_bytes_per_s is None:
        links = _assumed(links, "copy_bytes_per_s", min(map(_copy_bytes_per_s, hosts)))
    if links.loopback is None:
        links = _assumed(links, "loopback", LOOPBACK)
    if links.memory is None:
        rate = MEMORY_PASSES * per_host * links.copy_us_per_byte()
        links = _assumed(links, "memory", Link(MEMORY_LATENCY_US * per_host, rate))
    if links.pcie is None:
        links = _assumed(links, "pcie", _slowest(_pcie(gpu) for host in hosts for gpu in host.gpus or (Gpu(0, ""),)))
    # NCCL's rings use all NVLinks of a hybrid cube mesh; the algorithms of `nvlink` ask for a link between every two
    if links.nvlink is None and all(host.ring_nvlinked for host in hosts):
        links = _assumed(links, "nvlink", _slowest(map(_nvlink, hosts)))
    if not links.network and topology.num_hosts > 1:
        engine = links.engine
        links = _assumed(links, "network", _network(topology) if engine is None else _network_of(engine, topology))
    if links.engine is None:
        links = _assumed(links, "engine", _composed_engine(links, topology, device))
    return links


def _assumed(links: Links, name: str, value: float | Link | Mapping[int, Link]) -> Links:
    values: dict[str, Any] = {name: value}
    return replace(links, nominal=links.nominal | {name}, **values)


def flat_ring(links: Links, topology: Topology, num_streams: int = 1) -> Link:
    """Return the all-reduce by one ring in rank order; us over payload bytes.

    Each hop is cut over `num_streams` connections. All hops run at once, so the slowest hop determines the rate. Bytes
    that leave a host share its network. Latency is the average hop's, since a message visits all hops.
    """
    size, exits = topology.num_ranks, topology.ring_exits
    if size == 1:
        return Link(0.0, 0.0)
    local = links.link("loopback")
    if topology.num_hosts == 1:
        return all_reduce_link(local, size)
    outer = links.network_link(exits * num_streams)
    num_outer = topology.ring_crossings
    latency_us = (outer.latency_us * num_outer + local.latency_us * (size - num_outer)) / size
    inner_rate = local.us_per_byte if num_outer < size else 0.0
    return all_reduce_link(Link(latency_us, max(exits * outer.us_per_byte, inner_rate)), size)


def scaled_links(links: Links, measured_on: Topology, topology: Topology, device: str) -> Links:
    """Return links that were measured on one topology for another topology of the same hosts.

    Hops stay unchanged. The engine's all-reduce is composed anew, and multiplied by the ratio of the measured engine to
    its own composition. The memory's all-reduce is dropped (assumed) if a host has another number of ranks.
    """
    same_hosts = topology.ranks_per_host == measured_on.ranks_per_host
    if same_hosts and topology.num_hosts == measured_on.num_hosts:
        return links
    memory = None if not same_hosts or "memory" in links.nominal else links.memory
    hops = replace(links, engine=None, memory=memory, times_us={}, nominal=links.nominal - {"engine", "memory"})
    if links.engine is None or measured_on.num_ranks == 1:
        return hops
    if not links.network and measured_on.num_hosts > 1:
        hops = replace(hops, network=_network_of(links.engine, measured_on))
    expected = complete(hops, measured_on, device).link("engine")
    composed = complete(hops, topology, device).link("engine")
    engine = Link(
        composed.latency_us * _ratio(links.engine.latency_us, expected.latency_us),
        composed.us_per_byte * _ratio(links.engine.us_per_byte, expected.us_per_byte),
    )
    return replace(hops, engine=engine)


def _ratio(measured: float, expected: float) -> float:
    return measured / expected if expected > 0 else 1.0


def _composed_engine(links: Links, topology: Topology, device: str) -> Link:
    if topology.num_ranks == 1:
        return Link(0.0, 0.0)
    return _nccl(links, topology) if device == "cuda" else flat_ring(links, topology)


def _nccl(links: Links, topology: Topology) -> Link:
    """Return NCCL's all-reduce: latency of trees, rate of rings.

    The rings use every NVLink or PCIe lane of a GPU and every RDMA device.
    """
    size, per_host, hosts = topology.num_ranks, topology.ranks_per_host, topology.num_hosts
    latency_us, rate = NCCL_START_US, 0.0
    if per_host > 1 and links.nvlink is not None:
        latency_us += 2 * math.ceil(math.log2(per_host)) * links.nvlink.latency_us
        in_switch = all(host.has_reducing_nvswitch for host in topology.host_kinds)
        rate = ((per_host + 1) / per_host if in_switch else ring_share(per_host)) * links.nvlink.us_per_byte
    elif per_host > 1:
        near = all(_one_switch(host) for host in topology.host_kinds)
        latency_us += 2 * math.ceil(math.log2(per_host)) * NCCL_PCIE_HOP_US
        rate = ring_share(per_host) * links.link("pcie").us_per_byte / (1.0 if near else NCCL_FAR_PCIE_FRACTION)
    if hosts > 1:
        rdma = all(host.speed_mbit("rdma") for host in topology.host_kinds)
        outer = links.network_link(max(links.network) if rdma else NCCL_SOCKET_STREAMS)
        latency_us += 2 * math.ceil(math.log2(hosts)) * outer.latency_us
        rate = max(rate, ring_share(size) * outer.us_per_byte)
    return Link(latency_us, rate)


def _one_switch(host: Host) -> bool:
    indices = [gpu.index for gpu in host.gpus]
    return bool(host.pcie_paths) and all(
        host.pcie_path(a, b) == "same_switch" for a in indices for b in indices if a < b
    )


def _network(topology: Topology) -> dict[int, Link]:
    if all(host.speed_mbit("rdma") for host in topology.host_kinds):
        mbit = min(host.speed_mbit("rdma") or 0 for host in topology.host_kinds)
        return {1: Link(RDMA_LATENCY_US, 8 / (mbit * RDMA_EFFICIENCY))}
    mbit = min(host.speed_mbit("tcp") or TCP_UNKNOWN_MBIT for host in topology.host_kinds)
    most = mbit * TCP_EFFICIENCY / 8  # bytes per us
    rates = {streams: min(most, streams * TCP_STREAM_BYTES_PER_S / 1e6) for streams in TCP_STREAMS}
    return {streams: Link(TCP_LATENCY_US, 1 / rate) for streams, rate in rates.items()}


def _network_of(engine: Link, topology: Topology) -> dict[int, Link]:
    """Return the network's link as a measured engine implies it.

    The engine's whole time per byte is attributed to leaving a host.
    """
    size, exits = topology.num_ranks, topology.ring_exits
    hop = engine.scaled(latency=1 / (2 * (size - 1)), rate=1 / (ring_share(size) * exits))
    return {exits: hop}


def _copy_bytes_per_s(host: Host) -> float:
    return COPY_BYTES_PER_S_OF_A_NODE * max(1, len(host.numa_nodes))


def _pcie(gpu: Gpu) -> Link:
    generation = gpu.pcie_generation or PCIE_UNKNOWN[0]
    lane = PCIE_LANE_BYTES_PER_S.get(generation, PCIE_LANE_BYTES_PER_S[max(PCIE_LANE_BYTES_PER_S)])
    return Link(PCIE_LATENCY_US, 1e6 / (lane * (gpu.pcie_width or PCIE_UNKNOWN[1])))


def _nvlink(host: Host) -> Link:
    return Link(NVLINK_LATENCY_US, 1e6 / (host.nvlinks_of_a_gpu * NVLINK_BYTES_PER_S * NVLINK_EFFICIENCY))


def _slowest(links: Iterable[Link]) -> Link:
    return max(links, key=lambda link: (link.us_per_byte, link.latency_us))
