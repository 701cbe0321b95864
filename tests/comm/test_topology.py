"""Which ranks are on which hosts, and what the hosts are made of: from files, from this machine, from all ranks."""

from __future__ import annotations

import json
import os
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from deepytorch.comm.topology.discover import discover_host, host_id, network_devices, numa_nodes
from deepytorch.comm.topology.host import Gpu, Host, NetworkDevice
from deepytorch.comm.topology.topology import Topology, gather_topology, read_topology, scaled_topology
from deepytorch.errors import CommunicationError, DataError
from tests.comm.machines import of_fixture


def host(known_as: str, **more) -> Host:
    return Host(id=known_as, cpus=2, **more)


def shuffled(topology: Topology, order: list[int]) -> Topology:
    """The same topology with its hosts listed in another order."""
    place = {old: new for new, old in enumerate(order)}
    return Topology(tuple(topology.hosts[old] for old in order), tuple(place[old] for old in topology.host_of))


@pytest.mark.parametrize(
    ("name", "num_hosts", "num_ranks"),
    [
        ("pcie_8gpu", 1, 8),
        ("nvlink_8gpu", 1, 8),
        ("tcp_2x8", 2, 16),
        ("rdma_125x8", 125, 1000),
        ("cpu_1x2", 1, 2),
        ("cpu_2x2", 2, 4),
    ],
)
def test_fixture_is_read_and_survives_json(name, num_hosts, num_ranks):
    topology = of_fixture(name)
    assert (topology.num_hosts, topology.num_ranks, topology.is_regular) == (num_hosts, num_ranks, True)
    assert Topology.from_json(json.loads(json.dumps(topology.to_json()))) == topology


def test_links_of_the_fixtures_are_those_of_the_machines():
    nvlink = of_fixture("nvlink_8gpu").hosts[0]
    pcie = of_fixture("pcie_8gpu").hosts[0]
    assert (nvlink.fully_nvlinked, nvlink.has_reducing_nvswitch, nvlink.nvlinks_of_a_gpu) == (True, True, 18)
    assert (pcie.fully_nvlinked, pcie.nvlinks_of_a_gpu, pcie.num_nvlinks(0, 1)) == (False, 0, 0)
    assert [pcie.pcie_path(0, peer) for peer in (1, 2, 4)] == ["same_switch", "host_bridge", "across_sockets"]
    assert pcie.pcie_path(4, 0) == "across_sockets"


def test_nvlinks_without_a_switch_add_up_over_the_peers():
    gpus = tuple(Gpu(index, "V100") for index in range(3))
    mesh = host("mesh", gpus=gpus, nvlinks=((0, 1, 2), (0, 2, 1), (1, 2, 1)))
    assert (mesh.num_nvlinks(1, 0), mesh.fully_nvlinked, mesh.nvlinks_of_a_gpu) == (2, True, 2)
    assert not mesh.has_reducing_nvswitch
    assert not replace(mesh, nvlinks=((0, 1, 2),)).fully_nvlinked


def test_ranks_need_not_be_contiguous():
    topology = Topology((host("a"), host("b")), (0, 1, 0, 1))
    assert [topology.ranks_on(index) for index in (0, 1)] == [(0, 2), (1, 3)]
    assert [topology.local_rank(rank) for rank in range(4)] == [0, 0, 1, 1]
    assert topology.is_regular
    assert topology.ring_exits == 2  # each hop of a ring in rank order leaves its host
    assert Topology(topology.hosts, (0, 0, 1, 1)).ring_exits == 1


def test_unequal_hosts_are_not_regular():
    topology = Topology((host("a"), host("b")), (0, 0, 1))
    assert not topology.is_regular
    assert topology.ranks_per_host == 2


