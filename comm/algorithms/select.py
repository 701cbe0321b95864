"""Selection of the algorithm for an operation: the one that the measured links predict to be fastest.

The selection is pure: the same operation, topology and links give the same choice on every rank. All ranks must be
given equal links.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from deepytorch.comm.algorithms.base import (
    KINDS,
    Choice,
    Collective,
    Compression,
    DeviceKind,
    Operation,
    OperationKind,
    can_compress,
    share_of_all_reduce,
)
from deepytorch.comm.algorithms.cpu_reduce import CpuReduce
from deepytorch.comm.algorithms.hierarchical import Hierarchical
from deepytorch.comm.algorithms.nvlink import CopyEngines, Multimem, OneShot, TwoShot
from deepytorch.comm.algorithms.shared_memory import SharedMemory
from deepytorch.comm.algorithms.streams import Streams
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.nominal import complete
from deepytorch.comm.topology.topology import Topology


class Engine(Collective):
    """The unmodified inner backend (Gloo, NCCL): always possible, and the baseline that every algorithm has to beat.

    The engine itself raises an error for what it cannot do.
    """

    name = "engine"

    def cost_us(self, operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
        """Return the predicted time, from the measured all-reduce."""
        latency, rate = share_of_all_reduce(operation.kind, topology.num_ranks)
        return links.link("engine").scaled(latency=latency, rate=rate).time_us(operation.num_bytes)


ENGINE = Engine()
COLLECTIVES: tuple[Collective, ...] = (
    ENGINE, SharedMemory(), Hierarchical(), Streams(), CpuReduce(), OneShot(), TwoShot(),
    CopyEngines(), Multimem(),
)  # fmt: skip

# The engine stays unless it takes this many times the best prediction: predictions err, and the engine is well tested.
# Between hosts the wire decides, whose predictions err less: 25 MB over 200 Mbit took 1.14 times as long, of 1.11 said.
ENGINE_MARGIN, ENGINE_MARGIN_BETWEEN_HOSTS = 1.10, 1.05
# Compression must pay too: even if allowed, it is used only where exact values take this many times as long.
COMPRESS_MARGIN = 1.05
# The plainest settings of an algorithm stay up to this factor: fewer ranges in a table, and none from rounding alone.
PLAIN_MARGIN = 1.01

TABLE_SIZES = tuple(1 << power for power in range(10, 31))  # 1 KB .. 1 GB


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction for one algorithm: its best settings and their time, or the reason why it cannot run."""

    algorithm: str
    choice: Choice | None = None
    time_us: float | None = None
    reason: str | None = None


@dataclass(frozen=True, slots=True)
class Explanation:
    """The explanation of a choice: a prediction for each algorithm, and the choice made of them."""

    operation: Operation
    predictions: tuple[Prediction, ...]
    choice: Choice


@dataclass(frozen=True, slots=True)
class Range:
    """The sizes that one choice holds for: from `from_bytes` on, up to where the next range begins."""

    from_bytes: int
    choice: Choice


def select(operation: Operation, topology: Topology, links: Links, allow_compress: Compression | None = None) -> Choice:
    """Return the algorithm and settings for an operation. Missing links are completed by nominal values.

    The engine stays unless its time is over 1.10 times the best prediction, 1.05 times between hosts. `allow_compress`:
    the type that values may be cast to between hosts, which happens only if it is over 1.05 times as fast.
    """
    return _explained(operation, topology, complete(links, topology, operation.device), allow_compress).choice


def explain(
    topology: Topology,
    links: Links,
    *,
    kind: OperationKind = "all_reduce",
    dtype: str = "fp32",
    reduce_op: str = "sum",
    device: DeviceKind = "cpu",
    allow_compress: Compression | None = None,
    sizes: Sequence[int] = TABLE_SIZES,
) -> tuple[Explanation, ...]:
    """Return, for each size, every algorithm's prediction or reason, and the choice, for people to read."""
    complete_links = complete(links, topology, device)
    operations = [Operation(kind, size, dtype, reduce_op, device) for size in sizes]
    return tuple(_explained(each, topology, complete_links, allow_compress) for each in operations)


