"""The pipeline of CPU-Reduce, run on CPU tensors by copies like those of a GPU, and on GPUs where there are some."""

from __future__ import annotations

from dataclasses import replace

import pytest

from deepytorch.comm.group.areas import area_bytes, near_node, room_bytes
from deepytorch.comm.topology.discover import gpu_nodes
from tests.comm.machines import of_fixture
from tests.comm.ranks import run

pytestmark = pytest.mark.timeout(180, func_only=True)

SUMS = """
init(pg_options=Options(algorithm="cpu_reduce", {options}))
from deepytorch.comm import chosen
assert chosen(num_bytes=1 << 22, device="{device}").algorithm == "cpu_reduce"
for dtype in (torch.float32, torch.bfloat16, torch.float16):
    for count in (1, 1000, 70_001, 600_000):
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.AVG, dist.ReduceOp.MAX):
            values = [((torch.arange(count) * (peer + 1)) % 7 + peer).to(dtype) for peer in range(size)]
            mine = values[rank].clone().to("{device}")
            work = dist.all_reduce(mine, op, async_op=count % 2 == 0)
            if work is not None:
                work.wait()
            stacked = torch.stack(values).float()
            expected = {{
                "SUM": stacked.sum(0), "AVG": stacked.sum(0) / size, "MAX": stacked.max(0).values
            }}[op.name if hasattr(op, "name") else str(op).split(".")[-1]].to(dtype)
            assert torch.equal(mine.cpu(), expected), (dtype, count, op, mine[:8], expected[:8])
dist.destroy_process_group()
"""


@pytest.mark.parametrize(
    ("num_ranks", "options"),
    [(2, "area_bytes=4096"), (3, "chunk_bytes=65536")],
    ids=["small areas", "areas that have grown"],
)
def test_the_pipeline_gives_exact_sums_on_cpu_tensors(num_ranks, options):
    run(SUMS.format(options=options, device="cpu"), num_ranks, timeout=90)


def test_areas_grow_when_they_are_needed_and_are_one_copy_each_way():
    script = """
    import os
    init(pg_options=Options(algorithm="cpu_reduce"))
    from deepytorch.comm.group.groups import group_of
    segment = group_of().backend.segment
    taken = lambda: os.stat(f"/proc/self/fd/{segment.descriptor}").st_blocks * 512
    assert segment.num_bytes == size * 6 * (4 << 20)
    dist.barrier()
    assert taken() < size * 6 * (1 << 20), taken()
    count = 5_000_000  # 20 MB: five chunks, of which one is reduced and three are on their way
    mine = (torch.arange(count) % 1000 + rank).float()
    dist.all_reduce(mine)
    assert torch.equal(mine, (torch.arange(count) % 1000 * size + sum(range(size))).float())
    assert taken() >= segment.num_bytes, taken()
    dist.barrier()
    dist.destroy_process_group()
    """
    run(script, num_ranks=2, timeout=90)


def test_memory_lies_at_the_node_of_the_gpu_that_a_process_sees():
    host = of_fixture("pcie_8gpu").hosts[0]
    nodes = [gpu.numa_node for gpu in host.gpus]
    assert len(host.numa_nodes) == 2
    assert set(nodes) == {0, 1}
    assert [near_node(host, device, {}) for device in range(8)] == nodes
    assert near_node(host, 0, {"CUDA_VISIBLE_DEVICES": "7, 0"}) == nodes[7]
    assert near_node(host, 1, {"CUDA_VISIBLE_DEVICES": "7,0"}) == nodes[0]
    for visible in ("", "GPU-8932f937", "3"):
        assert near_node(host, 1, {"CUDA_VISIBLE_DEVICES": visible}) == -1
    assert near_node(replace(host, numa_nodes=host.numa_nodes[:1]), 0, {}) == -1


def test_nodes_of_gpus_are_read_in_the_order_of_their_addresses(tmp_path):
    for address, vendor, kind, node in (
        ("0000:c1:00.0", "0x10de", "0x030200", "1"),
        ("0000:01:00.0", "0x10de", "0x030000", "0"),
        ("0000:01:00.1", "0x10de", "0x040300", "0"),  # its sound
        ("0000:02:00.0", "0x8086", "0x030000", "0"),
        ("0000:d1:00.0", "0x10de", "0x030200", "-1"),
    ):
        folder = tmp_path / address
        folder.mkdir()
        for name, value in (("vendor", vendor), ("class", kind), ("numa_node", node)):
            (folder / name).write_text(value + "\n")
    assert gpu_nodes(tmp_path) == [0, 1, None]


def test_rooms_are_bounded_for_all_ranks_of_a_host_together():
    assert room_bytes(6, 8) == 4 << 20
    assert room_bytes(6, 64) == 1 << 20
    one_host = of_fixture("pcie_8gpu")
    assert area_bytes(one_host, 6, 8) == 1 << 19
    assert area_bytes(one_host, 6, 8, wanted=8192) == 8192


@pytest.mark.gpu
def test_the_pipeline_gives_exact_sums_on_gpus():
    """Ranks share a GPU where there are not enough: nothing of the pipeline minds, only NCCL would."""
    run(
        "torch.cuda.set_device(rank % torch.cuda.device_count())\n"
        + SUMS.format(options="chunk_bytes=1 << 20", device="cuda"),
        num_ranks=2,
        timeout=120,
    )