@given(st.permutations(range(4)), st.lists(st.integers(0, 3), min_size=0, max_size=8))
def test_digests_do_not_depend_on_the_order_of_hosts(order, more):
    topology = Topology(
        tuple(host(f"h{index}", gpus=(Gpu(0, f"g{index}"),)) for index in range(4)), (0, 1, 2, 3, *more)
    )
    other = shuffled(topology, order)
    assert (other.digest, other.shape_digest) == (topology.digest, topology.shape_digest)


def test_shape_outlives_a_reboot_and_ids_do_not():
    before = Topology((host("boot-1", name="node-1"),), (0, 0))
    after = Topology((host("boot-2", name="node-7"),), (0, 0))
    assert before.digest != after.digest
    assert before.shape_digest == after.shape_digest
    larger = Topology((host("boot-1", name="node-1"),), (0, 0, 0))
    assert larger.shape_digest != before.shape_digest


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], ["the topology", "[]", "hosts"]),
        ({"hosts": [{"id": "a", "cpus": 1}]}, ["host_of", "ranks_per_host"]),
        ({"hosts": [{"id": "a", "cpus": 1}], "host_of": [0, 1]}, ["[1]", "an index below 1"]),
        ({"hosts": [{"id": "a", "cpus": 1}, {"id": "b", "cpus": 1}], "host_of": [0, 0]}, ["[1]", "no rank"]),
        ({"hosts": [{"id": "a", "cpus": 1}, {"id": "a", "cpus": 1}], "host_of": [0, 1]}, ["'a'", "more than once"]),
        ({"hosts": [{"id": "a", "cpus": 0}], "host_of": [0]}, ["host 0, cpus", "0", "1 or more"]),
        ({"hosts": [{"id": "a", "cpu": 1}], "host_of": [0]}, ["host 0", "cpus", "unknown ['cpu']"]),
        ({"hosts": [{"id": "a", "cpus": 1, "count": "2"}], "host_of": [0]}, ["count", "'2'"]),
        (
            {"hosts": [{"id": "a", "cpus": 1, "nvlinks": [[0, 1, 4]]}], "host_of": [0]},
            ["host 0, nvlink 0", "[0, 1, 4]"],
        ),
        (
            {"hosts": [{"id": "a", "cpus": 1, "network": [{"name": "e", "kind": "ib"}]}], "host_of": [0]},
            ["device 0, kind", "'ib'", "tcp, rdma"],
        ),
    ],
)
def test_wrong_file_says_what_is_wrong_and_where(tmp_path, content, words):
    path = tmp_path / "topology.json"
    path.write_text(json.dumps(content))
    with pytest.raises(DataError) as error:
        read_topology(path)
    assert all(word in str(error.value) for word in [*words, str(path)]), str(error.value)


def test_file_that_is_not_there_or_no_json_is_named(tmp_path):
    (tmp_path / "bad.json").write_text("{")
    for name in ("missing.json", "bad.json"):
        with pytest.raises(DataError, match=name):
            read_topology(tmp_path / name)


def test_counted_hosts_are_hosts_of_their_own():
    topology = Topology.from_json({"hosts": [{"id": "n", "cpus": 4, "count": 3}], "ranks_per_host": 2})
    assert [found.id for found in topology.hosts] == ["n-0", "n-1", "n-2"]
    assert topology.host_of == (0, 0, 1, 1, 2, 2)


def test_scaling_repeats_the_last_host():
    topology = Topology((host("a"), host("b", name="last")), (0, 0, 1, 1))
    assert scaled_topology(topology, 1).host_of == (0,)
    assert [found.id for found in scaled_topology(topology, 2).hosts] == ["a"]
    larger = scaled_topology(topology, 8)
    assert [found.id for found in larger.hosts] == ["a", "b", "b+1", "b+2"]
    assert larger.hosts[3].name == "last"
    assert larger.host_of == (0, 0, 1, 1, 2, 2, 3, 3)
    with pytest.raises(DataError, match="multiple of 2"):
        scaled_topology(topology, 5)