def table(
    topology: Topology, links: Links, *, device: DeviceKind = "cpu", allow_compress: Compression | None = None
) -> Mapping[OperationKind, tuple[Range, ...]]:
    """Return, for each kind of operation, the choices by size, for sums of float32."""
    found: dict[OperationKind, tuple[Range, ...]] = {}
    for kind in KINDS:
        rows = explain(topology, links, kind=kind, device=device, allow_compress=allow_compress)
        found[kind] = ranges_of((row.operation.num_bytes, row.choice) for row in rows)
    return found


def ranges_of(choices: Iterable[tuple[int, Choice]]) -> tuple[Range, ...]:
    """Return the ranges of choices by size; the sizes ascend.

    A choice holds from its size on, the first one from 0 and the last one without end.
    """
    ranges: list[Range] = []
    for size, choice in choices:
        if not ranges or ranges[-1].choice != choice:
            ranges.append(Range(size if ranges else 0, choice))
    return tuple(ranges)


def predict_us(operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
    """Return the predicted time of an operation with given settings. Missing links are completed by nominal values."""
    return collective(choice.algorithm).cost_us(
        operation, topology, complete(links, topology, operation.device), choice
    )


def collective(name: str) -> Collective:
    """Return the algorithm of that name, one of those in `COLLECTIVES`."""
    return next(found for found in COLLECTIVES if found.name == name)


def _explained(
    operation: Operation, topology: Topology, links: Links, allow_compress: Compression | None
) -> Explanation:
    predictions = tuple(_prediction(found, operation, topology, links, allow_compress) for found in COLLECTIVES)
    return Explanation(operation, predictions, _chosen(predictions, _margin(topology)))


def _prediction(
    algorithm: Collective,
    operation: Operation,
    topology: Topology,
    links: Links,
    allow_compress: Compression | None,
) -> Prediction:
    reason = algorithm.unsupported(operation, topology)
    if reason is not None:
        return Prediction(algorithm.name, reason=reason)
    exact = list(algorithm.choices(operation, topology, links))
    if not exact:
        return Prediction(algorithm.name, reason="is too small to be cut into chunks")
    best_us, best = _fastest(algorithm, operation, topology, links, exact)
    if allow_compress is not None and algorithm.compresses and can_compress(operation, allow_compress):
        rounded = [replace(choice, compress=allow_compress) for choice in exact]
        rounded_us, choice = _fastest(algorithm, operation, topology, links, rounded)
        if rounded_us * COMPRESS_MARGIN < best_us:
            best_us, best = rounded_us, choice
    return Prediction(algorithm.name, best, best_us)


def _fastest(
    algorithm: Collective, operation: Operation, topology: Topology, links: Links, choices: Sequence[Choice]
) -> tuple[float, Choice]:
    times_us = [algorithm.cost_us(operation, topology, links, choice) for choice in choices]
    least_us = min(times_us)
    return next(found for found in zip(times_us, choices, strict=True) if found[0] <= PLAIN_MARGIN * least_us)


def _margin(topology: Topology) -> float:
    return ENGINE_MARGIN if topology.num_hosts == 1 else ENGINE_MARGIN_BETWEEN_HOSTS


def _chosen(predictions: Sequence[Prediction], margin: float) -> Choice:
    timed = [(found.time_us, found.choice) for found in predictions if found.time_us is not None and found.choice]
    engine_us, engine = timed[0]
    exact = [entry for entry in timed if entry[1].compress is None]
    best_us, best = min(exact, key=lambda entry: entry[0])
    rounded_us, rounded = min(timed, key=lambda entry: entry[0])
    if rounded.compress is not None and rounded_us * COMPRESS_MARGIN < best_us:
        best_us, best = rounded_us, rounded
    return best if best_us * margin < engine_us else engine
