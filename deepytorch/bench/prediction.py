"""The prediction that the cost model of deepytorch's process group makes of a benchmark's collective."""

from __future__ import annotations

from collections.abc import Sequence

from deepytorch.bench.jobs import ChoicesJob, CollectiveJob
from deepytorch.comm.algorithms.base import KINDS, dtype_name
from deepytorch.comm.algorithms.select import ENGINE, Explanation, explain
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.topology import Topology


def explained(
    job: CollectiveJob | ChoicesJob, compress: str | None, sizes: Sequence[int], topology: Topology, links: Links
) -> tuple[Explanation, ...]:
    """Return the choice for a job's collective at each size in bytes, with each algorithm's prediction or reason.

    compress: the type that values may be cast to between hosts. links: of `topology`; those that lack are nominal.
    """
    return explain(
        topology,
        links,
        kind=next(kind for kind in KINDS if kind == job.op),
        dtype=dtype_name(job.dtype),
        reduce_op=job.redop,
        allow_compress=compress,  # type: ignore[arg-type]
        sizes=sizes,
    )


def predicted_us(
    job: CollectiveJob, num_bytes: int, algorithm: str, compress: str | None, topology: Topology, links: Links
) -> float | None:
    """Return the us that an algorithm takes at its best settings; None if it cannot do this collective.

    A name that is none of deepytorch's algorithms stands for the inner backend's own.
    """
    (row,) = explained(job, compress, (num_bytes,), topology, links)
    times = {each.algorithm: each.time_us for each in row.predictions}
    return times[algorithm if algorithm in times else ENGINE.name]
