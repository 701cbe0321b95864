"""What NCCL is told over TCP, and what it is left alone with."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepytorch.comm.group.devices.nccl import prepare, socket_settings
from tests.comm.machines import of_fixture


def test_sockets_are_set_over_tcp_between_hosts_with_gpus():
    settings = socket_settings(of_fixture("tcp_2x8"), {})
    threads, sockets = int(settings["NCCL_SOCKET_NTHREADS"]), int(settings["NCCL_NSOCKS_PERTHREAD"])
    assert threads >= 2
    assert sockets >= 2
    assert threads * sockets <= 64


@pytest.mark.parametrize("name", ["pcie_8gpu", "nvlink_8gpu", "rdma_125x8", "cpu_2x2"])
def test_nothing_is_set_where_sockets_do_not_matter(name):
    assert socket_settings(of_fixture(name), {}) == {}


def test_what_the_user_or_the_cloud_sets_stays():
    topology = of_fixture("tcp_2x8")
    environment = {"NCCL_SOCKET_NTHREADS": "1"}
    prepare(topology, environment)
    assert environment == {"NCCL_SOCKET_NTHREADS": "1"}
    assert socket_settings(topology, {}, "Amazon EC2") == {}


def test_faster_links_get_more_connections():
    topology = of_fixture("tcp_2x8")

    def connections(mbit: int) -> int:
        devices = [replace(device, speed_mbit=mbit) for device in topology.hosts[0].network]
        hosts = tuple(replace(host, network=tuple(devices)) for host in topology.hosts)
        settings = socket_settings(replace(topology, hosts=hosts), {})
        return int(settings["NCCL_SOCKET_NTHREADS"]) * int(settings["NCCL_NSOCKS_PERTHREAD"])

    assert connections(10_000) <= connections(100_000) <= connections(400_000)
    assert connections(10_000) < connections(400_000)
