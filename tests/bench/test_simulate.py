"""The simulator: timelines that add up, files that are checked, predictions compared with measured cells."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from deepytorch.bench.jobs import CollectiveJob
from deepytorch.bench.model_profile import BackwardPiece, ModelProfile, read_profile
from deepytorch.bench.prediction import predicted_us
from deepytorch.bench.simulate import AUTO, buckets, play, simulate
from deepytorch.bench.simulate_show import assumptions, parse_ranks
from deepytorch.cli import app
from deepytorch.comm.algorithms.base import Choice, Operation
from deepytorch.comm.algorithms.select import predict_us
from deepytorch.comm.topology.cost import Link, Links
from deepytorch.comm.topology.host import Host
from deepytorch.comm.topology.nominal import complete, scaled_links
from deepytorch.comm.topology.topology import Topology, read_topology, regular_topology
from deepytorch.errors import ConfigError, DataError

ROOT = Path(__file__).parents[2]
FIXTURES = ROOT / "tests/comm/fixtures"
EXAMPLE = ROOT / "examples/profiles/llama_small.json"

PROFILE = ModelProfile(
    name="toy",
    forward_us=100.0,
    backward=(BackwardPiece("last", 50.0, 30), BackwardPiece("middle", 50.0, 45), BackwardPiece("first", 50.0, 5)),
    bucket_cap_bytes=40,
    optimizer_us=10.0,
    device="cpu",
)


def hosts(num_hosts: int, per_host: int) -> Topology:
    return regular_topology((Host("h", 4),), num_hosts, per_host)


def played(us_per_byte: float, profile: ModelProfile = PROFILE):
    return play(profile, hosts(1, 2), "x", lambda size: (us_per_byte * size, Choice("x")))


def test_gradients_fill_buckets_in_the_order_in_which_they_become_ready():
    assert [(bucket.ready_us, bucket.num_bytes) for bucket in buckets(PROFILE)] == [(200, 40), (250, 40)]
    smaller = ModelProfile("toy", 100.0, PROFILE.backward, bucket_cap_bytes=20)
    assert [(bucket.ready_us, bucket.num_bytes) for bucket in buckets(smaller)] == [
        (150, 20), (200, 20), (200, 20), (250, 20),
    ]  # fmt: skip


def test_collective_that_fits_under_the_backward_pass_is_hidden():
    step = played(1.0)  # 40 us a bucket: the first ends at 240, the last begins at 250
    assert [(found.start_us, found.end_us) for found in step.transfers] == [(200, 240), (250, 290)]
    assert (step.backward_us, step.exposed_us, step.step_us, step.communication_us) == (250, 40, 300, 80)
    assert step.efficiency == pytest.approx(260 / 300)


def test_slow_collectives_queue_up():
    step = played(10.0)
    assert [(found.start_us, found.end_us) for found in step.transfers] == [(200, 600), (600, 1000)]
    assert step.exposed_us == 750


def test_one_rank_has_nothing_to_reduce():
    step = play(PROFILE, hosts(1, 1), "x", lambda size: (1.0, Choice("x")))
    assert (step.transfers, step.step_us, step.efficiency) == ((), PROFILE.compute_us, 1.0)


profiles = st.builds(
    ModelProfile,
    st.just("any"),
    st.floats(1, 1e5),
    st.lists(
        st.builds(BackwardPiece, st.just("p"), st.floats(0, 1e4), st.integers(0, 1 << 26)), min_size=1, max_size=8
    ).map(tuple),
    st.integers(1 << 20, 1 << 26),
    st.floats(0, 1e4),
)


@given(profiles, st.floats(0, 1e-2))
def test_timeline_adds_up(profile, us_per_byte):
    step = played(us_per_byte, profile)
    assert sum(found.num_bytes for found in step.transfers) == profile.gradient_bytes
    assert all(found.start_us >= found.ready_us for found in step.transfers)
    assert all(one.end_us <= other.start_us for one, other in pairwise(step.transfers))
    assert profile.compute_us * (1 - 1e-9) <= step.step_us
    assert step.step_us <= (profile.compute_us + step.communication_us) * (1 + 1e-9)
    assert 0 < step.efficiency <= 1 + 1e-9
    assert played(2 * us_per_byte, profile).step_us >= step.step_us


def test_step_by_choice_is_never_slower_than_by_the_engine():
    profile = read_profile(EXAMPLE)
    for name in ("pcie_8gpu", "nvlink_8gpu", "tcp_2x8", "rdma_125x8"):
        steps = simulate(profile, read_topology(FIXTURES / f"{name}.json"), Links(), (8, 64, 1000)).steps
        for ranks in (8, 64, 1000):
            by_name = {step.algorithm: step.step_us for step in steps if step.num_ranks == ranks}
            assert by_name[AUTO] <= by_name["engine"]


def test_more_hosts_scale_no_better():
    steps = simulate(read_profile(EXAMPLE), read_topology(FIXTURES / "tcp_2x8.json"), Links(), (8, 16, 64, 1000)).steps
    efficiencies = [step.efficiency for step in steps if step.algorithm == AUTO]
    assert efficiencies == sorted(efficiencies, reverse=True)


def test_bucket_that_an_algorithm_cannot_do_goes_to_the_engine():
    pieces = (BackwardPiece("large", 1e3, 64 << 20), BackwardPiece("small", 1e3, 1 << 20))
    profile = ModelProfile("mixed", 1e3, pieces, bucket_cap_bytes=64 << 20)
    steps = simulate(profile, read_topology(FIXTURES / "pcie_8gpu.json"), Links(), (8,)).steps
    by_name = {step.algorithm: dict(step.algorithms) for step in steps}
    assert by_name["cpu_reduce"] == {"cpu_reduce": 1, "engine": 1}
    assert by_name["engine"] == {"engine": 2}


def test_compression_is_used_only_when_allowed():
    topology, profile = read_topology(FIXTURES / "cpu_2x2.json"), PROFILE
    profile = ModelProfile("cpu", 1e3, (BackwardPiece("all", 1e3, 8 << 20),), 8 << 20, device="cpu")
    exact, rounded = (simulate(profile, topology, Links(), (4,), allowed).steps[0] for allowed in (None, "bf16"))
    assert [found.choice.compress for found in exact.transfers] == [None]
    assert [found.choice.compress for found in rounded.transfers] == ["bf16"]
    assert rounded.step_us < exact.step_us


def test_links_of_the_measured_group_are_used_as_they_are():
    topology = hosts(2, 2)
    links = Links(engine=Link(10, 1e-3), network={1: Link(1, 1e-9)}, memory=Link(1, 1e-3))
    assert scaled_links(links, topology, topology, "cpu") == links


def test_engine_scales_by_its_own_composition():
    """Twice as slow as its hops say on two hosts: twice as slow as its hops say on eight."""
    two, eight = hosts(2, 2), hosts(8, 2)
    hops = Links(loopback=Link(1, 1e-9), network={1: Link(10, 1e-2)}, memory=Link(1, 1e-4))
    composed = {name: complete(hops, found, "cpu").link("engine") for name, found in (("two", two), ("eight", eight))}
    measured = Links(
        engine=composed["two"].scaled(latency=2, rate=2),
        loopback=hops.loopback,
        network=hops.network,
        memory=hops.memory,
    )
    scaled = scaled_links(measured, two, eight, "cpu")
    assert scaled.link("engine").us_per_byte == pytest.approx(2 * composed["eight"].us_per_byte)
    assert scaled.link("engine").latency_us == pytest.approx(2 * composed["eight"].latency_us)
    assert scaled.memory == hops.memory
    assert scaled_links(measured, two, hosts(1, 4), "cpu").memory is None  # another number of ranks shares it


def test_what_was_assumed_is_said():
    topology = hosts(1, 2)
    measured = Links(
        engine=Link(1, 1e-3),
        loopback=Link(1, 1e-3),
        memory=Link(1, 1e-3),
        copy_bytes_per_s=1e9,
        pcie=Link(1, 1e-3),
    )
    assert assumptions(simulate(PROFILE, topology, measured, (2,))) == []
    lines = assumptions(simulate(PROFILE, topology, Links(), (2, 4)))
    assert len(lines) == 2
    assert "2 ranks" in lines[0]
    assert "memory" in lines[0]


def test_example_profile_is_read():
    profile = read_profile(EXAMPLE)
    assert "llustrative" in profile.note
    assert profile.gradient_bytes == sum(piece.gradient_bytes for piece in profile.backward)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"forward_us": 0}, ["forward_us", "0", "above 0"]),
        ({"backward": []}, ["backward", "()", "one piece or more"]),
        ({"backward": [{"name": "a", "compute_us": 1}]}, ["piece of the backward pass", "['gradient_bytes']"]),
        (
            {"backward": [{"name": "a", "compute_us": -1, "gradient_bytes": 0}]},
            ["compute_us of the piece of the backward pass", "-1", "0 or more"],
        ),
        ({"bucket_cap_bytes": 2.5}, ["bucket_cap_bytes", "2.5", "a count"]),
        ({"dtype": "float32"}, ["dtype", "'float32'", "fp32"]),
        ({"device": "tpu"}, ["device", "'tpu'", "cpu, cuda"]),
        ({"cap": 1}, ["unknown ['cap']"]),
    ],
)
def test_wrong_profile_says_what_is_wrong(tmp_path, changes, words):
    path = tmp_path / "profile.json"
    path.write_text(json.dumps(json.loads(EXAMPLE.read_text()) | changes))
    with pytest.raises(DataError) as error:
        read_profile(path)
    assert all(word in str(error.value) for word in [*words, str(path)]), str(error.value)


@pytest.mark.parametrize("text", ["", "8,", "0", "8;16", "-1", "2.5", "99999999"])
def test_wrong_ranks_are_refused(text):
    with pytest.raises(ConfigError, match="--ranks"):
        parse_ranks(text)


def test_command_writes_table_json_and_plot(tmp_path):
    options = ["simulate", "--topology", str(FIXTURES / "tcp_2x8.json"), "--model-profile", str(EXAMPLE)]
    plot = tmp_path / "new" / "steps.png"
    done = CliRunner().invoke(app, [*options, "--ranks", "8,64", "--json", "-", "--plot", str(plot)])
    assert done.exit_code == 0, done.output
    content = json.loads(done.stdout)
    assert {(step["num_ranks"], step["num_hosts"]) for step in content["steps"]} == {(8, 1), (64, 8)}
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = CliRunner().invoke(app, [*options, "--ranks", "8", "--json", str(tmp_path / "steps.json")])
    assert "auto: cpu_reduce" in shown.stdout
    assert "efficiency" in shown.stdout
    assert json.loads((tmp_path / "steps.json").read_text())["model"] == "llama-small"


def test_measured_links_replace_the_assumed_ones(tmp_path):
    links = tmp_path / "links.json"
    links.write_text(json.dumps(Links(engine=Link(10, 1.0)).to_json()))
    options = ["--topology", str(FIXTURES / "nvlink_8gpu.json"), "--model-profile", str(EXAMPLE), "--ranks", "8"]
    slow, quick = (
        json.loads(CliRunner().invoke(app, ["simulate", *options, *more, "--json", "-"]).stdout)
        for more in (["--links", str(links)], [])
    )
    by_name = [{step["algorithm"]: step["step_us"] for step in content["steps"]} for content in (slow, quick)]
    assert by_name[0]["engine"] > 100 * by_name[1]["engine"]
    assert "engine" not in slow["nominal"]["8"]


def collective(op: str = "all_reduce", dtype: str = "float32") -> CollectiveJob:
    return CollectiveJob(op=op, dtype=dtype, count=1, groups=())


def test_a_collective_is_predicted_by_what_runs_it():
    links = Links(
        engine=Link(1e3, 0.06),
        memory=Link(50, 3e-4),
        network={1: Link(100, 0.04), 2: Link(100, 0.04), 4: Link(100, 0.02)},
        copy_bytes_per_s=5e9,
    )
    size, two = 1 << 23, hosts(2, 2)
    engine_us = predict_us(Operation("all_reduce", size), two, links, Choice("engine"))
    for name in ("engine", "gloo's own"):
        assert predicted_us(collective(), size, name, None, two, links) == pytest.approx(engine_us)
    one_us = predicted_us(collective(), size, "shared_memory", None, hosts(1, 2), links)
    assert one_us == pytest.approx(links.link("memory").time_us(size))
    assert predicted_us(collective(), size, "shared_memory", None, two, links) is None  # works on one host
    assert predicted_us(collective("broadcast"), size, "engine", None, two, links) < engine_us


def test_a_prediction_heeds_type_and_compression():
    links = Links(engine=Link(0, 0.06), memory=Link(0, 1e-5), network={2: Link(0, 0.04)}, copy_bytes_per_s=1e12)
    exact, rounded, half = (
        predicted_us(collective(dtype=dtype), 8 << 20, "hierarchical", compress, hosts(2, 2), links)
        for dtype, compress in (("float32", None), ("float32", "bf16"), ("bfloat16", "bf16"))
    )
    assert exact == pytest.approx(2 * rounded, rel=0.05)
    assert half == pytest.approx(exact)
