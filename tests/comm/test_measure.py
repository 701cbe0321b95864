"""`comm.measure`: the fastest by the clock is what runs, alike on all ranks, and what was measured can be kept."""

from __future__ import annotations

import pytest

from deepytorch.comm.algorithms import measured
from deepytorch.comm.algorithms.base import Choice
from deepytorch.comm.algorithms.select import Range
from deepytorch.errors import DataError
from tests.comm.machines import hosts
from tests.comm.ranks import run

ENGINE, OURS = Choice("engine"), Choice("shared_memory", 0, 1)


def test_the_engine_stays_unless_it_takes_a_tenth_longer():
    times = {
        1024: {ENGINE: 10.9, OURS: 10.0},
        4096: {ENGINE: 11.1, OURS: 10.0},
        16384: {ENGINE: 30.0, OURS: 10.0},
        65536: {ENGINE: 9.0, OURS: 10.0},
    }
    assert measured.table_of(times) == (Range(0, ENGINE), Range(4096, OURS), Range(65536, ENGINE))


@pytest.mark.parametrize("registered", [None, 1 << 20])
def test_what_is_kept_comes_back(monkeypatch, tmp_path, registered):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    topology = hosts(1, 2)
    tables = {"all_reduce": (Range(0, ENGINE), Range(4096, Choice("cpu_reduce", 1 << 20, 2, "bf16")))}
    found = measured.Measured(tables, registered)
    assert measured.remembered(topology, ["H200"]) is None
    measured.remember(topology, ["H200"], found)
    assert measured.remembered(topology, ["H200"]) == found
    assert measured.remembered(topology, ["A100"]) is None
    assert measured.remembered(hosts(1, 4), ["H200"]) is None


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"algorithm": "magic"}, "algorithm"),
        ({"from_bytes": 5}, "expected 0 first"),
        ({"num_streams": 0}, "num_streams"),
        ({"compress": "int2"}, "compress"),
    ],
)
def test_other_layouts_are_refused(change, words):
    content = measured.to_json(measured.Measured({"all_reduce": (Range(0, ENGINE),)}))
    content["tables"]["all_reduce"][0].update(change)
    with pytest.raises(DataError, match=words):
        measured.from_json(content)


@pytest.mark.parametrize("registered", [0, -1, "all", 1.5])
def test_other_sizes_of_registered_memory_are_refused(registered):
    content = measured.to_json(measured.Measured({})) | {"registered_from_bytes": registered}
    with pytest.raises(DataError, match="registered_from_bytes"):
        measured.from_json(content)


def test_a_second_way_is_taken_from_where_on_it_is_always_faster():
    times = {1: (10.0, 5.0), 2: (10.0, 9.5), 4: (10.0, 9.0), 8: (10.0, 8.0)}
    assert measured.faster_from(times) == 4
    assert measured.faster_from(times | {16: (10.0, 9.5)}) is None
    assert measured.faster_from({1: (10.0, 5.0)}) == 1
    assert measured.faster_from({}) is None


def test_measured_tables_are_alike_on_all_ranks_and_used():
    script = """
    import json
    from deepytorch.comm import measure
    from deepytorch.comm.algorithms import measured
    from deepytorch.comm import chosen
    init()
    tables = measure(device="cpu", most_bytes=1 << 16)
    content = [None] * size
    dist.all_gather_object(content, json.dumps(measured.to_json(measured.Measured(tables))))
    assert len(set(content)) == 1, content
    for kind, ranges in tables.items():
        assert chosen(kind=kind, num_bytes=1 << 16).algorithm == ranges[-1].choice.algorithm, (kind, ranges)
    # shared memory takes a fifth of gloo's time here
    assert any(each.choice.algorithm == "shared_memory" for each in tables["all_reduce"]), tables
    for count in (1, 300, 20_000):
        mine = torch.full((count,), rank + 1.0)
        dist.all_reduce(mine)
        assert (mine == 3).all()
    error, _ = told(measure)
    assert "no CUDA device" in error, error
    error, _ = told(lambda: measure(device="cpu", most_bytes=3))
    assert "most_bytes=3" in error, error
    fixed = dist.new_group(backend="deepytorch", pg_options=Options(algorithm="engine"))
    error, _ = told(lambda: measure(fixed, device="cpu"))
    assert "'engine' for every size" in error, error
    dist.barrier()
    dist.destroy_process_group()
    """
    run(script, 2, 90)


def test_on_gpus_it_is_beside_a_computation_that_all_is_timed():
    script = """
    from deepytorch.comm.group import measuring
    from deepytorch.comm.algorithms.base import Choice
    init()
    place = torch.device("meta")  # neither a CPU nor there: what is timed is told by the clock below
    cuda = type("Place", (), {"type": "cuda"})()
    took = {"collective": 900.0, "product": 200.0}
    began = []
    def collective():
        began.append("collective")
    measuring._computation = lambda place: lambda: began.append("product")
    measuring._time_us = lambda run, place, group: took["collective" if run is collective else "product"]
    assert measuring._beside(collective, (1 << 20) - 1, cuda, None) is collective
    assert measuring._beside(collective, 1 << 20, torch.device("cpu"), None) is collective
    measuring._beside(collective, 1 << 20, cuda, None)()
    assert began == ["collective"] + ["product"] * 4, began  # 900 / 200, rounded
    began.clear()
    took["collective"] = 10.0
    measuring._beside(collective, 1 << 20, cuda, None)()
    assert began == ["collective", "product"], began
    dist.destroy_process_group()
    """
    run(script, 1, 60)


def test_all_reduces_in_registered_memory_are_timed_beside_the_engine_s():
    script = """
    from deepytorch.comm.group import measuring
    from deepytorch.comm.algorithms.base import Choice
    init()
    class Memory:
        def connect(self):
            pass
        def allocate(self, num_bytes):
            if num_bytes > 8 << 20 and rank == 1:
                raise RuntimeError("no more of it")
            return torch.zeros(num_bytes, dtype=torch.uint8)
    measuring.registered_memory = lambda group, device: Memory()
    cpu = torch.device("cpu")
    found = measuring._times_registered([1 << 16, 1 << 20, 4 << 20], dist.group.WORLD, cpu)
    assert sorted(found) == [1 << 20, 4 << 20], found
    assert all(0 < plain < 1e6 and 0 < registered < 1e6 for plain, registered in found.values()), found
    asked = []  # both beside as much of a computation
    measuring._times_of_computation = lambda run, size, place, group: len(asked) + 2
    measuring._with_computation = lambda run, times, place: asked.append(times) or run
    measuring._times_registered([1 << 20, 4 << 20], dist.group.WORLD, cpu)
    assert asked == [2, 2, 4, 4], asked
    assert measuring._times_registered([1 << 20, 16 << 20], dist.group.WORLD, cpu) == {}
    measuring.registered_memory = lambda group, device: None if rank == 0 else Memory()
    assert measuring._times_registered([1 << 20], dist.group.WORLD, cpu) == {}
    measuring.set_registered_from(dist.group.WORLD, 1 << 20)
    from deepytorch.comm.group.groups import registered_from
    assert registered_from(dist.group.WORLD) == 1 << 20
    assert registered_from(dist.new_group(backend="gloo")) is None
    dist.barrier()
    dist.destroy_process_group()
    """
    run(script, 2, 60)
