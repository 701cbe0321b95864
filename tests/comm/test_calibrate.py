"""Links measured while the machine is slow: what is chosen by them in the end is right."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from deepytorch.comm.algorithms.base import Operation
from deepytorch.comm.algorithms.select import select
from deepytorch.comm.topology import calibrate
from deepytorch.comm.topology.calibrate import Bench, fastest, fitted, measure, tried_again
from deepytorch.comm.topology.cost import Link, Links
from deepytorch.errors import DataError
from tests.comm.machines import hosts
from tests.comm.ranks import Ranks, run

TRUTH = {"engine": Link(300.0, 7.9e-4), "memory": Link(20.0, 7e-5)}
COPY_US = 800.0
HOST = hosts(1, 2)
HOSTS = hosts(2, 2)  # each connection carries 250 MB/s, and two of them what the network does
TRUTH_BETWEEN = {
    "engine": Link(600.0, 8e-3),
    "memory": Link(20.0, 7e-5),
    "network/1": Link(200.0, 4e-3),
    "network/2": Link(220.0, 2.2e-3),
    "network/4": Link(260.0, 2.2e-3),
}


def true_times() -> dict[str, dict[int, float]]:
    times = {name: {size: link.time_us(size) for size in calibrate._SIZES} for name, link in TRUTH.items()}
    return times | {"copy": {calibrate.TRIAL_COPY_BYTES: COPY_US}}


def chosen(links: Links, num_bytes: int = 16 << 20, topology=HOST) -> str:
    return select(Operation("all_reduce", num_bytes), topology, links).algorithm


class Machine:
    """A clock, and collectives that take their time by it: `slowed` says how many times their own, at that time."""

    def __init__(self, monkeypatch, slowed, truth=TRUTH):
        self.now_us, self.slowed, self.truth = 0.0, slowed, truth
        monkeypatch.setattr(calibrate, "_seconds", self.seconds)
        monkeypatch.setattr(calibrate, "_slowest_copies", lambda bench: [COPY_US * 1e-6])

    def seconds(self, call):
        begun = self.now_us
        call()
        return (self.now_us - begun) * 1e-6

    def collective(self, name):
        def run(tensor):
            self.now_us += self.truth[name].time_us(tensor.nbytes) * self.slowed(self.now_us, name, tensor.nbytes)

        return run

    def between(self, tensor, connections):
        self.collective(f"network/{connections}")(tensor)

    def measured(self) -> Links:
        return measure(Bench(HOST, self.collective("engine"), self.collective("memory"), None, list))

    def measured_between(self) -> Links:
        return measure(Bench(HOSTS, self.collective("engine"), self.collective("memory"), self.between, list))


def test_a_machine_that_is_never_slow_is_measured_as_it_is(monkeypatch):
    links = Machine(monkeypatch, lambda *_: 1.0).measured()
    for name, link in TRUTH.items():
        assert links.link(name).latency_us == pytest.approx(link.latency_us)
        assert links.link(name).us_per_byte == pytest.approx(link.us_per_byte)
    assert chosen(links) == "shared_memory"


@pytest.mark.parametrize("name", ["engine", "memory"])
def test_a_slow_window_within_a_measurement_does_not_count(monkeypatch, name):
    """Its length is that of all rounds of a size in a row."""
    in_a_row = 4 * max(16 * TRUTH[name].time_us(1 << 16), TRUTH[name].time_us(1 << 22))
    for begin in range(0, 100_000, 5_000):
        machine = Machine(
            monkeypatch,
            lambda now, way, _, begin=begin: 10.0 if way == name and begin <= now < begin + in_a_row else 1.0,
        )
        links = machine.measured()
        assert links.link(name).us_per_byte == pytest.approx(TRUTH[name].us_per_byte, rel=0.05), begin
        assert chosen(links) == "shared_memory", begin


def test_a_line_that_costs_nothing_a_byte_is_no_measurement(monkeypatch):
    """The small sizes of gloo were slow, and so the fit had all sizes take alike."""
    links = Machine(monkeypatch, lambda _, way, size: 12.0 if way == "engine" and size <= 1 << 16 else 1.0).measured()
    assert links.link("engine").us_per_byte == pytest.approx(TRUTH["engine"].us_per_byte, rel=0.2)
    assert chosen(links) == "shared_memory"


@pytest.mark.parametrize("large_us", [0.5, 300.0, 301.0])
def test_no_line_is_faster_than_memory_copies(large_us):
    times = true_times() | {"engine": {1024: 300.0, 65536: 300.0, 1 << 22: large_us}}
    least = COPY_US / calibrate.TRIAL_COPY_BYTES / 4
    assert fitted(times, HOST).link("engine").us_per_byte >= least


def test_a_measurement_that_was_slow_throughout_is_bettered_in_the_run(monkeypatch):
    slow = Machine(monkeypatch, lambda _, way, __: 10.4 if way == "memory" else 1.0).measured()
    assert slow.link("memory").us_per_byte == pytest.approx(7.3e-4, rel=0.01)
    assert chosen(slow) == "engine"
    found = true_times()
    links = fitted(tried_again(slow.times_us, found, 1), HOST)
    assert chosen(links) == "shared_memory"
    later = {name: {size: 1.9 * us for size, us in times.items()} for name, times in found.items()}
    assert tried_again(links.times_us, later, 5) == links.times_us  # which is kept, whatever comes later


def test_a_run_that_takes_twice_what_is_remembered_counts_by_itself():
    """Of both ways: one of them alone, with the other as it was once, would compare what is not alike."""
    remembered = true_times()
    found = true_times() | {"memory": {size: 8 * us for size, us in remembered["memory"].items()}}
    found["engine"] = {size: 1.5 * us for size, us in remembered["engine"].items()}
    assert tried_again(remembered, found, 2) == remembered  # a slow moment, until it has lasted
    assert tried_again(remembered, found, 3) == found
    assert chosen(fitted(found, HOST), 4 << 20) == "shared_memory"


def test_hosts_that_are_never_slow_are_measured_as_they_are(monkeypatch):
    machine = Machine(monkeypatch, lambda *_: 1.0, TRUTH_BETWEEN)
    links = machine.measured_between()
    assert set(links.times_us) == {"copy", *TRUTH_BETWEEN}
    for name in ("engine", "memory"):
        assert links.link(name).us_per_byte == pytest.approx(TRUTH_BETWEEN[name].us_per_byte)
    # a ring of two hosts sends the payload once: what both local ranks of a host send, each its own
    assert {streams: hop.us_per_byte for streams, hop in links.network.items()} == pytest.approx(
        {2: 2e-3, 4: 1.1e-3, 8: 1.1e-3}
    )
    assert chosen(links, topology=HOSTS) == "hierarchical"
    assert machine.now_us < 2e6


def test_the_large_payload_is_sought_until_it_takes_its_time(monkeypatch):
    """A first look at 256 KB that is mostly latency would leave it at 1 MB, of which latency is half."""
    truth = TRUTH_BETWEEN | {"engine": Link(15e3, 15e-3), "network/1": Link(8e3, 20e-3)}
    links = Machine(monkeypatch, lambda *_: 1.0, truth).measured_between()
    assert max(links.times_us["engine"]) == 4 << 20
    assert max(links.times_us["network/1"]) == 4 << 20  # 92 ms
    assert max(links.times_us["network/2"]) == calibrate._MOST_LARGE_OF_A_RANK


@pytest.mark.parametrize("small_us", [1e3, 6.9e3, 7.1e3, 21e3, 69e3])
def test_waiting_that_is_hidden_in_a_large_payload_does_not_make_the_wire_faster(small_us):
    """16 KB waited for busy ranks; a payload of a line is predicted as it was measured, and larger ones by the wire."""
    times = {"copy": {calibrate.TRIAL_COPY_BYTES: COPY_US}, "engine": {1 << 14: small_us, 4 << 20: 70e3}}
    link = fitted(times, HOSTS).link("engine")
    assert link.time_us(4 << 20) == pytest.approx(70e3, rel=1e-3)
    assert link.us_per_byte >= 0.89 * 70e3 / (4 << 20)
    assert link.latency_us <= 7e3 * (1 + 1e-9)
    if small_us < 7e3:  # a line through both
        assert link.time_us(1 << 14) == pytest.approx(small_us, rel=1e-3)


def test_latency_of_a_fast_network_and_of_one_host_is_a_links_own():
    """Payloads have a limit, so that latency may be much of the largest one's time, and adds to it."""
    truth = Link(2500.0, 6e3 / (8 << 20))
    times = {"copy": {calibrate.TRIAL_COPY_BYTES: COPY_US}}
    times["engine"] = {size: truth.time_us(size) for size in (1 << 14, 8 << 20)}
    for topology in (HOST, HOSTS):
        link = fitted(times, topology).link("engine")
        assert link.time_us(100 << 20) == pytest.approx(truth.time_us(100 << 20), rel=1e-3)
    slow = {"engine": {1 << 10: 30e3, 1 << 16: 30e3, 4 << 20: 90e3}}
    assert fitted(times | slow, HOST).link("engine").latency_us > 25e3


