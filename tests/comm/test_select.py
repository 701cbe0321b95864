"""Which algorithm is chosen: on the machines of the fixtures, by measured links, and never without a gain."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepytorch.comm.algorithms.base import KINDS, Choice, Operation
from deepytorch.comm.algorithms.select import (
    COLLECTIVES,
    ENGINE_MARGIN,
    ENGINE_MARGIN_BETWEEN_HOSTS,
    TABLE_SIZES,
    Range,
    collective,
    explain,
    predict_us,
    select,
    table,
)
from deepytorch.comm.topology.cost import Link, Links
from deepytorch.comm.topology.host import Host
from deepytorch.comm.topology.topology import Topology
from tests.comm.machines import hosts, of_fixture

NAMES = ("pcie_8gpu", "nvlink_8gpu", "tcp_2x8", "rdma_125x8", "cpu_1x2", "cpu_2x2")
KB, MB = 1 << 10, 1 << 20


def look_up(ranges: tuple[Range, ...], num_bytes: int) -> Choice:
    return [entry.choice for entry in ranges if entry.from_bytes <= num_bytes][-1]


def chosen(fixture: str, num_bytes: int, links: Links | None = None, **operation) -> str:
    return select(
        Operation("all_reduce", num_bytes, **operation), of_fixture(fixture), Links() if links is None else links
    ).algorithm


links_strategy = st.builds(Link, st.floats(0, 1e4), st.floats(1e-6, 1e-1))
measured = st.builds(
    Links,
    engine=st.none() | links_strategy,
    loopback=st.none() | links_strategy,
    memory=st.none() | links_strategy,
    network=st.dictionaries(st.sampled_from([1, 2, 4, 8, 16]), links_strategy, max_size=4),
    copy_bytes_per_s=st.none() | st.floats(1e8, 1e12),
    pcie=st.none() | links_strategy,
    nvlink=st.none() | links_strategy,
)
operations = st.builds(
    Operation,
    st.sampled_from(KINDS),
    st.integers(1, 1 << 30),
    st.sampled_from(["fp32", "bf16", "int32", "bool", "complex64"]),
    st.sampled_from(["sum", "avg", "max", "product"]),
    st.sampled_from(["cpu", "cuda"]),
)


def test_pcie_box_reduces_on_the_cpu_when_large():
    assert chosen("pcie_8gpu", 64 * MB, device="cuda") == "cpu_reduce"
    assert chosen("pcie_8gpu", 64 * KB, device="cuda") == "engine"


def test_nvlink_box_uses_symmetric_memory_when_small():
    assert chosen("nvlink_8gpu", 16 * KB, device="cuda") == "nvlink_one_shot"
    assert chosen("nvlink_8gpu", MB, device="cuda") in ("nvlink_two_shot", "nvlink_multimem")
    assert chosen("nvlink_8gpu", 256 * MB, device="cuda") == "engine"
    assert chosen("nvlink_8gpu", 16 * KB, device="cuda", reduce_op="max") == "engine"


@pytest.mark.parametrize("num_bytes", [MB, 8 * MB, 256 * MB])
def test_two_hosts_over_tcp_reduce_inside_first(num_bytes):
    assert chosen("tcp_2x8", num_bytes) == "hierarchical"
    assert chosen("tcp_2x8", max(num_bytes, 8 * MB), device="cuda") == "cpu_reduce"


@pytest.mark.parametrize("num_bytes", [KB, MB, 64 * MB, 1 << 30])
def test_rdma_cluster_stays_with_nccl_unless_measured_otherwise(num_bytes):
    assert chosen("rdma_125x8", num_bytes, device="cuda") == "engine"
    slow = Links(engine=Link(1e5, 1.0), network={8: Link(3.0, 1e-4)})
    assert chosen("rdma_125x8", max(num_bytes, 8 * MB), slow, device="cuda") == "cpu_reduce"


def test_one_host_of_cpus_shares_memory():
    for kind in KINDS:
        operation = Operation(kind, MB)
        assert select(operation, of_fixture("cpu_1x2"), Links()).algorithm == "shared_memory"


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"dtype": "complex64"}, "complex64"),
        ({"dtype": "bool"}, "bool"),
        ({"dtype": "int32", "reduce_op": "avg"}, "int32"),
        ({"reduce_op": "product"}, "product"),
        ({"device": "cuda"}, "cuda"),
    ],
)
def test_shared_memory_says_what_it_cannot_do(changes, word):
    operation = replace(Operation("all_reduce", MB), **changes)
    assert word in (collective("shared_memory").unsupported(operation, of_fixture("cpu_1x2")) or "")
    assert select(operation, of_fixture("cpu_1x2"), Links()).algorithm == "engine"


def test_reduction_does_not_matter_where_nothing_is_reduced():
    for kind in ("all_gather", "broadcast"):
        operation = Operation(kind, MB, "bool", "product")
        assert collective("shared_memory").unsupported(operation, of_fixture("cpu_1x2")) is None


def test_each_form_of_several_hosts_asks_for_equal_hosts():
    topology = Topology((Host("a", 2), Host("b", 2)), (0, 0, 1))
    for name, device, reason in (
        ("hierarchical", "cpu", "different numbers"),
        ("streams", "cpu", "one rank on each host"),
        ("cpu_reduce", "cuda", "different numbers"),
    ):
        operation = Operation("all_reduce", 8 * MB, device=device)
        assert reason in (collective(name).unsupported(operation, topology) or "")
    assert select(Operation("all_reduce", 8 * MB), topology, Links()).algorithm == "engine"


def test_lone_rank_stays_with_the_engine():
    for device in ("cpu", "cuda"):
        operation = Operation("all_reduce", MB, device=device)
        assert select(operation, Topology((Host("a", 2),), (0,)), Links()) == Choice("engine")


def lab(per_host: int, network: dict[int, float], memory: float = 3e-4) -> tuple[Topology, Links]:
    """Two hosts whose network carries so many bytes a us, by the number of streams; the engine is a flat ring."""
    topology = hosts(2, per_host)
    size = topology.num_ranks
    return topology, Links(
        engine=Link(1e3, 2 * (size - 1) / size / network[1]),
        loopback=Link(25, 8e-4),
        memory=Link(60, memory),
        network={streams: Link(200, 1 / rate) for streams, rate in network.items()},
        copy_bytes_per_s=5e9,
    )


def test_lab_with_slow_links_goes_by_hierarchy_and_compresses_only_when_allowed():
    topology, links = lab(2, {1: 25.0, 2: 25.0, 4: 25.0}, memory=2e-3)
    operation = Operation("all_reduce", 8 * MB)
    exact = select(operation, topology, links)
    assert (exact.algorithm, exact.compress) == ("hierarchical", None)
    assert exact.num_chunks(8 * MB) > 1
    assert select(operation, topology, links, allow_compress="bf16").compress == "bf16"
    for unfit in (replace(operation, dtype="bf16"), replace(operation, reduce_op="max")):
        assert select(unfit, topology, links, allow_compress="bf16").compress is None


def test_cap_on_each_connection_is_met_with_several_and_none_with_one():
    capped, links = lab(1, {1: 25.0, 2: 50.0, 4: 100.0, 8: 118.0})
    choice = select(Operation("all_reduce", 16 * MB), capped, links)
    assert (choice.algorithm, choice.num_streams) == ("streams", 8)
    assert choice.num_chunks(16 * MB) >= 8
    free, links = lab(1, {1: 118.0, 2: 119.0, 4: 118.0, 8: 115.0})
    assert select(Operation("all_reduce", 16 * MB), free, links) == Choice("engine")


def test_slow_memory_turns_hierarchy_down():
    topology, links = lab(2, {1: 125.0, 2: 125.0}, memory=2e-2)
    assert select(Operation("all_reduce", 16 * MB), topology, links) == Choice("engine")


def test_engine_stays_at_ten_percent_and_goes_beyond():
    topology = hosts(1, 2)
    for factor, algorithm in ((1.05, "engine"), (1.0999, "engine"), (1.1001, "shared_memory"), (2.0, "shared_memory")):
        links = Links(engine=Link(0, 1e-3 * factor), memory=Link(0, 1e-3))
        assert select(Operation("all_reduce", MB), topology, links).algorithm == algorithm


@given(operations, st.sampled_from(NAMES), measured, st.sampled_from([None, "bf16", "fp8"]))
def test_whatever_leaves_the_engine_is_possible_and_predicted_to_gain(operation, name, links, allowed):
    topology = of_fixture(name)
    choice = select(operation, topology, links, allowed)
    if choice.algorithm == "engine":
        return
    assert collective(choice.algorithm).unsupported(operation, topology) is None
    assert choice.compress in (None, allowed)
    ours, engine = (predict_us(operation, topology, links, found) for found in (choice, Choice("engine")))
    assert ours * (ENGINE_MARGIN if topology.num_hosts == 1 else ENGINE_MARGIN_BETWEEN_HOSTS) < engine


@given(operations, st.permutations(range(4)), measured, st.sampled_from([(0, 1, 2, 3), (0, 0, 1, 1, 2, 2, 3, 3)]))
def test_order_in_which_hosts_are_listed_does_not_matter(operation, order, links, host_of):
    listed = tuple(Host(f"h{index}", 2 + index) for index in range(4))
    topology = Topology(listed, host_of)
    place = {old: new for new, old in enumerate(order)}
    other = Topology(tuple(listed[old] for old in order), tuple(place[host] for host in host_of))
    assert select(operation, other, links) == select(operation, topology, links)
    assert predict_us(operation, other, links, Choice("engine")) == predict_us(
        operation, topology, links, Choice("engine")
    )


@given(operations, st.sampled_from(NAMES), measured)
def test_links_from_json_choose_the_same(operation, name, links):
    """Links travel as JSON between ranks and in the cache: no bit may be lost on the way."""
    topology = of_fixture(name)
    again = Links.from_json(links.to_json())
    assert select(operation, topology, again) == select(operation, topology, links)


@settings(max_examples=25)
@given(st.sampled_from(NAMES), measured, st.sampled_from(["cpu", "cuda"]))
def test_table_holds_what_select_says(name, links, device):
    topology = of_fixture(name)
    found = table(topology, links, device=device)
    for kind in KINDS:
        ranges = found[kind]
        assert ranges[0].from_bytes == 0
        assert all(one.choice != next_one.choice for one, next_one in pairwise(ranges))
        for size in TABLE_SIZES:
            assert look_up(ranges, size) == select(Operation(kind, size, device=device), topology, links)


def test_table_is_read_between_and_beyond_its_sizes():
    ranges = table(of_fixture("pcie_8gpu"), Links(), device="cuda")["all_reduce"]
    assert look_up(ranges, 0).algorithm == look_up(ranges, 3 * MB).algorithm == "engine"
    assert look_up(ranges, 4 * MB).algorithm == look_up(ranges, 1 << 40).algorithm == "cpu_reduce"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_choice_of_a_range_is_possible_throughout_it(name, device):
    topology = of_fixture(name)
    ranges = table(topology, Links(), device=device)["all_reduce"]
    for size in (1, 1500, 200 * KB, 3 * MB, 12 * MB, 100 * MB, 3 << 30):
        algorithm = collective(look_up(ranges, size).algorithm)
        assert algorithm.unsupported(Operation("all_reduce", size, device=device), topology) is None


def test_explanation_has_a_time_or_a_reason_for_every_algorithm():
    rows = explain(of_fixture("tcp_2x8"), Links(), sizes=(64 * KB, 64 * MB))
    for row in rows:
        assert [found.algorithm for found in row.predictions] == [found.name for found in COLLECTIVES]
        for found in row.predictions:
            assert (found.time_us is None) == (found.choice is None) == (found.reason is not None)
        assert row.choice == select(row.operation, of_fixture("tcp_2x8"), Links())
    assert rows[1].choice.algorithm == "hierarchical"
    reasons = {found.algorithm: found.reason for found in rows[1].predictions}
    assert reasons["shared_memory"] == "works on one host, found 2"
