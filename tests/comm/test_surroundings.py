"""What jobs set around a group: torch's debug level, a safe path, options, devices, meshes."""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from deepytorch import background
from deepytorch.comm.algorithms import measured
from deepytorch.comm.algorithms.base import KINDS, Choice
from deepytorch.comm.algorithms.select import Range
from deepytorch.comm.group import tables
from deepytorch.comm.group.groups import Group
from deepytorch.comm.group.native import native
from deepytorch.comm.group.options import Options
from deepytorch.comm.topology.cost import Links
from deepytorch.errors import BuildError
from deepytorch.integrations import process_groups
from tests.comm.machines import of_fixture
from tests.comm.ranks import run

pytestmark = pytest.mark.timeout(240, func_only=True)

# ---------------------------------------------------------------------- how Python was started


def test_a_safe_path_keeps_neither_the_compiler_nor_background_processes_from_starting(monkeypatch, tmp_path: Path):
    compiler = tmp_path / "compiler"
    compiler.write_text("#!/bin/sh\nexit 1\n")
    compiler.chmod(0o700)
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    monkeypatch.setenv("CXX", str(compiler))
    with background.start("print(all(sys.path))") as started:
        said, _ = started.communicate(timeout=60)
    assert said == b"True\n"
    with pytest.raises(BuildError, match=re.escape(str(compiler))):
        native._compile(tmp_path)


# ---------------------------------------------------------------------- torch's debug level


def test_a_group_works_under_the_debug_level_that_wraps_it():
    script = """
    deepytorch.switch.SWITCH.enabled = True
    init("gloo", timeout=30)
    wrapper = dist.group.WORLD._get_backend(torch.device("cpu"))
    assert type(wrapper).__name__ == "_ProcessGroupWrapper" and dist.get_backend() == "gloo", wrapper
    deepytorch.comm.chosen()  # raises where ours is not what is wrapped
    data = torch.full((1000,), rank + 1.0)
    work = dist.all_reduce(data, async_op=True)
    dist.barrier()
    assert work.wait() and torch.all(data == 3)
    share, whole = torch.empty(3), torch.arange(6.0)
    dist.reduce_scatter_tensor(share, whole)
    assert share.tolist() == [2 * (3 * rank + each) for each in range(3)]
    dist.all_gather_into_tensor(whole, share)
    assert whole.tolist() == [0, 2, 4, 6, 8, 10]
    dist.all_reduce(data, dist.ReduceOp.PRODUCT)
    found = [None] * size
    dist.all_gather_object(found, rank)
    assert found == [0, 1]
    again = dist.new_group()
    dist.broadcast(data, 1, group=again)
    error, seconds = told(lambda: dist.all_reduce(torch.ones(3 + rank)))
    say("found", error)
    os._exit(0)
    """
    script = "import deepytorch.comm\n" + script.replace("\n    ", "\n")
    said = run(script, env={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}, warm=False)  # it is read as torch is imported
    for output in said:
        assert "Detected mismatch between collectives on ranks" in output.split("found", 1)[1], output


# ---------------------------------------------------------------------- what is left to torch


@pytest.mark.parametrize(
    ("asked", "arguments", "bound", "routed"),
    [
        ("nccl", {}, None, True),
        ("cpu:gloo,cuda:nccl", {}, None, True),
        ("nccl", {"backend_options": None, "device_id": None}, None, True),
        ("nccl", {"device_id": torch.device("cuda", 0)}, None, False),
        ("nccl", {"backend_options": "ProcessGroupNCCL.Options()"}, None, False),
        ("nccl", {}, torch.device("cuda", 0), False),  # of a default group that nccl splits others off
        ("ucc", {}, None, False),
        ("cuda:nccl", {}, None, False),
    ],
)
def test_what_only_nccl_does_is_left_to_it(monkeypatch, asked, arguments, bound, routed):
    """`split_group`, and meshes that split their groups off, ask for a default group that is bound to a device."""
    monkeypatch.setattr(process_groups.SWITCH, "enabled", True)
    monkeypatch.setattr(process_groups.SWITCH, "process_groups", True)
    for initialized in {bound is not None, True}:
        c10d = SimpleNamespace(
            is_initialized=lambda started=initialized: started,
            _get_default_group=lambda: SimpleNamespace(bound_device_id=bound),
        )
        assert process_groups._is_routed(c10d, asked, arguments) == routed


# ---------------------------------------------------------------------- nccl, priced by nccl


class Tables:
    """Stands for the native backend; holds what it was told to run."""

    def __init__(self):
        self.rows = {}

    def set_table(self, kind, on_cuda, rows, fixed):
        self.rows[kind, on_cuda, fixed] = rows


def gpu_group(store, rank, options=None):
    topology = of_fixture("pcie_8gpu")
    made = Options() if options is None else options
    return Group(Tables(), topology, Links(), made, store, rank, timedelta(seconds=10), True, ("H200",))