def test_this_host_is_described_without_failing():
    found = discover_host()
    assert found.cpus == os.cpu_count()
    assert discover_host().id == found.id
    assert Host.from_json(json.loads(json.dumps(found.to_json()))) == found
    assert all(device.name != "lo" for device in found.network)


def test_nothing_on_the_machine_is_needed(tmp_path):
    nowhere = tmp_path / "nowhere"
    assert numa_nodes(nowhere) == ()
    assert network_devices(nowhere, nowhere) == ()
    assert len(host_id(nowhere, nowhere)) == 16


def test_namespaces_and_shared_memory_tell_hosts_apart(tmp_path):
    proc = tmp_path / "proc"
    for at in ("one", "two"):
        (proc / at / "sys/kernel/random").mkdir(parents=True)
        (proc / at / "sys/kernel/random/boot_id").write_text("same\n")
        (proc / at / "self/ns").mkdir(parents=True)
        (proc / at / "self/ns/net").touch()  # a file each: an inode each, like a network namespace each
    memory = Path("/dev/shm") if Path("/dev/shm").exists() else tmp_path
    assert host_id(proc / "one", memory) == host_id(proc / "one", memory)
    assert host_id(proc / "one", memory) != host_id(proc / "two", memory)
    assert host_id(proc / "one", memory) != host_id(proc / "one", tmp_path / "no-shm")


def device(root: Path, name: str, *, kind: str = "1", virtual: bool = False, **files: str) -> None:
    """A network device as sysfs shows it."""
    folder = root / ("devices/virtual" if virtual else "devices/pci") / "net" / name
    folder.mkdir(parents=True)
    for file, content in {"type": kind, "operstate": "up", "ifindex": "2", "iflink": "2", **files}.items():
        (folder / file).write_text(content + "\n")
    (root / "class").mkdir(exist_ok=True)
    (root / "class" / name).symlink_to(folder)


def test_network_devices_are_those_that_lead_out(tmp_path):
    device(tmp_path, "lo", kind="772", virtual=True)
    device(tmp_path, "eno1", speed="25000")
    device(tmp_path, "eno2", operstate="down")
    device(tmp_path, "docker0", virtual=True)
    device(tmp_path, "veth1", virtual=True, iflink="7", speed="10000")
    device(tmp_path, "veth2", virtual=True, iflink="8")
    (tmp_path / "devices/virtual/net/veth2/brport").mkdir()  # the host's end of a container's cable
    device(tmp_path, "bond0", virtual=True, speed="-1")
    (tmp_path / "devices/virtual/net/bond0/bonding").mkdir()
    (tmp_path / "devices/pci/net/eno1/device").mkdir()
    (tmp_path / "devices/pci/net/eno1/device/numa_node").write_text("1\n")
    port = tmp_path / "infiniband/mlx5_0/ports/1"
    port.mkdir(parents=True)
    (port / "state").write_text("4: ACTIVE\n")
    (port / "rate").write_text("400 Gb/sec (4X NDR)\n")
    (tmp_path / "infiniband/mlx5_1/ports/1").mkdir(parents=True)
    (tmp_path / "infiniband/mlx5_1/ports/1/state").write_text("1: DOWN\n")
    assert network_devices(tmp_path / "class", tmp_path / "infiniband") == (
        NetworkDevice("bond0", "tcp", None, None),
        NetworkDevice("eno1", "tcp", 25000, 1),
        NetworkDevice("veth1", "tcp", 10000, None),
        NetworkDevice("mlx5_0", "rdma", 400000, None),
    )