@pytest.mark.parametrize("name", ["engine", "network/1", "network/2"])
def test_a_slow_window_between_hosts_does_not_count(monkeypatch, name):
    """It is as long as all rounds of the largest size in a row."""
    window = 3 * TRUTH_BETWEEN[name].time_us(1 << 22)
    for begin in range(0, 700_000, 35_000):
        machine = Machine(
            monkeypatch,
            lambda now, way, _, begin=begin: 10.0 if way == name and begin <= now < begin + window else 1.0,
            TRUTH_BETWEEN,
        )
        links = machine.measured_between()
        line = calibrate._line(links.times_us[name], 0.0, Link(0.0, 0.0), True)
        assert line.us_per_byte == pytest.approx(TRUTH_BETWEEN[name].us_per_byte, rel=0.05), begin
        assert chosen(links, topology=HOSTS) == "hierarchical", begin


def test_a_network_that_was_slow_when_it_was_measured_is_bettered_in_the_run(monkeypatch):
    slow = Machine(monkeypatch, lambda _, way, __: 12.0 if "network" in way else 1.0, TRUTH_BETWEEN).measured_between()
    assert chosen(slow, topology=HOSTS) == "engine"
    again = calibrate.to_try(slow, HOSTS, True, 4)
    assert again == {name: times for name, times in slow.times_us.items() if name != "copy"}
    found = {name: {size: TRUTH_BETWEEN[name].time_us(size) for size in sizes} for name, sizes in again.items()}
    found["copy"] = {calibrate.TRIAL_COPY_BYTES: COPY_US}
    links = fitted(tried_again(slow.times_us, found, 1), HOSTS)
    assert chosen(links, topology=HOSTS) == "hierarchical"


