"""Simulation of the timeline of a data-parallel step, compute and collectives, on a topology of any size.

One queue of collectives overlaps with the backward pass: a bucket's all-reduce starts when its gradients are ready and
the queue is free. The model assumes that neither slows the other down.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from deepytorch.bench.model_profile import ModelProfile
from deepytorch.comm.algorithms.base import Choice, Compression, DeviceKind
from deepytorch.comm.algorithms.select import COLLECTIVES, ENGINE, Explanation, Prediction, explain
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.nominal import complete, scaled_links
from deepytorch.comm.topology.topology import Topology, scaled_topology

AUTO = "auto"  # each bucket by the choice of `select`


@dataclass(frozen=True, slots=True)
class Bucket:
    """Gradients that are reduced together, and when in the step the last of them is ready."""

    ready_us: float
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Transfer:
    """One bucket's all-reduce in the timeline of a step."""

    ready_us: float
    start_us: float
    end_us: float
    num_bytes: int
    choice: Choice


@dataclass(frozen=True, slots=True)
class Step:
    """One step, on `num_ranks` ranks, by one algorithm (the engine for buckets that it cannot do).

    Times count from the step's start: `forward_us` and `backward_us` are when these end. `exposed_us` is how long the
    optimizer waits for collectives after the backward pass. `efficiency`: the compute of one rank / `step_us`.
    """

    algorithm: str
    num_ranks: int
    num_hosts: int
    forward_us: float
    backward_us: float
    step_us: float
    communication_us: float
    exposed_us: float
    efficiency: float
    transfers: tuple[Transfer, ...]

    @property
    def algorithms(self) -> Mapping[str, int]:
        """Return the number of buckets by the algorithm that reduces them."""
        names = [transfer.choice.algorithm for transfer in self.transfers]
        return {name: names.count(name) for name in dict.fromkeys(names)}


@dataclass(frozen=True, slots=True)
class Simulation:
    """The result of `deepytorch simulate`: a step for each number of ranks and each algorithm that can be used there.

    `nominal`: the links that were assumed and not measured, by the number of ranks.
    """

    model: str
    steps: tuple[Step, ...]
    nominal: Mapping[int, tuple[str, ...]]

    def to_json(self) -> dict[str, Any]:
        """Return the simulation as plain JSON values."""
        steps = [asdict(step) | {"algorithms": dict(step.algorithms)} for step in self.steps]
        nominal = {str(ranks): list(names) for ranks, names in self.nominal.items()}
        return {"model": self.model, "steps": steps, "nominal": nominal}


def simulate(
    profile: ModelProfile,
    topology: Topology,
    links: Links,
    ranks: Sequence[int],
    allow_compress: Compression | None = None,
) -> Simulation:
    """Simulate a step on each number of ranks, by `select`'s choices and by each algorithm that can do a bucket.

    `links` are those of `topology` as given; for other numbers of ranks both are scaled (see `scaled_topology` and
    `scaled_links`). Raises `DataError` for ranks that would fill a host in part.
    """
    sizes = sorted({bucket.num_bytes for bucket in buckets(profile)})
    device: DeviceKind = "cpu" if profile.device == "cpu" else "cuda"
    steps: list[Step] = []
    nominal: dict[int, tuple[str, ...]] = {}
    for num_ranks in ranks:
        scaled = topology if num_ranks == topology.num_ranks else scaled_topology(topology, num_ranks)
        known = complete(scaled_links(links, topology, scaled, device), scaled, device)
        nominal[num_ranks] = tuple(sorted(known.nominal))
        rows = explain(
            scaled,
            known,
            dtype=profile.dtype,
            device=device,
            allow_compress=allow_compress,
            sizes=sizes,
        )
        names = [found.name for at, found in enumerate(COLLECTIVES) if any(row.predictions[at].choice for row in rows)]
        for name in (AUTO, *names):
            costs = {row.operation.num_bytes: _cost(row, name) for row in rows}
            steps.append(play(profile, scaled, name, costs.__getitem__))
    return Simulation(profile.name, tuple(steps), nominal)


def buckets(profile: ModelProfile) -> tuple[Bucket, ...]:
    """Return the gradients in the order in which they become ready, cut at the cap; the rest makes the last bucket.

    A piece's gradients may be divided between buckets, unless each is one; all of them are ready when the piece ends.
    """
    found: list[Bucket] = []
    now_us, waiting = profile.forward_us, 0
    for piece in profile.backward:
        now_us += piece.compute_us
        waiting += piece.gradient_bytes
        if profile.pieces_are_buckets and waiting:
            found.append(Bucket(now_us, waiting))
            waiting = 0
        while waiting >= profile.bucket_cap_bytes:
            found.append(Bucket(now_us, profile.bucket_cap_bytes))
            waiting -= profile.bucket_cap_bytes
    return (*found, Bucket(now_us, waiting)) if waiting else tuple(found)


def play(
    profile: ModelProfile,
    topology: Topology,
    algorithm: str,
    cost_of: Callable[[int], tuple[float, Choice]],
) -> Step:
    """Simulate one step. `cost_of` gives the us of an all-reduce of a number of bytes, and how it is carried out."""
    free_us, transfers = 0.0, []
    backward_us = profile.forward_us + sum(piece.compute_us for piece in profile.backward)
    for bucket in buckets(profile) if topology.num_ranks > 1 else ():
        cost_us, choice = cost_of(bucket.num_bytes)
        start_us = max(free_us, bucket.ready_us)
        free_us = start_us + cost_us
        transfers.append(Transfer(bucket.ready_us, start_us, free_us, bucket.num_bytes, choice))
    exposed_us = max(0.0, free_us - backward_us)
    step_us = backward_us + exposed_us + profile.optimizer_us
    return Step(
        algorithm=algorithm,
        num_ranks=topology.num_ranks,
        num_hosts=topology.num_hosts,
        forward_us=profile.forward_us,
        backward_us=backward_us,
        step_us=step_us,
        communication_us=sum(transfer.end_us - transfer.start_us for transfer in transfers),
        exposed_us=exposed_us,
        efficiency=profile.compute_us / step_us,
        transfers=tuple(transfers),
    )


def _cost(row: Explanation, algorithm: str) -> tuple[float, Choice]:
    """Return time and settings of one algorithm for the size of a row; the engine's if it cannot do that size."""
    if algorithm == AUTO:
        algorithm = row.choice.algorithm
    found = _of(row, algorithm)
    if found.time_us is None or found.choice is None:
        found = _of(row, ENGINE.name)
    assert found.time_us is not None  # the engine can do anything
    assert found.choice is not None
    return found.time_us, found.choice


def _of(row: Explanation, algorithm: str) -> Prediction:
    return next(found for found in row.predictions if found.algorithm == algorithm)
