"""`deepytorch bench comm --explain`: the choice of the deepytorch backend at each size, and its predictions."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from deepytorch.bench.comm import Described
from deepytorch.bench.comm_options import COMPRESS, CommOptions
from deepytorch.comm.algorithms.base import KINDS, Choice, OperationKind, dtype_name
from deepytorch.comm.algorithms.select import Explanation, explain
from deepytorch.comm.topology.cost import Links

_KINDS: dict[str, OperationKind] = {kind: kind for kind in KINDS}


def explain_lines(options: CommOptions, described: Described) -> list[str]:
    """Return, for each op, a table of the predicted times of every algorithm over size, with the choices.

    Nominal speeds replace links that were not measured, and `select`'s choice that of a backend that reports none.
    """
    topology, lines = described.topology, []
    where = "1 host" if topology.num_hosts == 1 else f"{topology.num_hosts} hosts"
    for op in options.ops:
        if op not in _KINDS:
            lines += [f"{op}: through shared memory on one host, else by gloo or nccl; nothing to choose", ""]
            continue
        for compress in options.compress:
            explained = explain(
                topology,
                described.links or Links(),
                kind=_KINDS[op],
                dtype=dtype_name(getattr(torch, options.dtype)),
                reduce_op=options.redop,
                allow_compress=COMPRESS[compress],
                sizes=options.sizes_bytes,
            )
            chosen = [row.choice for row in explained]
            if described.chosen is not None:
                chosen = list(described.chosen[compress][op])
            sent = "" if compress == "none" else f", {compress} allowed between hosts"
            lines += [f"{op}, {topology.num_ranks} ranks on {where}, {options.dtype}{sent}"]
            lines += [*_table(explained, chosen), *_reasons(explained), ""]
    source = "links as measured, now or before" if described.links else "nominal speeds: the native code is not built"
    return [*lines, f"Times in us, predicted from {source}."]


def _table(explained: Sequence[Explanation], chosen: Sequence[Choice]) -> list[str]:
    able = [
        algorithm
        for at, algorithm in enumerate(found.algorithm for found in explained[0].predictions)
        if any(row.predictions[at].time_us is not None for row in explained)
    ]
    widths = [max(12, len(algorithm)) for algorithm in able]
    heading = [f"{name:>{width}}" for name, width in zip(able, widths, strict=True)]
    lines = [" ".join([f"{'size (B)':>12}", *heading, "  chosen"])]
    for row, choice in zip(explained, chosen, strict=True):
        times = {found.algorithm: found.time_us for found in row.predictions}
        shown = [f"{_time(times[name]):>{width}}" for name, width in zip(able, widths, strict=True)]
        num_bytes = row.operation.num_bytes
        lines.append(" ".join([f"{num_bytes:>12}", *shown, f"  {_settings(choice, num_bytes)}"]))
    return lines


def _reasons(explained: Sequence[Explanation]) -> list[str]:
    """Return a line for each algorithm that can do none of the sizes, with its reason at the largest."""
    return [
        f"  {found.algorithm}: {found.reason}"
        for at, found in enumerate(explained[-1].predictions)
        if all(row.predictions[at].time_us is None for row in explained)
    ]


def _time(time_us: float | None) -> str:
    return "-" if time_us is None else f"{time_us:,.0f}"


def _settings(choice: Choice, num_bytes: int) -> str:
    chunks = choice.num_chunks(num_bytes)
    return ", ".join(
        [
            choice.algorithm,
            *([f"{chunks} chunks"] if chunks > 1 else []),
            *([f"{choice.num_streams} streams"] if choice.num_streams > 1 else []),
            *([choice.compress] if choice.compress else []),
        ]
    )
