"""Links measured while the machine is slow: what is chosen by them in the end is right."""

from __future__ import annotations

import json

import pytest

from deepytorch.comm.algorithms.base import Operation
from deepytorch.comm.algorithms.select import select
from deepytorch.comm.topology import calibrate
from deepytorch.comm.topology.calibrate import Bench, fastest, fitted, measure, tried_again
from deepytorch.comm.topology.cost import Link, Links
from deepytorch.errors import DataError
from tests.comm.ranks import run
from tests.comm.test_select import hosts

TRUTH = {"engine": Link(300.0, 7.9e-4), "memory": Link(20.0, 7e-5)}
COPY_US = 800.0
HOST = hosts(1, 2)


def true_times() -> dict[str, dict[int, float]]:
    times = {name: {size: link.time_us(size) for size in calibrate.TRIAL_SIZES} for name, link in TRUTH.items()}
    return times | {"copy": {calibrate.TRIAL_COPY_BYTES: COPY_US}}


def chosen(links: Links, num_bytes: int = 16 << 20) -> str:
    return select(Operation("all_reduce", num_bytes), HOST, links).algorithm


class Machine:
    """A clock, and collectives that take their time by it: `slowed` says how many times their own, at that time."""

    def __init__(self, monkeypatch, slowed):
        self.now_us, self.slowed = 0.0, slowed
        monkeypatch.setattr(calibrate, "_seconds", self.seconds)
        monkeypatch.setattr(calibrate, "_slowest_copies", lambda bench: [COPY_US * 1e-6])

    def seconds(self, call):
        begun = self.now_us
        call()
        return (self.now_us - begun) * 1e-6

    def collective(self, name):
        def run(tensor):
            self.now_us += TRUTH[name].time_us(tensor.nbytes) * self.slowed(self.now_us, name, tensor.nbytes)

        return run

    def measured(self) -> Links:
        return measure(Bench(HOST, self.collective("engine"), self.collective("memory"), None, list))


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


def test_ranks_change_together_what_was_chosen_in_a_slow_moment(tmp_path):
    script = f"""
    from pathlib import Path
    from deepytorch.comm import chosen
    from deepytorch.comm.group.groups import group_of
    from deepytorch.comm.topology import calibrate
    from deepytorch.comm.topology.cost import Link
    def times(memory):
        links = dict(engine=Link(300.0, 7.9e-4), memory=memory)
        found = dict(copy=dict([(calibrate.TRIAL_COPY_BYTES, 800.0)]))
        for name, link in links.items():
            found[name] = dict((size, link.time_us(size)) for size in calibrate.TRIAL_SIZES)
        return found
    calibrate.cache_directory = lambda: Path("{tmp_path}") / "cache"
    calibrate.measure = lambda bench: calibrate.fitted(times(Link(20.0, 7.9e-4)), bench.topology)
    handed = []
    def of_trial(numbers):
        assert len(numbers) == 7 and min(numbers) > 0, numbers
        handed.append(numbers)
        return times(Link(20.0, 7e-5))
    calibrate.of_trial = of_trial
    init(timeout=30)
    assert chosen(num_bytes=1 << 24).algorithm == "engine"
    before = None
    for step in range(300):
        data = torch.full((1 << 18,), rank + step, dtype=torch.int32)
        if step % 3 == 0:
            time.sleep(0.001 * rank)
        work = dist.all_reduce(data, async_op=step % 2 == 0)
        if work is not None:
            work.wait()
        assert torch.all(data == 1 + 2 * step), step
        if before is None and chosen(num_bytes=1 << 24).algorithm == "shared_memory":
            before = step
    counts = [None] * size
    dist.all_gather_object(counts, (before, handed))
    assert counts[0] == counts[1] and 200 < before < 270 and len(handed) == 1, counts
    assert group_of().links.memory.us_per_byte < 1e-4
    assert group_of(dist.new_group()).links == group_of().links
    dist.destroy_process_group()
    init(timeout=30, suffix="2")
    assert chosen(num_bytes=1 << 24).algorithm == "shared_memory"
    dist.destroy_process_group()
    if rank == 0:
        [kept] = (calibrate.cache_directory() / "links").iterdir()
        assert calibrate._remembered(kept).memory.us_per_byte < 1e-4
    """
    run(script, timeout=60, warm=False)
