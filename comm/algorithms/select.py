"""Selection of the algorithm for an operation: the one that the measured links predict to be fastest.

The selection is pure: the same operation, topology and links give the same choice on every rank. All ranks must be
given equal links.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Mapping, Sequence
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
)
from deepytorch.comm.algorithms.cpu_reduce import CpuReduce
from deepytorch.comm.algorithms.hierarchical import Hierarchical
from deepytorch.comm.algorithms.nvlink import CopyEngines, Multimem, OneShot, TwoShot
from deepytorch.comm.algorithms.shared_memory import SharedMemory
from deepytorch.comm.algorithms.stock_engine import Engine
from deepytorch.comm.algorithms.streams import Streams
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.nominal import complete
from deepytorch.comm.topology.topology import Topology

ENGINE = Engine()
COLLECTIVES: tuple[Collective, ...] = (
    ENGINE, SharedMemory(), Hierarchical(), Streams(), CpuReduce(), OneShot(), TwoShot(),
    CopyEngines(), Multimem(),
)  # fmt: skip

# The engine stays unless it takes this many times the best prediction: predictions err, and the engine is well tested.
ENGINE_MARGIN = 1.10
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

    The engine stays unless its time is over 1.10 times the best prediction. `allow_compress`: the type that values may
    be cast to between hosts, which happens only if it is over 1.05 times as fast.
    """
    complete_links = complete(links, topology, operation.device)
    return _chosen(_predictions(operation, topology, complete_links, allow_compress))


def table(
    topology: Topology,
    links: Links,
    *,
    dtype: str = "fp32",
    reduce_op: str = "sum",
    device: DeviceKind = "cpu",
    allow_compress: Compression | None = None,
    sizes: Sequence[int] = TABLE_SIZES,
) -> Mapping[OperationKind, tuple[Range, ...]]:
    """Return, for each kind of operation, the choices by size, as `look_up` reads them.

    `sizes` ascend. A choice holds from its size on, the first one from 0 and the last one without end.
    """
    complete_links = complete(links, topology, device)
    found: dict[OperationKind, tuple[Range, ...]] = {}
    for kind in KINDS:
        ranges: list[Range] = []
        for size in sizes:
            operation = Operation(kind, size, dtype, reduce_op, device)
            choice = _chosen(_predictions(operation, topology, complete_links, allow_compress))
            if not ranges or ranges[-1].choice != choice:
                ranges.append(Range(size if ranges else 0, choice))
        found[kind] = tuple(ranges)
    return found


def look_up(ranges: Sequence[Range], num_bytes: int) -> Choice:
    """Return the choice for `num_bytes` in a table's ranges of one kind."""
    starts = [entry.from_bytes for entry in ranges]
    return ranges[bisect_right(starts, num_bytes) - 1].choice


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
    rows = []
    for size in sizes:
        operation = Operation(kind, size, dtype, reduce_op, device)
        predictions = _predictions(operation, topology, complete_links, allow_compress)
        rows.append(Explanation(operation, predictions, _chosen(predictions)))
    return tuple(rows)


def predict_us(operation: Operation, topology: Topology, links: Links, choice: Choice) -> float:
    """Return the predicted time of an operation with given settings. Missing links are completed by nominal values."""
    return collective(choice.algorithm).cost_us(
        operation, topology, complete(links, topology, operation.device), choice
    )


def collective(name: str) -> Collective:
    """Return the algorithm of that name, one of those in `COLLECTIVES`."""
    return next(found for found in COLLECTIVES if found.name == name)


def _predictions(
    operation: Operation, topology: Topology, links: Links, allow_compress: Compression | None
) -> tuple[Prediction, ...]:
    return tuple(_prediction(found, operation, topology, links, allow_compress) for found in COLLECTIVES)


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


def _chosen(predictions: Sequence[Prediction]) -> Choice:
    timed = [(found.time_us, found.choice) for found in predictions if found.time_us is not None and found.choice]
    engine_us, engine = timed[0]
    exact = [entry for entry in timed if entry[1].compress is None]
    best_us, best = min(exact, key=lambda entry: entry[0])
    rounded_us, rounded = min(timed, key=lambda entry: entry[0])
    if rounded.compress is not None and rounded_us * COMPRESS_MARGIN < best_us:
        best_us, best = rounded_us, rounded
    return best if best_us * ENGINE_MARGIN < engine_us else engine
