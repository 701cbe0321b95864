"""The choices of deepytorch's process group for a collective, and each algorithm's predicted time, as one rank.

The ranks are there for the links: the group chooses by those that it measures, or remembers from an earlier run.
"""

from __future__ import annotations

import os
from functools import partial
from typing import Any

import torch.distributed as dist

from deepytorch import comm
from deepytorch.bench.channel import DOING, Turns
from deepytorch.bench.collectives import join, open_group
from deepytorch.bench.jobs import ChoicesJob
from deepytorch.bench.prediction import explained
from deepytorch.comm.algorithms.base import Choice
from deepytorch.comm.group.groups import group_of
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.discover import discover_host
from deepytorch.comm.topology.topology import Topology, scaled_topology
from deepytorch.errors import ConfigError

Job = ChoicesJob


def run(job: ChoicesJob, turns: Turns) -> dict[str, Any]:
    """Return, for each of the `sizes`, `predicted_us` by algorithm, `reasons` of those that cannot run, and `chosen`.

    Where the native code cannot be built, the links are nominal, and `measured` is False.
    """
    join(job.timeout_s)
    group = open_group(job.group, job.timeout_s, partial(turns.say, DOING))
    try:
        known = group_of(group)
        topology, links, measured = known.topology, known.links, True
    except ConfigError:
        host = Topology((discover_host(),), (0,) * int(os.environ["LOCAL_WORLD_SIZE"]))
        topology = scaled_topology(host, dist.get_world_size())
        links, measured = Links(), False
    sizes = []
    rows = explained(job, job.group.compress, job.sizes, topology, links)
    for num_bytes, row in zip(job.sizes, rows, strict=True):
        choice = comm.chosen(group, job.op, num_bytes) if measured else row.choice
        sizes.append(
            {
                "chosen": settings(choice, num_bytes),
                "predicted_us": {each.algorithm: each.time_us for each in row.predictions if each.time_us is not None},
                "reasons": {each.algorithm: each.reason for each in row.predictions if each.time_us is None},
            }
        )
    return {"measured": measured, "sizes": sizes}


def settings(choice: Choice, num_bytes: int) -> str:
    """Return an algorithm and its settings in words."""
    chunks = choice.num_chunks(num_bytes)
    return ", ".join(
        [
            choice.algorithm,
            *([f"{chunks} chunks"] if chunks > 1 else []),
            *([f"{choice.num_streams} streams"] if choice.num_streams > 1 else []),
            *([choice.compress] if choice.compress else []),
        ]
    )
