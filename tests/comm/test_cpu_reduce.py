"""The pipeline of CPU-Reduce, run on CPU tensors by copies like those of a GPU, and on GPUs where there are some."""

from __future__ import annotations

import pytest

from tests.comm.ranks import run

pytestmark = pytest.mark.timeout(180, func_only=True)

SUMS = """
init(pg_options=Options(algorithm="cpu_reduce", area_bytes={area}))
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


@pytest.mark.parametrize(("num_ranks", "area"), [(2, 4096), (3, 65536)])
def test_the_pipeline_gives_exact_sums_on_cpu_tensors(num_ranks, area):
    run(SUMS.format(area=area, device="cpu"), num_ranks, timeout=90)


@pytest.mark.gpu
def test_the_pipeline_gives_exact_sums_on_gpus():
    """Ranks share a GPU where there are not enough: nothing of the pipeline minds, only NCCL would."""
    run(
        "torch.cuda.set_device(rank % torch.cuda.device_count())\n" + SUMS.format(area=1 << 20, device="cuda"),
        num_ranks=2,
        timeout=120,
    )