def test_tensors_on_gpus_go_to_nccl_whatever_is_predicted():
    group = gpu_group(dist.HashStore(), 0)
    found = tables.tables_of(group)
    for kind in KINDS:
        for fixed in (False, True):
            assert found[kind, "cuda", fixed] == []  # no row: the engine
            assert found[kind, "cpu", fixed]
    asked_for = gpu_group(dist.HashStore(), 0, Options(algorithm="cpu_reduce", chunk_bytes=1 << 20))
    assert [row[1] for row in tables.tables_of(asked_for)["all_reduce", "cuda", False]] == ["cpu_reduce"]


def test_what_was_measured_beside_nccl_is_what_all_ranks_run(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    store = dist.HashStore()
    groups = [gpu_group(store, rank) for rank in range(2)]
    found = {"all_reduce": (Range(0, Choice("engine")), Range(1 << 22, Choice("cpu_reduce", 1 << 20, 2)))}
    measured.remember(groups[0].topology, groups[0].gpus, measured.Measured(found, 1 << 24))
    for group in groups:
        assert group.registered_from is None
        assert tables.with_remembered(group).registered_from == 1 << 24
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "another"))  # the other rank's: rank 0's holds
        assert [row[:3] for row in group.backend.rows["all_reduce", True, False]] == [
            ((1 << 22) - 1, "engine", 0),
            ((1 << 64) - 1, "cpu_reduce", 1 << 20),
        ]
        assert list(group.backend.rows) == [("all_reduce", True, False)]  # deterministic sums stay with nccl


def test_what_nccl_alone_has_can_be_asked_of_a_group_with_gpus():
    module = native.load()
    store = dist.HashStore()
    gloo = dist.ProcessGroupGloo(dist.PrefixStore("gloo", store), 0, 1, timedelta(seconds=10))  # stands for nccl
    one = {"rank": 0, "size": 1, "num_hosts": 1, "host": 0, "ranks": [0], "timeout_ms": 10_000}
    ours = module.Backend(cpu=gloo, cuda=gloo, segment=None, between=[], **one)
    assert "create_device" not in dir(module.Backend)
    assert ours.create_device is not None  # gloo's own
    assert ours.engine(True) is gloo
    assert ours.name() == "deepytorch"  # what ours has is ours
    for name in ("register_mem_pools", "__fspath__"):
        with pytest.raises(AttributeError, match=name):
            getattr(ours, name)
    without = module.Backend(cpu=gloo, cuda=None, segment=None, between=[], **one)
    with pytest.raises(AttributeError, match="'Backend' object has no attribute 'create_device'"):
        without.create_device  # noqa: B018
    assert without.engine(True) is None


# ---------------------------------------------------------------------- meshes


@pytest.mark.slow
def test_meshes_shard_replicate_and_split_tensors_as_one_process_does():
    """HSDP, tensor parallelism and both on one mesh, by the import alone, against one process."""
    script = """
    import copy
    from torch import nn
    import torch.nn.functional as F
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    deepytorch.switch.SWITCH.enabled = True
    init("gloo", timeout=60)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
    for name in mesh.mesh_dim_names:
        assert dist.get_backend(mesh[name].get_group()) == "gloo"
        deepytorch.comm.chosen(mesh[name].get_group())  # raises for a group that is not ours
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 4))

    def data(step, place):
        made = torch.Generator().manual_seed(10 * step + place)
        return torch.randn(6, 8, generator=made), torch.randint(4, (6,), generator=made)

    def trained(model, places):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            loss = sum(F.cross_entropy(model(x), y) for x, y in (data(step, place) for place in places)) / len(places)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        return [each.full_tensor() if isinstance(each, DTensor) else each for each in model.parameters()]

    def split(model, on):
        return parallelize_module(model, on, {"0": ColwiseParallel(), "2": RowwiseParallel()})

    with deepytorch.paused():
        of_four, of_two, of_one = (trained(copy.deepcopy(whole), range(places)) for places in (4, 2, 1))
        hsdp, tensor, both = (copy.deepcopy(whole) for _ in range(3))
        fully_shard(hsdp, mesh=mesh)
        split(tensor, mesh["inner"])
        fully_shard(split(both, mesh["inner"]), mesh=mesh["outer"])
        for name, model, places, wanted in (
            ("hsdp", hsdp, [rank], of_four),
            ("tensor parallel", tensor, [0], of_one),
            ("both", both, [rank // 2], of_two),
        ):
            for found, each in zip(trained(model, places), wanted):
                torch.testing.assert_close(found, each, msg=lambda words: name + words)
    dist.destroy_process_group()
    """
    run("import deepytorch.comm\n" + script.replace("\n    ", "\n"), num_ranks=4, timeout=150)
