"""The output of `deepytorch bench comm`: rows in the columns of nccl-tests, findings in sentences, picture, choices."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from deepytorch.bench.comm import Described, describe_ranks, run_comm, run_in_place
from deepytorch.bench.comm_options import COMPRESS, CommOptions
from deepytorch.bench.comm_schema import CommCell, CommResult, CommSummary
from deepytorch.bench.plots import draw_curve, new_figure, save_figure
from deepytorch.comm.algorithms.base import KINDS, Choice, dtype_name
from deepytorch.comm.algorithms.select import Explanation, explain
from deepytorch.comm.topology.cost import Links
from deepytorch.errors import ParityError

# Bytes that a rank of one host has to read and write for each byte of the op's size: each once, in and out.
# reduce_scatter reads a share from every rank, in all the size, and writes a share.
_MOVED = {"all_reduce": 2.0, "all_gather": 2.0, "broadcast": 2.0}


def run_and_show(options: CommOptions, console: Console, *, in_place: bool) -> CommResult | None:
    """Measure, and print the rows on `console` as they come; return the result.

    On torchrun's ranks other than 0 the result is None.
    """
    shown: set[str] = set()

    def show(lines: Sequence[str]) -> None:
        console.print("\n".join(lines), highlight=False, markup=False, soft_wrap=True)

    def show_cells(cells: list[CommCell]) -> None:
        op = cells[0].op
        if op not in shown:
            show([*([""] if shown else []), *table_head(op, options)])
            shown.add(op)
        show(table_rows(cells, options))

    if in_place:
        result = run_in_place(options, show_cells)
    else:
        with console.status("Starting the ranks") as status:
            result = run_comm(options, show_cells, status.update)
    if result is not None:
        show(["", *summary_lines(result)])
    return result


def explain_and_show(options: CommOptions, console: Console, *, in_place: bool) -> None:
    """Show the choices and predictions of the deepytorch backend, from the links that the ranks measure."""
    with contextlib.nullcontext() if in_place else console.status("Starting the ranks") as status:
        described = describe_ranks(options, status.update if status else lambda text: None, in_place=in_place)
    if not in_place or os.environ["RANK"] == "0":
        console.print("\n".join(explain_lines(options, described)), highlight=False, markup=False, soft_wrap=True)


def refuse_wrong(result: CommResult) -> None:
    """Raise `ParityError` when an element was wrong: the times of such a collective are meaningless."""
    wrong = [cell for cell in result.cells if cell.wrong]
    if wrong:
        first = wrong[0]
        raise ParityError(
            f"{first.wrong} elements of {first.op} with {first.bytes} bytes in {first.arm} are wrong, expected none"
            + (f"; {len(wrong) - 1} other cells have wrong elements too. " if len(wrong) > 1 else ". ")
            + "The times of these cells mean nothing."
        )


def table_head(op: str, options: CommOptions) -> list[str]:
    """Return the lines above the rows of `op`: its name and settings, the columns of nccl-tests, their units."""
    width = _arm_width(options)
    shape = f"{options.ranks} ranks" if options.hosts == 1 else f"{options.hosts} hosts of {options.ranks} ranks"
    columns = _line(
        width,
        *("arm", "algorithm", "size", "count", "type", "redop", "root"),
        *("time", "algbw", "busbw", "#wrong", "gloo's time"),
    )
    units = _line(width, *("", "", "(B)", "(elements)", "", "", ""), *("(us)", "(GB/s)", "(GB/s)", "", "vs gloo"))
    return [f"{op}, {shape}", columns, units]


def table_rows(cells: Sequence[CommCell], options: CommOptions) -> list[str]:
    """Return a line for each of the cells, which are those of all arms for one op and size."""
    gloo_us = next((cell.time_us for cell in cells if cell.backend == "gloo"), None)
    lines = []
    for cell in cells:
        itemsize = getattr(torch, cell.dtype).itemsize
        share = cell.ranks if cell.op in ("all_gather", "reduce_scatter") else 1
        lines.append(
            _line(
                _arm_width(options),
                *(cell.arm, cell.algorithm, str(cell.bytes), str(cell.bytes // itemsize // share), cell.dtype),
                *(cell.redop, "0" if cell.op == "broadcast" else "-1"),
                *(f"{cell.time_us:.1f}", f"{cell.algbw:.4f}", f"{cell.busbw:.4f}", str(cell.wrong)),
                f"{gloo_us / cell.time_us:.2f}x" if gloo_us is not None else "",
            )
        )
    return lines


def summary_lines(result: CommResult) -> list[str]:
    """Return the findings of the whole run, in sentences."""
    summary, wrong = result.summary, sum(cell.wrong for cell in result.cells)
    lines = [
        f"Copy bandwidth, all ranks at a time, read and written: {summary.copy_gb_per_s_rank:.1f} GB/s a rank, "
        f"{summary.copy_gb_per_s_total:.1f} GB/s in all.",
        *(
            [f"The cost model's predictions are off by {summary.median_prediction_error:.0%} (median over the cells)."]
            if summary.median_prediction_error is not None
            else []
        ),
        f"Wrong elements: {wrong}." if wrong else "Every element was right.",
    ]
    best: dict[str, float] = {}
    for ratio in summary.ratios:
        if ratio.copy_efficiency is not None:
            best[ratio.arm] = ratio.copy_efficiency  # sizes ascend: the largest stays
    if best:
        shown = ", ".join(f"{arm} {efficiency:.2f}" for arm, efficiency in best.items())
        lines.append(f"all_reduce of the largest size, bytes that must move / copy bandwidth: {shown}.")
    return lines


def _arm_width(options: CommOptions) -> int:
    return max(len(arm.name) for arm in options.arms())


def _line(arm_width: int, *columns: str) -> str:
    arm, algorithm, *figures = columns
    widths = (11, 11, 9, 6, 5, 10, 8, 8, 7, 12)
    shown = [f"{figure:>{width}}" for figure, width in zip(figures, widths, strict=True)]
    return " ".join([f"{arm:<{arm_width}} {algorithm:<14}", *shown]).rstrip()


def plot_result(path: Path, result: CommResult) -> None:
    """Write a PNG: algorithm bandwidth over size, a panel per op, a line per arm, and the hardware's limit.

    Raises `ConfigError` when the file cannot be written or matplotlib is not installed.
    """
    first = result.cells[0]
    shape = f"{first.ranks} ranks" if first.hosts == 1 else f"{first.ranks} ranks on {first.hosts} hosts"
    ops, arms = (list(dict.fromkeys(getattr(cell, name) for cell in result.cells)) for name in ("op", "arm"))
    figure = new_figure(max(6.5, 4.8 * len(ops)), 4.4)
    for axes, op in zip(figure.subplots(1, len(ops), squeeze=False)[0], ops, strict=True):
        for arm in arms:
            cells = [cell for cell in result.cells if cell.op == op and cell.arm == arm]
            draw_curve(axes, arm, [cell.bytes for cell in cells], [cell.algbw for cell in cells])
        limit_gb_per_s, limit_name = limit(op, first.ranks, first.hosts, result.summary)
        if limit_gb_per_s is not None:
            axes.axhline(limit_gb_per_s, label=limit_name, color="#555555", linestyle="--", linewidth=1.0)
            axes.legend()
        axes.set_xscale("log", base=2)
        axes.set(yscale="log", xlabel="bytes", ylabel="algorithm bandwidth, GB/s", title=op)
        axes.xaxis.set_major_formatter(lambda size, _: _bytes(size))
    figure.suptitle(f"{shape}, {first.dtype}, {result.summary.machine}")
    save_figure(figure, path, "Give another --plot path.")


def _bytes(size: float) -> str:
    for unit, factor in (("G", 1 << 30), ("M", 1 << 20), ("K", 1 << 10)):
        if size >= factor:
            return f"{size / factor:g}{unit}"
    return f"{size:g}"


def limit(op: str, ranks: int, hosts: int, summary: CommSummary) -> tuple[float | None, str]:
    """Return the algorithm bandwidth in GB/s that `op` cannot exceed for large uncompressed buffers, and its name.

    On one host, the bytes that a rank has to read and write are limited by the copy bandwidth. Between hosts with
    shaped links, the bytes that have to enter or leave a host are limited by the link's rate. None if the link's rate
    is not known.
    """
    if hosts == 1:
        return summary.copy_gb_per_s_rank / _MOVED.get(op, 1 + 1 / ranks), "copy bandwidth of memory"
    if summary.link_bit_per_s is None:
        return None, ""
    crossing = {"all_reduce": 2 * (hosts - 1) / hosts, "broadcast": 1.0}.get(op, (hosts - 1) / hosts)
    return summary.link_bit_per_s / 8e9 / crossing, "link between hosts"


def explain_lines(options: CommOptions, described: Described) -> list[str]:
    """Return, for each op, a table of the predicted times of every algorithm over size, with the choices.

    Nominal speeds replace links that were not measured, and `select`'s choice that of a backend that reports none.
    """
    topology, lines = described.topology, []
    where = "1 host" if topology.num_hosts == 1 else f"{topology.num_hosts} hosts"
    for op in options.ops:
        if op not in KINDS:
            lines += [f"{op}: through shared memory on one host, else by gloo or nccl; nothing to choose", ""]
            continue
        for compress in options.compress:
            explained = explain(
                topology,
                described.links or Links(),
                kind=op,
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
            lines += [*_predictions(explained, chosen), *_reasons(explained), ""]
    source = "links as measured, now or before" if described.links else "nominal speeds: the native code is not built"
    return [*lines, f"Times in us, predicted from {source}."]


def _predictions(explained: Sequence[Explanation], chosen: Sequence[Choice]) -> list[str]:
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
