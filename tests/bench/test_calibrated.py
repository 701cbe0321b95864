"""Predictions from measured steps: buckets as DDP fills them, calibration, ready times, and the example profiles."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from torch import nn

from deepytorch.bench.calibrated import Compute, SharedCores, of_ranks, predicted, profile_of
from deepytorch.bench.model_profile import ModelProfile, read_profile
from deepytorch.bench.ready_times import measured_ready_times
from deepytorch.bench.results import decoded
from deepytorch.bench.simulate import buckets, simulate
from deepytorch.comm.topology.cost import Link, Links
from deepytorch.comm.topology.host import Host
from deepytorch.comm.topology.nominal import complete
from deepytorch.comm.topology.topology import Topology, read_topology, regular_topology
from deepytorch.errors import DataError

PROFILES = Path(__file__).parents[2] / "examples/profiles"
V100 = PROFILES / "v100_8x_100gbit.json"
MIB = 1 << 20
# The head's two gradients, two layers, an embedding that comes last; the third is measured as out of order.
READY = ((0.01, 4_000), (0.02, 2 * MIB), (0.06, 20 * MIB), (0.04, 10 * MIB), (0.09, 30 * MIB))
COMPUTE = Compute(forward_s=0.05, backward_s=0.10, optimizer_s=0.01, cpu_s=0.16, ready=READY)


def hosts(num_hosts: int, per_host: int = 1) -> Topology:
    return regular_topology((Host("h", 2),), num_hosts, per_host)


def links(us_per_byte: float, streams: int = 1) -> Links:
    return Links(engine=Link(0.0, us_per_byte), network={streams: Link(0.0, us_per_byte)}, memory=Link(0.0, 1e-5))


def test_gradients_fill_buckets_whole_as_in_ddp():
    found = [(bucket.ready_us, bucket.num_bytes) for bucket in buckets(profile_of("toy", COMPUTE))]
    assert found == [
        (pytest.approx(70e3), 2 * MIB + 4_000),
        (pytest.approx(110e3), 30 * MIB),
        (pytest.approx(140e3), 30 * MIB),
    ]


def test_slowest_rank_of_each_step_counts():
    slow = Compute(forward_s=0.1, backward_s=0.2, optimizer_s=0.02, cpu_s=0.1, ready=((0.1, 4), (0.2, 8)))
    quick = Compute(forward_s=0.04, backward_s=0.1, optimizer_s=0.01, cpu_s=0.06, ready=((0.02, 4), (0.1, 8)))
    usual = Compute(forward_s=0.05, backward_s=0.1, optimizer_s=0.015, cpu_s=0.08, ready=((0.03, 4), (0.1, 8)))
    found = of_ranks([[slow, quick, quick], [usual, usual, quick]])  # the slowest: slow, usual, quick
    assert (found.forward_s, found.backward_s, found.optimizer_s) == (0.05, 0.1, 0.015)
    assert found.cpu_s == pytest.approx(0.07)  # of quick and usual: the cores are shared by all
    assert found.ready == [(pytest.approx(0.03), 4), (pytest.approx(0.1), 8)]
    for wrong in ([], [[]], [[slow], [COMPUTE]], [[slow], [slow, slow]]):
        with pytest.raises(DataError, match="expected one model's steps"):
            of_ranks(wrong)


def test_profile_has_the_compute_that_was_measured():
    profile = profile_of("toy", COMPUTE)
    assert profile.compute_us == pytest.approx(160e3)
    assert profile.gradient_bytes == sum(size for _, size in READY)
    late = profile_of("toy", replace(COMPUTE, ready=((0.2, 8),)))  # by a hook's noise, after the backward pass
    assert late.compute_us == pytest.approx(160e3)
    with pytest.raises(DataError, match="toy has no gradient"):
        profile_of("toy", replace(COMPUTE, ready=()))


def test_profile_can_be_written_and_read():
    profile = profile_of("toy", COMPUTE)
    written = json.loads(json.dumps(asdict(profile)))
    assert decoded(ModelProfile, written) == profile
    with pytest.raises(DataError, match=r"pieces_are_buckets of the model profile is 1, expected true or false"):
        decoded(ModelProfile, written | {"pieces_are_buckets": 1})


def test_step_is_compute_and_what_is_exposed():
    small = replace(COMPUTE, ready=((0.02, 2 * MIB), (0.1, 10 * MIB)))
    steps = predicted(profile_of("toy", small), hosts(2), links(1e-2), (1, 2), "engine")
    assert steps[1].step_us == pytest.approx(160e3)
    assert steps[2].step_us == pytest.approx(160e3 + 1e-2 * 10 * MIB)  # the first bucket is hidden
    assert steps[2].efficiency == pytest.approx(160e3 / steps[2].step_us)


def test_ranks_of_a_lab_share_cores() -> None:
    """Their compute takes turns, and what collectives take of the cores is taken from the compute beside them."""
    small = replace(COMPUTE, ready=((0.02, 2 * MIB), (0.1, 10 * MIB)))
    profile, fast = profile_of("toy", small), links(1e-6, 2)
    alone = SharedCores(cores=2, compute_cpu_s=0.12, step_cpu_s=0.12)
    for ranks, compute_us in ((2, 120e3), (4, 240e3), (8, 480e3)):
        step = predicted(profile, hosts(2, 2), fast, (ranks,), shared=alone)[ranks]
        assert step.step_us == pytest.approx(compute_us, rel=1e-3)
        assert step.efficiency == pytest.approx(1.0, rel=1e-3)
    taking = replace(alone, step_cpu_s=0.18)  # 0.06 s, a sixth of it for the first bucket, the rest behind the backward
    step = predicted(profile, hosts(2, 2), fast, (8,), shared=taking)[8]
    assert step.step_us == pytest.approx(480e3 + 4 * 10e3, rel=1e-3)
    assert step.efficiency == pytest.approx(480 / 520, rel=1e-3)
    slow = predicted(profile, hosts(2, 2), links(1e-2), (8,), "engine", taking)[8]
    assert slow.exposed_us == pytest.approx(slow.transfers[-1].end_us - slow.backward_us)
    assert slow.step_us == pytest.approx(520e3 + slow.exposed_us)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last, self.unused = nn.Linear(64, 256), nn.Linear(256, 8), nn.Linear(3, 3)

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.last(self.first(batch).relu()).square().mean()


def test_ready_times_are_in_the_order_of_the_backward_pass():
    model = Model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    before, begun = model.last.weight.detach().clone(), []
    found = measured_ready_times(model, lambda: model(torch.ones(4, 64)), optimizer, begin=lambda: begun.append(1))
    assert begun == [1]
    assert sorted(size for _, size in found.ready) == sorted(4 * size for size in (64 * 256, 256, 256 * 8, 8))
    assert max(at for at, size in found.ready if size in (4 * 256 * 8, 32)) < max(at for at, _ in found.ready)
    assert 0 < found.ready[0][0] <= found.ready[-1][0] <= found.backward_s * 1.5
    assert min(found.forward_s, found.backward_s, found.optimizer_s, found.cpu_s) > 0
    assert not torch.equal(before, model.last.weight)
    assert not model.last.weight._post_accumulate_grad_hooks
    assert profile_of("model", found).gradient_bytes == sum(size for _, size in found.ready)


@pytest.mark.parametrize(
    ("name", "parameters"), [("resnet50", 25_557_032), ("bert_base", 110_106_428), ("gpt2", 125_950_464)]
)
def test_example_of_v100_is_read_and_simulated(name, parameters):
    profile = read_profile(PROFILES / f"{name}_v100.json")
    assert profile.gradient_bytes == 4 * parameters
    assert "DLPerf" in profile.note
    assert "Assumed" in profile.note
    steps = simulate(profile, read_topology(V100), Links(), (8, 1000)).steps
    assert {(step.num_ranks, step.num_hosts) for step in steps} == {(8, 1), (1000, 125)}
    assert all(0 < step.efficiency < 1 for step in steps)


def test_nccl_runs_through_a_mesh_of_nvlinks():
    """Not every two of 8 V100 are joined, yet rings of NVLinks visit all of them."""
    topology = read_topology(V100)
    host = topology.hosts[0]
    assert host.ring_nvlinked
    assert not host.fully_nvlinked
    one = regular_topology(topology.hosts, 1, 8)
    known = complete(Links(), one, "cuda")
    assert known.link("engine").us_per_byte == pytest.approx(2 * 7 / 8 * known.link("nvlink").us_per_byte)
    pairs = replace(host, nvlinks=tuple(link for link in host.nvlinks if link[0] // 4 == link[1] // 4))
    assert not pairs.ring_nvlinked  # two islands, joined by PCIe
    assert complete(Links(), regular_topology((pairs,), 1, 8), "cuda").nvlink is None
