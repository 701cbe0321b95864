"""The simulator's input from what was measured on ranks, and predictions for other numbers of ranks.

The compute of a step is measured without communication, the links by the process group when it is made. Two things that
neither tells are cores that ranks share (`shared_cores`), and what collectives lose to compute, which is calibrated by
a measured step of a smaller job (`contention_of`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

from deepytorch.bench.model_profile import BackwardPiece, ModelProfile
from deepytorch.bench.simulate import ALONE, AUTO, Contention, Step, simulate
from deepytorch.comm.algorithms.base import DeviceKind
from deepytorch.comm.topology.cost import Link, Links, hop_link
from deepytorch.comm.topology.topology import Topology
from deepytorch.errors import DataError

FIRST_BUCKET_BYTES = 1 << 20  # stock DDP's, so that the first all-reduce starts early
BUCKET_CAP_BYTES = 25 << 20  # stock DDP's
_OVER_NETWORK = "network/"  # and the number of connections: names in `Links.times_us`
_LOSSES = (-1.0, 32.0)  # of `_contention`: from half of the time to 32 times
_HALVINGS = 24


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


def median_of(computes: Sequence[Compute]) -> Compute:
    """Return the medians of what was measured on several ranks, or in several steps, of one model.

    Gradients are ready at the same part of the backward pass as in the median of their order. Raises `DataError` if
    the numbers of gradients differ, or there is nothing.
    """
    if len({len(each.ready) for each in computes}) != 1:
        raise DataError(f"{len(computes)} measured steps have not as many gradients each; expected steps of one model.")
    backward_s = median(each.backward_s for each in computes)
    gradients = zip(*(sorted(each.ready) for each in computes), strict=True)
    parts = [[at_s / each.backward_s for each, (at_s, _) in zip(computes, found, strict=True)] for found in gradients]
    sizes = [num_bytes for _, num_bytes in sorted(computes[0].ready)]
    return Compute(
        forward_s=median(each.forward_s for each in computes),
        backward_s=backward_s,
        optimizer_s=median(each.optimizer_s for each in computes),
        ready=[(backward_s * median(part), size) for part, size in zip(parts, sizes, strict=True)],
    )


def profile_of(
    name: str,
    compute: Compute,
    *,
    bucket_cap_bytes: int = BUCKET_CAP_BYTES,
    first_bucket_bytes: int = FIRST_BUCKET_BYTES,
    dtype: str = "fp32",
    device: DeviceKind = "cpu",
    note: str = "",
) -> ModelProfile:
    """Return the simulator's input for a measured step, each bucket of gradients as one piece of the backward pass.

    Gradients fill buckets whole and in the order in which they become ready, as DDP has them from its second step on: a
    bucket is full when it has its cap or more. Gradients that come after the end of the backward pass count as ready
    then. Raises `DataError` if there are none.
    """
    if not compute.ready:
        raise DataError(f"{name} has no gradient that became ready, expected one or more.")
    pieces: list[BackwardPiece] = []
    begin_s, now_s, waiting, limit = 0.0, 0.0, 0, first_bucket_bytes
    for at_s, num_bytes in sorted(compute.ready):
        now_s, waiting = min(at_s, compute.backward_s), waiting + num_bytes
        if waiting >= limit:
            pieces.append(BackwardPiece(f"bucket {len(pieces)}", (now_s - begin_s) * 1e6, waiting))
            begin_s, waiting, limit = now_s, 0, bucket_cap_bytes
    if waiting:
        pieces.append(BackwardPiece(f"bucket {len(pieces)}", (now_s - begin_s) * 1e6, waiting))
        begin_s = now_s
    pieces.append(BackwardPiece("rest", (compute.backward_s - begin_s) * 1e6, 0))
    return ModelProfile(
        name=name,
        forward_us=compute.forward_s * 1e6,
        backward=tuple(pieces),
        bucket_cap_bytes=bucket_cap_bytes,
        optimizer_us=compute.optimizer_s * 1e6,
        dtype=dtype,
        device=device,
        note=note,
        pieces_are_buckets=True,
    )


def shared_cores(measured_ranks: int, cores: int) -> Callable[[int], float]:
    """Return how many times as long as measured a rank of a lab computes, by the number of ranks.

    All ranks of a lab, of one thread each, share the cores of one machine: K of them on C cores take K / C times as
    long as with a core of their own if K > C. `measured_ranks` computed at the same time when compute was measured.
    """
    return lambda ranks: max(1.0, ranks / cores) / max(1.0, measured_ranks / cores)


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
    compute_scale: Callable[[int], float] = lambda ranks: 1.0,
    contention: Contention = ALONE,
) -> Mapping[int, Step]:
    """Return the step on each number of ranks; `step_us` and `efficiency` are what is mostly looked at.

    Args:
        profile: The compute of a rank.
        topology: Of the group that measured the links; scaled to other numbers of ranks by whole hosts.
        links: Of that group; those of `links_of_large` are used.
        ranks: The numbers of ranks.
        algorithm: `simulate.AUTO` for deepytorch's choices, "engine" for the backend as stock DDP uses it.
        compute_scale: How many times as long as in the profile a rank computes: see `shared_cores`. Each machine with
            cores or GPUs of its own has 1. The efficiency compares the step with that compute, without communication.
        contention: See `contention_of`.
    """
    found, links = {}, links_of_large(links, topology)
    for number in ranks:
        slowed = profile.slowed(compute_scale(number))
        steps = simulate(slowed, topology, links, (number,), contention=contention).steps
        # an algorithm that cannot do any bucket here, such as those for several hosts on one, leaves it to the engine
        names = {step.algorithm: step for step in steps}
        found[number] = names.get(algorithm, names["engine"])
    return found


def contention_of(
    profile: ModelProfile, topology: Topology, links: Links, measured_s: float, algorithm: str = AUTO
) -> Contention:
    """Return what collectives lose to compute if the step takes `measured_s` on the ranks of this topology.

    Links are timed while nothing computes. In a step, the ranks' cores (or GPUs) compute at the same time, and reduce,
    copy and wake up later. A step that takes longer than predicted has lost overlap; one that takes longer than compute
    and all collectives one after the other, speed as well. The result holds for sizes that load the cores alike: of a
    lab, for more ranks than cores if it was measured on more. A size that is to be predicted must not be measured here.
    """
    ranks = topology.num_ranks

    def step_us(loss: float) -> float:
        contention = _contention(loss)
        return predicted(profile, topology, links, (ranks,), algorithm, contention=contention)[ranks].step_us

    least, most = _LOSSES
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        least, most = (middle, most) if step_us(middle) < measured_s * 1e6 else (least, middle)
    return _contention(least)


def _contention(loss: float) -> Contention:
    """Return the contention of a number: up to 0 collectives gain speed, up to 1 they lose overlap, then speed."""
    return Contention(overlap=min(1.0, max(0.0, 1.0 - loss)), stretch=1.0 + loss / 2 if loss < 0 else max(1.0, loss))
