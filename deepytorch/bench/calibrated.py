"""The simulator's input from what was measured on ranks, and predictions for other numbers of ranks.

The compute of a step is measured without communication, the links by the process group when it is made. What ranks
lose that share cores, as those of a lab do, is in `SharedCores`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from deepytorch.bench.model_profile import BackwardPiece, ModelProfile
from deepytorch.bench.simulate import AUTO, Step, simulate
from deepytorch.comm.topology.cost import Link, Links, hop_link
from deepytorch.comm.topology.topology import Topology
from deepytorch.errors import DataError

FIRST_BUCKET_BYTES = 1 << 20  # stock DDP's, so that the first all-reduce starts early
BUCKET_CAP_BYTES = 25 << 20  # stock DDP's
_OVER_NETWORK = "network/"  # and the number of connections: names in `Links.times_us`


@dataclass(frozen=True, kw_only=True, slots=True)
class Compute:
    """A step of one rank without communication, in seconds: what `ready_times.measured_ready_times` measures.

    Attributes:
        forward_s: The time of the forward pass.
        backward_s: That of the backward pass.
        optimizer_s: That of the optimizer.
        ready: For each gradient, the time since the backward pass began when it was accumulated, and its bytes.
    """

    forward_s: float
    backward_s: float
    optimizer_s: float
    ready: Sequence[tuple[float, int]]


def of_ranks(ranks: Sequence[Sequence[Compute]]) -> Compute:
    """Return the compute of a step among ranks, of which each has measured the same steps: medians over the steps.

    The slowest rank of each step counts, since an all-reduce waits for all. Its gradients are ready at the medians of
    their parts of the backward pass. Raises `DataError` if numbers of steps or of gradients differ or are 0.
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
    """The cores of the one machine on which all ranks of a lab are, of one thread each.

    `measured_ranks` computed on them at the same time when compute was measured.
    """

    cores: int
    measured_ranks: int

    def compute_scale(self, ranks: int) -> float:
        """Return how many times as long as measured a rank computes: K ranks on C cores take K / C times as long."""
        return max(1.0, ranks / self.cores) / max(1.0, self.measured_ranks / self.cores)

    def overlap(self, ranks: int) -> float:
        """Return the speed of collectives beside compute: none with more ranks than cores, full speed with fewer.

        A collective's hops and sums need a core. Where each has a rank that computes, they wait for it, or compute
        waits for them. Steps were measured to take as long as compute and all collectives one after the other.
        """
        return 0.0 if ranks > self.cores else 1.0


def links_of_large(links: Links, topology: Topology) -> Links:
    """Return the links for payloads as large as the largest that was timed, or larger, as buckets of gradients are.

    Between hosts, calibration times 16 KB and a size that takes a tenth of a second at the most, and fits a line. On
    cores that are shared, the small size waits for ranks to be scheduled, which the large one does while bytes travel:
    the line's slope is then less than the wire allows, and a bucket beyond the large size would be too fast. Here a
    byte takes as long as on the average of the large size. The latency stays, which grows with the number of hosts.
    Links without times stay as they are.
    """

    def us_per_byte(name: str) -> float:
        times = links.times_us[name]
        return times[max(times)] / max(times)

    def slower(name: str, link: Link | None) -> Link | None:
        return link and (Link(link.latency_us, us_per_byte(name)) if name in links.times_us else link)

    per_host, network = topology.ranks_per_host, dict(links.network)
    for name in links.times_us:
        streams = per_host * int(name.removeprefix(_OVER_NETWORK)) if name.startswith(_OVER_NETWORK) else 0
        if streams in network:  # the local ranks' tensors together are the payload of a host
            hop = hop_link(Link(0.0, us_per_byte(name) / per_host), topology.num_hosts)
            network[streams] = replace(hop, latency_us=network[streams].latency_us)
    engine, memory = slower("engine", links.engine), slower("memory", links.memory)
    return replace(links, engine=engine, memory=memory, network=network, times_us={})


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
        links: Of that group; those of `links_of_large` are used.
        ranks: The numbers of ranks.
        algorithm: `simulate.AUTO` for deepytorch's choices, "engine" for the backend as stock DDP uses it.
        shared: Of a lab; the efficiency then compares the step with compute at that number of ranks. None: each host
            has cores or GPUs of its own, and its ranks compute as those of the measured hosts did.
    """
    found, links = {}, links_of_large(links, topology)
    for number in ranks:
        slowed = profile if shared is None else profile.slowed(shared.compute_scale(number))
        overlap = 1.0 if shared is None else shared.overlap(number)
        steps = simulate(slowed, topology, links, (number,), overlap=overlap).steps
        # an algorithm that cannot do any bucket here, such as those for several hosts on one, leaves it to the engine
        names = {step.algorithm: step for step in steps}
        found[number] = names.get(algorithm, names["engine"])
    return found