class Nvml:
    """What is used of pynvml, for a machine with given NVLinks: `(gpu, link) -> bus id at the other end`."""

    NVML_FEATURE_ENABLED = 1

    def __init__(self, num_gpus: int, nvlinks: dict[tuple[int, int], str], levels: dict[tuple[int, int], int]) -> None:
        self.num_gpus, self.nvlinks, self.levels = num_gpus, nvlinks, levels

    def nvmlInit(self) -> None: ...
    def nvmlShutdown(self) -> None: ...
    def nvmlDeviceGetCount(self) -> int:
        return self.num_gpus

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetName(self, handle: int) -> bytes:
        return b"NVIDIA X"

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(total=80 << 30)

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: int) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: int) -> int:
        raise RuntimeError("not supported")

    def nvmlDeviceGetPciInfo(self, handle: int) -> SimpleNamespace:
        return SimpleNamespace(busId=f"00000000:{handle:02X}:00.0".encode())

    def nvmlDeviceGetNvLinkState(self, handle: int, link: int) -> int:
        return int((handle, link) in self.nvlinks)

    def nvmlDeviceGetNvLinkRemotePciInfo(self, handle: int, link: int) -> SimpleNamespace:
        return SimpleNamespace(busId=self.nvlinks[handle, link].encode())

    def nvmlDeviceGetTopologyCommonAncestor(self, one: int, other: int) -> int:
        return self.levels[one, other]


def test_gpus_joined_directly_have_the_links_of_each_pair_once(monkeypatch):
    ends = {
        (0, 0): "00000000:01:00.0",
        (0, 1): "00000000:01:00.0",
        (1, 4): "00000000:00:00.0",
        (1, 5): "00000000:00:00.0",
    }
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(3, ends, {(0, 1): 10, (0, 2): 30, (1, 2): 50}))
    found = discover_host()
    assert found.nvlinks == ((0, 1, 2),)
    assert found.pcie_paths == ((0, 1, "same_switch"), (0, 2, "host_bridge"), (1, 2, "across_sockets"))
    assert found.gpus[2] == Gpu(2, "NVIDIA X", 80 << 30, None, 5, None)


def test_gpus_on_a_switch_are_a_full_matrix(monkeypatch):
    switch = {(gpu, link): "00000000:F0:00.0" for gpu in range(3) for link in range(18)}
    monkeypatch.setitem(sys.modules, "pynvml", Nvml(3, switch, {}))
    found = discover_host()
    assert found.nvlinks == ((0, 1, 18), (0, 2, 18), (1, 2, 18))
    assert (found.fully_nvlinked, found.has_reducing_nvswitch, found.pcie_paths) == (True, True, ())


def test_nvml_that_fails_is_no_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace())
    assert discover_host().cpus == os.cpu_count()


def gathered(hosts: list[Host], timeout_s: float = 20.0) -> list[Topology | Exception]:
    """What each rank gets when all of them, as threads, exchange their hosts through one store."""
    store = dist.HashStore()
    answers: list[Topology | Exception] = [CommunicationError("no answer")] * len(hosts)

    def run(rank: int) -> None:
        try:
            answers[rank] = gather_topology(store, rank, len(hosts), hosts[rank], timedelta(seconds=timeout_s))
        except Exception as error:
            answers[rank] = error

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return answers


def test_all_ranks_gather_the_same_topology():
    hosts = [host("b"), host("a"), host("b"), host("a")]
    topologies = gathered(hosts)
    assert all(topology == topologies[0] for topology in topologies)
    assert topologies[0].host_of == (0, 1, 0, 1)
    assert [found.id for found in topologies[0].hosts] == ["b", "a"]


def test_rank_that_sees_one_gpu_does_not_hide_the_others():
    one, both = host("a", gpus=(Gpu(0, "g"),)), host("a", gpus=(Gpu(0, "g"), Gpu(1, "g")))
    topologies = gathered([one, both, one])
    assert all(topology.hosts == (both,) for topology in topologies)


def test_silent_rank_is_named():
    with pytest.raises(CommunicationError, match=r"Ranks 1, 2 did not describe their host within 0\.2 s"):
        gather_topology(dist.HashStore(), 0, 3, host("a"), timedelta(seconds=0.2))