@pytest.mark.parametrize("topology", [HOST, HOSTS, hosts(3, 1)])
def test_what_a_trial_times_where_nothing_was_timed(topology):
    """Sizes that are worth timing by what is predicted; no more connections than there are."""
    in_memory, connections = topology.ranks_per_host > 1, 2 if topology.num_hosts > 1 else 0
    expected = calibrate.to_try(Links(), topology, in_memory, connections)
    over = ["network/1", "network/2"] if connections else []
    assert list(expected) == ["engine"] + (["memory"] if in_memory else []) + over
    assert all(0 < time < 1e6 for times in expected.values() for time in times.values())
    assert all(len(times) > 1 and max(times) <= 1 << 23 for times in expected.values())


def test_the_fastest_of_everything_that_was_timed():
    assert fastest({"memory": {1: 5.0, 2: 7.0}}, {"memory": {2: 6.0, 4: 9.0}, "copy": {8: 1.0}}) == {
        "memory": {1: 5.0, 2: 6.0, 4: 9.0},
        "copy": {8: 1.0},
    }


def test_times_are_remembered_with_the_links():
    links = fitted(true_times(), HOST)
    assert Links.from_json(json.loads(json.dumps(links.to_json()))) == links


@pytest.mark.parametrize("times", [{"pcie": {"1": 2.0}}, {"memory": {}}, {"memory": {"x": 1.0}}, {"copy": {"8": 0.0}}])
def test_other_layouts_of_times_are_refused(times):
    with pytest.raises(DataError, match="times_us"):
        Links.from_json({"times_us": times})


