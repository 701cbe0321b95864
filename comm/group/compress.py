"""All-reduce with fewer bits between hosts, only on request: exact inside a host, cast for transfers to other hosts.

Each rank's part is rounded once before it is sent, summed in float32 at its owner, and the sum is rounded once. Two
hosts send each other all of it instead, and round no sum. With a `key`, the error of a cast is added to the next
payload of that key (error feedback: Seide et al. 2014, "1-bit stochastic gradient descent"; Karimireddy et al. 2019,
"Error feedback fixes SignSGD").
"""

from __future__ import annotations

import logging
from typing import Any

import torch
import torch.distributed as dist

from deepytorch.comm.algorithms.base import Compression
from deepytorch.comm.group.groups import group_of
from deepytorch.comm.group.wire import COMPRESS
from deepytorch.errors import ConfigError
from deepytorch.log import once


def all_reduce(
    tensor: torch.Tensor,
    op: Any = dist.ReduceOp.SUM,
    group: dist.ProcessGroup | None = None,
    *,
    compress: Compression | None = None,
    key: str = "",
    async_op: bool = False,
) -> dist.Work | None:
    """Run `torch.distributed.all_reduce` in place, with values cast to `compress` between hosts.

    Args:
        tensor: contiguous, on the CPU, float32, bfloat16 or float16.
        compress: None (exact), "bf16", "fp16" or "fp8" (e4m3, scaled by each part's largest value; needs a `key`).
        key: names this payload on all ranks in every step, for error feedback. Between two hosts it takes ~4
            bytes per element of a rank's share, else ~8.

    Returns the work if `async_op`. Values that fp16 cannot hold become infinite, as a loss scaler expects; `overflows`
    counts them. Raises `ConfigError` for arguments that make no sense.
    """
    if compress is None:
        return dist.all_reduce(tensor, op, group, async_op)
    COMPRESS.check_type(compress)
    if compress == "fp8" and not key:
        raise ConfigError(
            "compress='fp8' without a key; expected key='...', the same for a payload in every step: fp8 needs error "
            "feedback"
        )
    COMPRESS.check(op, tensor)
    found = group_of(group)
    if found.topology.num_hosts == 1:  # nothing leaves the host, so nothing is cast
        return dist.all_reduce(tensor, op, group, async_op)
    if not found.topology.is_regular:
        raise ConfigError("compress on hosts with different numbers of ranks; expected as many on every host")
    reduce_op = op if isinstance(op, dist.ReduceOp) else dist.ReduceOp(op)
    before = found.backend.overflows
    work: dist.Work = found.backend.allreduce_compressed(tensor, reduce_op, compress, key, async_op)
    if async_op:
        return work
    work.wait()
    if found.backend.overflows > before:
        once(
            logging.WARNING,
            "values were too large for %s between hosts and became infinite; see deepytorch.comm.overflows",
            compress,
        )
    return None


def overflows(group: dist.ProcessGroup | None = None) -> int:
    """Return how many values too large for the cast, or not finite, this rank has sent since the group was made."""
    count: int = group_of(group).backend.overflows
    return count
