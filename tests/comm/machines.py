"""Topologies to test with: those of `fixtures`, and plain hosts."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

from deepytorch.comm.topology.host import Host
from deepytorch.comm.topology.topology import Topology, read_topology

FIXTURES = Path(__file__).parent / "fixtures"


@lru_cache
def of_fixture(name: str) -> Topology:
    return read_topology(FIXTURES / f"{name}.json")


def hosts(num_hosts: int, per_host: int) -> Topology:
    listed = tuple(Host(f"h{index}", 4) for index in range(num_hosts))
    return Topology(listed, tuple(index for index in range(num_hosts) for _ in range(per_host)))
