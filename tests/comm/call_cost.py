"""What a call of a group costs, and a new group: a loop that calls without a pause, for two versions to take turns in.

    torchrun --nproc-per-node 2 tests/comm/call_cost.py [deepytorch|gloo]

Prints one JSON object: microseconds a call, the median of 40 turns, by collective and bytes; `gloo` is torch's own.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any


def main(backend: str) -> None:
    """Measure, and print what rank 0 found."""
    os.environ["DEEPYTORCH_COMPILE"] = "wait"  # for the C++, not on stock collectives meanwhile
    import torch
    import torch.distributed as dist

    if backend == "deepytorch":
        import deepytorch  # noqa: F401
    dist.init_process_group(backend)
    found = {"barrier": _median(dist.barrier, 50), "new group with a barrier": _median(_new_group, 1, turns=20)}
    for size in (1 << 10, 1 << 14, 1 << 20, 1 << 24):
        whole, part, other = (
            torch.ones(size // 4),
            torch.ones(size // 4 // dist.get_world_size()),
            torch.ones(size // 4),
        )
        calls: dict[str, Callable[[], Any]] = {
            "all_reduce": lambda whole=whole: dist.all_reduce(whole, dist.ReduceOp.MAX),
            "broadcast": lambda whole=whole: dist.broadcast(whole, 0),
            "reduce_scatter": lambda whole=whole, part=part: dist.reduce_scatter_tensor(part, whole),
            "all_gather": lambda whole=whole, part=part: dist.all_gather_into_tensor(whole, part),
            "all_to_all": lambda whole=whole, other=other: dist.all_to_all_single(other, whole),
        }
        for name, call in calls.items():
            found[f"{name} {size}"] = _median(call, 100 if size < 1 << 20 else 20 if size < 1 << 24 else 3)
            part.fill_(1.0)
            whole.fill_(1.0)
    if dist.get_rank() == 0:
        sys.stdout.write(json.dumps(found) + "\n")
    dist.destroy_process_group()


def _new_group() -> None:
    import torch.distributed as dist

    dist.barrier(dist.new_group())


def _median(call: Callable[[], Any], repeats: int, turns: int = 40) -> float:
    import torch.distributed as dist

    for _ in range(repeats):
        call()
    costs = []
    for _ in range(turns):
        dist.barrier()
        begin = time.perf_counter()
        for _ in range(repeats):
            call()
        costs.append((time.perf_counter() - begin) * 1e6 / repeats)
    return round(statistics.median(costs), 1)


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "deepytorch")
