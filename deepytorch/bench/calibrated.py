"""The simulator's input from what was measured on ranks, and predictions for other numbers of ranks.

The compute of a step is measured without communication, the links by the process group when it is made. What ranks
lose that share cores, as those of a lab do, is in `SharedCores`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, median

from deepytorch.bench.model_profile import BackwardPiece, ModelProfile
from deepytorch.bench.simulate import AUTO, Step, simulate
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.topology import Topology
from deepytorch.errors import DataError

FIRST_BUCKET_BYTES = 1 << 20  # stock DDP's, so that the first all-reduce starts early
BUCKET_CAP_BYTES = 25 << 20  # stock DDP's


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """A step of one rank without communication, in seconds: what `ready_times.measured_ready_times` measures.

    Attributes:
        forward_s: The time of the forward pass.
        backward_s: That of the backward pass.
        optimizer_s: That of the optimizer.
        cpu_s: The CPU time of the step, of all threads of the rank's process.
        ready: For each gradient, the time since the backward pass began when it was accumulated, and its bytes.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    cpu_s: float
    ready: Sequence[tuple[float, int]]


def of_ranks(ranks: Sequence[Sequence[Compute]]) -> Compute:
    """Return the compute of a step among ranks, of which each has measured the same steps: medians over the steps.

    The slowest rank of each step counts, since an all-reduce waits for all; of CPU time, the ranks' mean. Its gradients
    are ready at the medians of their parts of the backward pass. Raises `DataError` if numbers of steps or of gradients
    differ or are 0.
    """
    if len({len(steps) for steps in ranks}) != 1 or len({len(each.ready) for steps in ranks for each in steps}) != 1:
        raise DataError(f"{len(ranks)} ranks measured no step, or steps of several models; expected one model's steps.")
    slowest = [max(step, key=lambda each: each.forward_s + each.backward_s) for step in zip(*ranks, strict=True)]
    backward_s = median(each.backward_s for each in slowest)
    gradients = zip(*(sorted(each.ready) for each in slowest), strict=True)
    parts = [[at_s / each.backward_s for each, (at_s, _) in zip(slowest, found, strict=True)] for found in gradients]
    sizes = [num_bytes for _, num_bytes in sorted(slowest[0].ready)]
    return Compute(
        forward_s=median(each.forward_s for each in slowest),
        backward_s=backward_s,
        optimizer_s=median(each.optimizer_s for each in slowest),
        cpu_s=fmean(median(each.cpu_s for each in steps) for steps in ranks),
        ready=[(backward_s * median(part), size) for part, size in zip(parts, sizes, strict=True)],
    )


def profile_of(name: str, compute: Compute, device: str = "cpu") -> ModelProfile:
    """Return the simulator's input for a measured step, each bucket of gradients as one piece of the backward pass.

    Gradients fill buckets whole and in the order in which they become ready, as DDP has them from its second step on: a
    bucket is full when it has stock DDP's cap or more. Gradients that come after the end of the backward pass count as
    ready then. Raises `DataError` if there are none.
    """
    if not compute.ready:
        raise DataError(f"{name} has no gradient that became ready, expected one or more.")
    pieces: list[BackwardPiece] = []
    begin_s, now_s, waiting, limit = 0.0, 0.0, 0, FIRST_BUCKET_BYTES
    for at_s, num_bytes in sorted(compute.ready):
        now_s, waiting = min(at_s, compute.backward_s), waiting + num_bytes
        if waiting >= limit:
            pieces.append(BackwardPiece(f"bucket {len(pieces)}", (now_s - begin_s) * 1e6, waiting))
            begin_s, waiting, limit = now_s, 0, BUCKET_CAP_BYTES
    if waiting:
        pieces.append(BackwardPiece(f"bucket {len(pieces)}", (now_s - begin_s) * 1e6, waiting))
        begin_s = now_s
    pieces.append(BackwardPiece("rest", (compute.backward_s - begin_s) * 1e6, 0))
    return ModelProfile(
        name=name,
        forward_us=compute.forward_s * 1e6,
        backward=tuple(pieces),
        bucket_cap_bytes=BUCKET_CAP_BYTES,
        optimizer_us=compute.optimizer_s * 1e6,
        device=device,
        pieces_are_buckets=True,
    )


@dataclass(frozen=True, slots=True)
class SharedCores:
    """The cores of the machine on which all ranks of a lab are, of one thread each, and the CPU time of their steps.

    Attributes:
        cores: Their number.
        compute_cpu_s: The CPU time of a step without communication.
        step_cpu_s: That of a step with it: hops and sums of collectives need cores, too.
    """

    cores: int
    compute_cpu_s: float
    step_cpu_s: float

    def compute_us(self, ranks: int) -> float:
        """Return the time that so many ranks compute when none waits for the network."""
        return 1e6 * self._share(ranks) * self.compute_cpu_s

    def slowed(self, profile: ModelProfile, ranks: int) -> ModelProfile:
        """Return the profile of a rank among so many: its compute waits for that of others, and for their collectives.

        While the gradients of one piece travel, the next piece computes, and is slowed by the CPU time that collectives
        take. Those of the last piece slow nothing.
        """
        found = profile.slowed(self.compute_us(ranks) / profile.compute_us)
        taken_s = max(0.0, self.step_cpu_s - self.compute_cpu_s)
        us_per_byte = 1e6 * self._share(ranks) * taken_s / max(1, profile.gradient_bytes)
        before = [0, *(piece.gradient_bytes for piece in found.backward)]
        backward = [
            replace(piece, compute_us=piece.compute_us + us_per_byte * num_bytes)
            for piece, num_bytes in zip(found.backward, before, strict=False)
        ]
        if not found.backward[-1].gradient_bytes and len(backward) > 1:  # what computes behind the last bucket
            backward[-1] = found.backward[-1]
        return replace(found, backward=tuple(backward))

    def _share(self, ranks: int) -> float:
        return max(1.0, ranks / self.cores)


def predicted(
    profile: ModelProfile,
    topology: Topology,
    links: Links,
    ranks: Sequence[int],
    algorithm: str = AUTO,
    shared: SharedCores | None = None,
) -> Mapping[int, Step]:
    """Return the step on each number of ranks; `step_us` and `efficiency` are what is mostly looked at.

    Args:
        profile: The compute of a rank.
        topology: Of the group that measured the links; scaled to other numbers of ranks by whole hosts.
        links: Of that group.
        ranks: The numbers of ranks.
        algorithm: `simulate.AUTO` for deepytorch's choices, "engine" for the backend as stock DDP uses it.
        shared: Of a lab; the efficiency then compares the step with compute at that number of ranks. None: each host
            has cores or GPUs of its own, and its ranks compute as those of the measured hosts did.
    """
    found = {}
    for number in ranks:
        slowed = profile if shared is None else shared.slowed(profile, number)
        steps = simulate(slowed, topology, links, (number,)).steps
        # an algorithm that cannot do any bucket here, such as those for several hosts on one, leaves it to the engine
        names = {step.algorithm: step for step in steps}
        step = names.get(algorithm, names["engine"])
        compute_us = slowed.compute_us if shared is None else shared.compute_us(number)
        found[number] = replace(step, efficiency=compute_us / step.step_us)
    return found