_TOGETHER = """
    from pathlib import Path
    from deepytorch.comm import chosen
    from deepytorch.comm.group.groups import group_of
    from deepytorch.comm.topology import calibrate
    from deepytorch.comm.topology.cost import Link
    engine, fast = Link(600.0, 2e-3), Link(20.0, 7e-5)
    def times(ours):  # us, and a link for each name
        links = dict(engine=engine) | ours
        sizes = dict((name, calibrate._SIZES if HOSTS == 1 else (1 << 14, 1 << 20)) for name in links)
        found = dict((name, dict((size, link.time_us(size)) for size in sizes[name])) for name, link in links.items())
        return found | dict(copy=dict([(calibrate.TRIAL_COPY_BYTES, 800.0)]))
    names = (["memory"] if size > HOSTS else []) + (["network/1", "network/2"] if HOSTS > 1 else [])
    slow, true = times(dict.fromkeys(names, engine)), times(dict.fromkeys(names, fast))
    if HOSTS == size:  # one rank a host: what its algorithm gains is what more connections do
        true["network/1"] = slow["network/1"]
    calibrate.cache_directory = lambda: Path("FOLDER") / "cache"
    calibrate.measure = lambda bench: calibrate.fitted(slow, bench.topology)
    calibrate.TRIAL_SHARE = 1.0
    handed, fastest = [], calibrate.fastest
    def of_trial(found, now):
        if found:
            return fastest(found, now)
        assert dict((name, list(sizes)) for name, sizes in now.items()) == dict(
            (name, list(sizes)) for name, sizes in slow.items()
        ), now
        assert all(time > 0 for sizes in now.values() for time in sizes.values()), now
        handed.append(now)
        return true
    calibrate.fastest = of_trial
    pretend_hosts(size // HOSTS)
"""


def _together(script: str, num_hosts: int, folder: Path) -> str:
    return (_TOGETHER + script).replace("HOSTS", str(num_hosts)).replace("FOLDER", str(folder))


@pytest.mark.parametrize(("num_hosts", "num_ranks"), [(1, 2), (2, 2), (2, 4)])
def test_ranks_change_together_what_was_chosen_in_a_slow_moment(tmp_path, num_hosts, num_ranks):
    script = """
    init(timeout=60)
    assert chosen(num_bytes=1 << 24).algorithm == "engine"
    before = None
    for step in range(600):
        data = torch.full((1 << 16,), rank + step, dtype=torch.int32)
        if step % 3 == 0:
            time.sleep(0.002 * rank)
        work = dist.all_reduce(data, async_op=step % 2 == 0)
        if work is not None:
            work.wait()
        assert torch.all(data == sum(range(size)) + size * step), step
        if before is None and chosen(num_bytes=1 << 24).algorithm != "engine":
            before = step
    counts = [None] * size
    dist.all_gather_object(counts, (before, handed))
    assert all(each == counts[0] for each in counts) and before and 120 < before < 520 and len(handed) == 1, counts
    ours = "shared_memory" if HOSTS == 1 else "streams" if HOSTS == size else "hierarchical"
    assert chosen(num_bytes=1 << 24).algorithm == ours, group_of().links
    assert group_of(dist.new_group()).links == group_of().links
    dist.destroy_process_group()
    init(timeout=60, suffix="2")
    assert chosen(num_bytes=1 << 24).algorithm != "engine"
    dist.destroy_process_group()
    if rank == 0:
        [kept] = (calibrate.cache_directory() / "links").iterdir()
        times_us = calibrate._remembered(kept).times_us
        assert all(times_us[name][bytes] <= true[name][bytes] for name in true for bytes in true[name]), times_us
    """
    run(_together(script, num_hosts, tmp_path), num_ranks, timeout=90, warm=False)


@pytest.mark.parametrize("signal", ["SIGKILL", "SIGSTOP"])
def test_a_rank_that_is_lost_in_a_trial_between_hosts_is_told_in_time(tmp_path, signal):
    script = f"""
    calibrate.TRIAL_SHARE = 1e6  # at the first look
    init(timeout=4)
    for step in range(64):
        dist.all_reduce(torch.ones(8))
    if rank == 1:
        dist.all_reduce(torch.ones(8), async_op=True)
        time.sleep(0.005)
        os.kill(os.getpid(), signal.{signal})
    def on():
        while True:
            dist.all_reduce(torch.ones(8))
    message, _ = told(on)
    say("told:", message)
    os._exit(0)
    """
    with Ranks(_together(script, 2, tmp_path), 4) as ranks:
        outcomes = [ranks.processes[rank].wait(60) for rank in (0, 2, 3)]
        assert outcomes == [0, 0, 0], [ranks.output(rank) for rank in range(4)]
