"""Links, fits and formulas: what a collective is predicted to take."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st

from deepytorch.comm.algorithms.base import (
    KINDS,
    Choice,
    Operation,
    can_compress,
    chunk_sizes,
    compressed_ratio,
    dtype_name,
)
from deepytorch.comm.algorithms.cpu_reduce import TURN_US, cpu_reduce_us, reduce_us_per_byte
from deepytorch.comm.algorithms.hierarchical import hierarchical_us, overlap_of_stages
from deepytorch.comm.algorithms.select import COLLECTIVES, collective, predict_us
from deepytorch.comm.algorithms.streams import streams_us
from deepytorch.comm.topology.cost import (
    Link,
    Links,
    all_reduce_link,
    fit_link,
    hop_link,
    pipeline_us,
    read_links,
)
from deepytorch.comm.topology.nominal import complete, flat_ring
from deepytorch.comm.topology.topology import Topology
from deepytorch.errors import ConfigError, DataError
from tests.comm.formulas import SYMBOLS, formulas
from tests.comm.machines import FIXTURES, hosts, of_fixture

MB = 1 << 20

latencies = st.floats(0, 1e4)
rates = st.floats(1e-6, 1)
links_strategy = st.builds(Link, latencies, rates)


@given(latencies, rates)
def test_fit_finds_the_line_that_the_times_lie_on(latency, rate):
    sizes = [1 << 12, 1 << 16, 1 << 20, 1 << 24]
    fitted = fit_link(sizes, [1e-3 + latency + rate * size for size in sizes])
    assert fitted.latency_us == pytest.approx(latency + 1e-3, rel=1e-3, abs=1e-2)
    assert fitted.us_per_byte == pytest.approx(rate, rel=1e-6)


@given(st.lists(st.tuples(st.integers(0, 1 << 30), st.floats(0.1, 1e7)), min_size=1, max_size=6))
def test_fit_is_never_negative(measured):
    fitted = fit_link([size for size, _ in measured], [time for _, time in measured])
    assert fitted.latency_us >= 0
    assert fitted.us_per_byte >= 0


def test_fit_weighs_relative_errors():
    """A millisecond off at 100 ms is nothing, 50 us off at 100 us is much."""
    fitted = fit_link([1_000, 1_000_000], [100, 100_000])
    disturbed = fit_link([1_000, 1_000_000, 1_000_000], [100, 100_000, 101_000])
    assert disturbed.time_us(1_000) == pytest.approx(fitted.time_us(1_000), rel=1e-2)


def test_fit_of_one_size_or_of_falling_times_stays_sensible():
    assert fit_link([1000], [5.0]) == Link(0.0, 0.005)
    assert fit_link([0], [4.0]) == Link(4.0, 0.0)
    flat = fit_link([1000, 2000], [6.0, 3.0])
    assert flat.us_per_byte == 0
    assert 3 <= flat.latency_us <= 6
    with pytest.raises(ConfigError, match="2 sizes and 1 times"):
        fit_link([1, 2], [1.0])
    with pytest.raises(ConfigError, match="above 0"):
        fit_link([1, 2], [1.0, 0.0])


@given(links_strategy, st.integers(2, 64))
def test_hop_and_all_reduce_are_inverses(hop, members):
    there_and_back = hop_link(all_reduce_link(hop, members), members)
    assert there_and_back.latency_us == pytest.approx(hop.latency_us)
    assert there_and_back.us_per_byte == pytest.approx(hop.us_per_byte)


@given(
    st.builds(
        Links,
        engine=st.none() | links_strategy,
        memory=st.none() | links_strategy,
        network=st.dictionaries(st.integers(1, 64), links_strategy, max_size=4),
        copy_bytes_per_s=st.none() | st.floats(1, 1e12),
        nominal=st.frozensets(st.sampled_from(["engine", "memory", "network"])),
    )
)
def test_links_survive_json(links):
    assert Links.from_json(json.loads(json.dumps(links.to_json()))) == links


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ([], ["the links", "[]"]),
        ({"engin": None}, ["unknown ['engin']", "engine (optional)"]),
        ({"engine": {"latency_us": -1, "us_per_byte": 0}}, ["engine of the links, latency_us", "-1"]),
        ({"memory": {"latency_us": 1}}, ["memory of the links", "['us_per_byte']"]),
        ({"network": {"0": {"latency_us": 1, "us_per_byte": 1}}}, ["network", "1 or more"]),
        ({"copy_bytes_per_s": 0}, ["copy_bytes_per_s", "above 0"]),
        ({"nominal": ["speed"]}, ["'speed'", "engine"]),
    ],
)
def test_wrong_links_say_what_is_wrong(content, words, tmp_path):
    (tmp_path / "links.json").write_text(json.dumps(content))
    with pytest.raises(DataError) as error:
        read_links(tmp_path / "links.json")
    assert all(word in str(error.value) for word in words), str(error.value)


def test_link_that_nobody_measured_is_an_error_and_not_a_guess():
    with pytest.raises(ConfigError, match=r"no memory.*nominal\.complete"):
        Links().link("memory")
    with pytest.raises(ConfigError, match="no network"):
        Links().network_link(1)


def test_number_of_streams_takes_the_nearest_measured_below():
    links = Links(network={2: Link(2, 2), 4: Link(4, 4)})
    assert [links.network_link(streams).latency_us for streams in (1, 2, 3, 4, 9)] == [2, 2, 2, 4, 4]


def test_what_is_assumed_is_named_and_what_is_measured_stays():
    topology = of_fixture("tcp_2x8")
    engine = Link(100.0, 0.01)
    links = complete(Links(engine=engine), topology, "cpu")
    assert links.engine == engine
    assert links.nominal == {"loopback", "memory", "network", "copy_bytes_per_s", "pcie"}
    assert complete(links, topology, "cpu") == links
    assert links.nvlink is None  # there is none to assume


def test_network_is_told_by_the_measured_engine():
    """A slow engine between hosts means a slow network: a fast nominal one would make anything else look better."""
    topology = hosts(2, 2)
    links = complete(Links(engine=Link(600.0, 0.06)), topology, "cpu")
    assert links.network_link(1).us_per_byte == pytest.approx(0.04)  # a flat ring of 4 sends 1.5 of the payload
    assert flat_ring(links, topology).us_per_byte == pytest.approx(0.06)


def test_flat_ring_out_of_a_host_sends_for_each_hop_that_leaves_it():
    links = Links(loopback=Link(1.0, 1e-9), network={1: Link(10.0, 1.0), 2: Link(10.0, 1.0)})
    contiguous = flat_ring(links, hosts(2, 2))
    alternating = flat_ring(links, Topology(hosts(2, 2).hosts, (0, 1, 0, 1)))
    assert contiguous.us_per_byte == pytest.approx(2 * 3 / 4)
    assert alternating.us_per_byte == pytest.approx(2 * 2 * 3 / 4)
    assert contiguous.latency_us == pytest.approx(6 * (2 * 10 + 2 * 1) / 4)
    assert alternating.latency_us == pytest.approx(6 * 10)


def test_hierarchy_saves_the_bytes_between_hosts():
    """200 Mbit between two hosts and all else free: flat over 2 and 4 ranks a host takes 1.5 and 1.75 times as long."""
    for per_host, gain in ((2, 1.5), (4, 1.75)):
        topology = hosts(2, per_host)
        links = Links(
            loopback=Link(0, 1e-9),
            memory=Link(0, 1e-9),
            network={1: Link(0, 0.04)},
            copy_bytes_per_s=1e15,
        )
        operation = Operation("all_reduce", 8 * MB)
        flat = predict_us(operation, topology, links, Choice("engine"))
        hierarchical = predict_us(operation, topology, links, Choice("hierarchical"))
        halved = predict_us(operation, topology, links, Choice("hierarchical", compress="bf16"))
        assert flat / hierarchical == pytest.approx(gain, rel=1e-3)
        assert flat / halved == pytest.approx(2 * gain, rel=1e-3)


def test_chunks_hide_the_faster_stage_and_pay_latency():
    slow, quick = Link(0, 1e-3), Link(0, 1e-3)
    whole = hierarchical_us(MB, 1, 2, slow, quick)
    assert hierarchical_us(MB, 4, 2, slow, quick) == pytest.approx(
        whole * 5 / 8
    )  # two equal stages: (2 + 3) / 4 of one
    costly = Link(1e4, 1e-3)
    assert hierarchical_us(MB, 4, 2, slow, costly) > hierarchical_us(MB, 1, 2, slow, costly)


@pytest.mark.parametrize(
    ("device", "per_host", "overlap"), [("cpu", 4, 0.25), ("cpu", 3, 1 / 3), ("cpu", 1, 1.0), ("cuda", 4, 1.0)]
)
def test_stages_overlap_as_far_as_cores_are_free(device, per_host, overlap):
    """Of four cores a host, on each of which a rank may compute."""
    operation = Operation("all_reduce", 16 * MB, device=device)
    assert overlap_of_stages(operation, hosts(2, per_host)) == pytest.approx(overlap)
    link = Link(0, 1e-3)
    alone, beside, part = (hierarchical_us(MB, 4, 2, link, link, overlap=each) for each in (0, 1, overlap))
    assert alone == pytest.approx(4 / 5 * 2 * beside)
    assert part == pytest.approx(alone - overlap * (alone - beside))


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=4), st.integers(1, 64))
def test_pipeline_lies_between_its_slowest_stage_and_no_overlap(stages, chunks):
    time = pipeline_us(stages, chunks)
    assert time <= sum(stages) * chunks * (1 + 1e-9)
    assert time >= max(stages) * chunks * (1 - 1e-9)


def test_streams_gain_what_the_network_gains_and_no_more():
    topology, operation = hosts(2, 1), Operation("all_reduce", 16 * MB)
    capped = Links(engine=Link(0, 0.04), network={1: Link(0, 0.04), 4: Link(0, 0.01)})
    free = Links(engine=Link(0, 0.04), network={1: Link(0, 0.04), 4: Link(0, 0.04)})
    four = Choice("streams", 4 * MB, 4)
    assert predict_us(operation, topology, capped, four) == pytest.approx(16 * MB * 0.01)
    assert predict_us(operation, topology, free, four) == pytest.approx(16 * MB * 0.04)
    # fewer chunks than streams leave streams idle
    assert predict_us(operation, topology, capped, Choice("streams", 16 * MB, 4)) == pytest.approx(16 * MB * 0.04)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "all_reduce"])
@pytest.mark.parametrize("name", ["engine", "shared_memory"])
def test_half_of_an_all_reduce_takes_half_as_long(kind, name):
    topology = hosts(1, 2)
    links = Links(engine=Link(10, 1e-3), memory=Link(10, 1e-3))
    whole = predict_us(Operation("all_reduce", MB), topology, links, Choice(name))
    half = predict_us(Operation(kind, MB), topology, links, Choice(name))
    broadcast_by_engine = (kind, name) == ("broadcast", "engine")  # sends the payload, as an all-reduce of two does
    assert half == pytest.approx(whole - 5 if broadcast_by_engine else whole / 2)


_CASES = [
    (found.name, fixture, device)
    for fixture in sorted(path.stem for path in FIXTURES.glob("*.json"))
    for device in ("cpu", "cuda")
    for found in COLLECTIVES
    if found.unsupported(
        Operation("all_reduce", 128 << 10 if "nvlink" in found.name else 8 * MB, device=device),
        of_fixture(fixture),
    )
    is None
]


@pytest.mark.parametrize(("name", "fixture", "device"), _CASES)
@given(sizes=st.lists(st.integers(1, 1 << 30), min_size=2, max_size=5).map(sorted))
def test_more_bytes_never_take_less_time(name, fixture, device, sizes):
    topology = of_fixture(fixture)
    links = complete(Links(), topology, device)
    times = [
        collective(name).cost_us(Operation("all_reduce", size, device=device), topology, links, Choice(name))
        for size in sizes
    ]
    assert times == sorted(times)


@given(st.tuples(st.integers(1, 1 << 30), st.integers(1, 1 << 30)).map(sorted), st.integers(1, 64), links_strategy)
def test_more_bytes_in_as_many_chunks_never_take_less_time(sizes, waves, link):
    less, more = sizes
    for cost in (
        lambda size: hierarchical_us(size, waves, 4, link, link, 0.5, 1e-4),
        lambda size: streams_us(size, waves, link, 0.5, 1e-4),
        lambda size: cpu_reduce_us(size, waves, link, link, link, 0.5),
    ):
        assert cost(less) <= cost(more) * (1 + 1e-12)


@given(st.integers(1, 1 << 31), st.integers(1, 16))
def test_chunks_divide_the_payload_sensibly(num_bytes, streams):
    sizes = chunk_sizes(num_bytes, streams)
    assert sizes == sorted(set(sizes), reverse=True)
    for chunk in sizes:
        assert max(2, streams) <= Choice("x", chunk).num_chunks(num_bytes) <= 64
    assert Choice("x").num_chunks(num_bytes) == 1


def test_compression_is_for_sums_of_wider_floats():
    assert compressed_ratio("fp32", "bf16") == 0.5
    assert compressed_ratio("fp32", "fp8") == 0.25
    assert compressed_ratio("int64", None) == 1.0
    for dtype, compress in (("bf16", "fp16"), ("int32", "bf16"), ("fp32", "zip")):
        with pytest.raises(ConfigError):
            compressed_ratio(dtype, compress)
    assert can_compress(Operation("all_reduce", 1, "fp32", "avg"), "bf16")
    assert not can_compress(Operation("all_reduce", 1, "fp32", "max"), "bf16")
    assert not can_compress(Operation("all_reduce", 1, "bf16"), "bf16")
    assert can_compress(Operation("all_reduce", 1, "bf16"), "fp8")


def test_dtypes_have_their_short_names():
    import torch

    named = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.int8: "int8", torch.bool: "bool"}
    assert {dtype: dtype_name(dtype) for dtype in named} == named


def test_formulas_are_what_is_computed():
    """The shown expressions, with numbers put in, against the prediction through select."""
    topology, num_bytes = hosts(4, 2), 8 * MB
    links = Links(
        engine=Link(100, 2e-2),
        loopback=Link(3, 1e-3),
        memory=Link(7, 3e-4),
        network={1: Link(11, 1e-2), 2: Link(13, 5e-3)},
        copy_bytes_per_s=5e9,
        pcie=Link(17, 5e-5),
        nvlink=Link(2, 3e-6),
    )
    overlap = overlap_of_stages(Operation("all_reduce", num_bytes), topology)
    values = {"S": num_bytes, "n": 8, "H": 4, "L": 2, "K": 4, "x": 0.5, "o": overlap, "c": 1e6 / 5e9}
    for name in ("engine", "memory", "pcie", "nvlink"):
        values |= {f"a_{name}": links.link(name).latency_us, f"b_{name}": links.link(name).us_per_byte}
    values |= {"a_network": 13, "b_network": 5e-3}
    shown = {name: float(found.subs(values)) for name, found in _with_names(formulas()).items()}

    def predicted(algorithm: str, device: str = "cpu", topology: Topology = topology, compress=None) -> float:
        choice = Choice(algorithm, 2 * MB if algorithm in ("hierarchical", "streams", "cpu_reduce") else 0, 1, compress)
        operation = Operation("all_reduce", num_bytes, device=device)
        return collective(algorithm).cost_us(operation, topology, complete(links, topology, device), choice)

    one_host = Topology(topology.hosts[:1], (0,) * 8)
    assert shown["engine"] == pytest.approx(predicted("engine"))
    assert shown["shared_memory"] == pytest.approx(predicted("shared_memory", topology=one_host))
    assert shown["hierarchical"] == pytest.approx(predicted("hierarchical"))
    assert shown["hierarchical, compressed"] == pytest.approx(predicted("hierarchical", compress="bf16"))
    assert shown["streams"] == pytest.approx(predicted("streams"))
    assert shown["streams, compressed"] == pytest.approx(predicted("streams", compress="bf16"))
    assert shown["cpu_reduce, several hosts"] == pytest.approx(predicted("cpu_reduce", "cuda"))
    assert shown["cpu_reduce"] == pytest.approx(
        cpu_reduce_us(num_bytes, 4, links.link("pcie"), Link(TURN_US, reduce_us_per_byte(values["c"], 2)), Link(0, 0))
    )
    for name in ("nvlink_one_shot", "nvlink_two_shot", "nvlink_copies", "nvlink_multimem"):
        assert shown[name] == pytest.approx(predicted(name, "cuda", one_host))


def test_symbols_of_the_formulas_are_explained():
    used = {str(symbol) for found in formulas().values() for symbol in found.free_symbols}
    links = {name.removeprefix(prefix) for name in used for prefix in ("a_", "b_") if name.startswith(prefix)}
    plain = {name for name in used if not name.startswith(("a_", "b_"))}
    assert links | plain == set(SYMBOLS)


def test_every_algorithm_has_a_formula():
    names = {name.partition(",")[0] for name in formulas()}
    assert names == {found.name for found in COLLECTIVES}
    assert all(isinstance(found, sympy.Expr) for found in formulas().values())


def test_documents_show_the_formulas_as_they_are():
    text = (Path(__file__).parents[2] / "docs/algorithms.md").read_text()
    for name, found in formulas().items():
        shown = re.search(rf"\| {re.escape(name)} \| `(.*)` \|", text)
        assert shown is not None, name
        symbols = {str(symbol): symbol for symbol in found.free_symbols}
        assert sympy.simplify(sympy.sympify(shown[1], locals=symbols) - found) == 0, name


def test_formula_of_more_bytes_rises():
    """What the derivative of each formula says at one point: no algorithm gets faster with bytes."""
    for found in formulas().values():
        values = {symbol: 1 if str(symbol) == "o" else 2 for symbol in found.free_symbols}
        low, high = ({**values, symbol: size} for symbol in found.free_symbols if str(symbol) == "S" for size in (2, 3))
        assert found.subs(high) > found.subs(low)


def _with_names(found):
    """The expressions with symbols that can be named in `subs` by their text."""
    return {
        name: expression.subs({symbol: sympy.Symbol(str(symbol)) for symbol in expression.free_symbols})
        for name, expression in found.items()
    }


def test_costs_of_the_fixtures_stay_ordered_by_size():
    """Best predictions of each algorithm over doubling sizes rise: a table has no dents."""
    for fixture in FIXTURES.glob("*.json"):
        topology = of_fixture(fixture.stem)
        links = complete(Links(), topology, "cpu")
        for found in COLLECTIVES:
            times = []
            for size in (1 << power for power in range(12, 31)):
                operation = Operation("all_reduce", size)
                if found.unsupported(operation, topology) is None:
                    choices = found.choices(operation, topology, links)
                    times.append(min(found.cost_us(operation, topology, links, choice) for choice in choices))
            assert all(less < more for less, more in pairwise(times)), (fixture.stem, found.name)
