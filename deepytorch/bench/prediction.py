"""Predictions compared with measurements: the accuracy of the cost model, and so of the simulator."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from deepytorch.comm.algorithms.base import KINDS, Compression, Operation, OperationKind, dtype_name
from deepytorch.comm.algorithms.select import COLLECTIVES, ENGINE, explain
from deepytorch.comm.topology.checked_json import as_count, as_number, as_text
from deepytorch.comm.topology.cost import Links
from deepytorch.comm.topology.nominal import complete, scaled_links
from deepytorch.comm.topology.topology import Topology, regular_topology
from deepytorch.errors import DataError


@dataclass(frozen=True, slots=True)
class PredictionError:
    """One measured cell and its prediction. `relative_error`: |predicted - measured| / measured."""

    operation: Operation
    algorithm: str
    num_ranks: int
    num_hosts: int
    measured_us: float
    predicted_us: float

    @property
    def relative_error(self) -> float:
        """Return the error of the prediction, as a part of the measured time."""
        return abs(self.predicted_us - self.measured_us) / self.measured_us


def prediction_errors(
    cells: Iterable[Mapping[str, Any]], topology: Topology, links: Links
) -> tuple[PredictionError, ...]:
    """Predict each measured cell: `{op, algorithm, bytes, ranks, hosts, time_us}`; the ranks are those of all hosts.

    `dtype`, `redop` and `compress` are used if a cell has them. An algorithm is predicted with its best settings; a
    name that is none of deepytorch's algorithms stands for the inner backend's own. `links` are those of `topology`,
    and scaled for cells of other numbers of ranks or hosts. Raises `DataError` for a cell that is impossible, or that
    the algorithm cannot do.
    """
    return tuple(_error(cell, f"cell {at}", topology, links) for at, cell in enumerate(cells))


def median_error(errors: Sequence[PredictionError]) -> float:
    """Return the median of the relative errors. Raises `DataError` for no cell."""
    if not errors:
        raise DataError("There is no measured cell, expected one or more to compare predictions with.")
    return median(error.relative_error for error in errors)


def _error(cell: Mapping[str, Any], where: str, measured_on: Topology, links: Links) -> PredictionError:
    missing = sorted({"op", "algorithm", "bytes", "ranks", "hosts", "time_us"} - set(cell))
    if missing:
        raise DataError(f"{where} lacks {missing}, expected op, algorithm, bytes, ranks, hosts and time_us.")
    ranks, hosts = (as_count(cell[key], f"{where}, {key}", 1) for key in ("ranks", "hosts"))
    if ranks % hosts:
        raise DataError(f"{where} has {ranks} ranks on {hosts} hosts, expected as many on each.")
    topology = regular_topology(measured_on.hosts, hosts, ranks // hosts)
    dtype = dtype_name(as_text(cell.get("dtype", "fp32"), f"{where}, dtype"))
    operation = Operation(_kind(cell["op"], where), as_count(cell["bytes"], f"{where}, bytes", 1), dtype, _redop(cell))
    known = complete(scaled_links(links, measured_on, topology, operation.device), topology, operation.device)
    name = as_text(cell["algorithm"], f"{where}, algorithm")
    algorithm = name if name in {found.name for found in COLLECTIVES} else ENGINE.name
    row = explain(
        topology,
        known,
        kind=operation.kind,
        dtype=operation.dtype,
        reduce_op=operation.reduce_op,
        allow_compress=_compression(cell.get("compress")),
        sizes=(operation.num_bytes,),
    )[0]
    found = next(prediction for prediction in row.predictions if prediction.algorithm == algorithm)
    if found.time_us is None:
        raise DataError(f"{where} was measured by {algorithm}, which {found.reason}.")
    measured_us = as_number(cell["time_us"], f"{where}, time_us", above_zero=True)
    return PredictionError(operation, algorithm, ranks, hosts, measured_us, found.time_us)


def _kind(value: Any, where: str) -> OperationKind:
    as_text(value, f"{where}, op", KINDS)
    return next(kind for kind in KINDS if kind == value)


def _redop(cell: Mapping[str, Any]) -> str:
    found = cell.get("redop", "sum")
    return found if isinstance(found, str) and found != "none" else "sum"


def _compression(value: Any) -> Compression | None:
    return "bf16" if value in ("bf16", "bfloat16") else "fp16" if value in ("fp16", "float16") else None
