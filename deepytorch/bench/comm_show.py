"""The output of `deepytorch bench comm`: rows in the columns of nccl-tests, tables of times and choices, bandwidth."""

from __future__ import annotations

import re
import statistics
from collections.abc import Sequence
from itertools import groupby

from deepytorch.bench.figures import all_ranks, place_in_words
from deepytorch.bench.jobs import OPS
from deepytorch.bench.plots import Plot, Points
from deepytorch.bench.results import Results, Row
from deepytorch.bench.shaping import parse_rate
from deepytorch.bench.table import Table

# Bytes that a rank of one host has to read and write for each byte of the op's size: each once, in and out.
# reduce_scatter reads a share from every rank, in all the size, and writes a share.
_MOVED = {"all_reduce": 2.0, "all_gather": 2.0, "broadcast": 2.0}


def head_of(rows: Sequence[Row]) -> list[str]:
    """Return the op and its ranks, the columns of nccl-tests, and their units."""
    columns = ("size", "count", "type", "redop", "root", "time", "algbw", "busbw", "#wrong", "gloo's time")
    units = ("(B)", "(elements)", "", "", "", "(us)", "(GB/s)", "(GB/s)", "", "vs gloo")
    width = _width(rows)
    return [_what(rows[0]), _line(width, "setup", "algorithm", *columns), _line(width, "", "", *units)]


def lines_of(rows: Sequence[Row]) -> list[str]:
    """Return the rows of all setups for one op and size in these columns."""
    width = _width(rows)
    return [f"{row.key['setup']:<{width}} {row.failed}" if row.failed else _line(width, *_shown(row)) for row in rows]


def itemsize_of(dtype: str) -> int:
    """Return the bytes of an element."""
    return int(re.sub(r"\D", "", dtype)) // 8


def limit(op: str, ranks: int, hosts: int, rate: str | None, copy_gb_per_s: float) -> tuple[float | None, str]:
    """Return the algorithm bandwidth in GB/s that `op` cannot exceed for large uncompressed buffers, and its name.

    On one host, the bytes that a rank of all `ranks` has to read and write are limited by the copy bandwidth. Between
    hosts with shaped links, the bytes that have to enter or leave a host are limited by the link's rate. None if the
    link's rate is not known.
    """
    if hosts == 1:
        return copy_gb_per_s / _MOVED.get(op, 1 + 1 / ranks), "copy bandwidth of memory"
    if rate is None:
        return None, ""
    return parse_rate(rate) / 8e9 / bus_factor(op, hosts), "link between hosts"


def bus_factor(op: str, ranks: int) -> float:
    """Return bus bandwidth / algorithm bandwidth: the share of a buffer that one rank's link has to carry.

    The definition is that of nccl-tests, so that figures of different numbers of ranks compare with the hardware's.
    """
    if op in ("broadcast", "barrier"):
        return float(op == "broadcast")
    return (2 if op == "all_reduce" else 1) * (ranks - 1) / ranks


def by_op(results: Results) -> list[list[Row]]:
    """Return the rows of each op."""

    def op(row: Row) -> int:
        return OPS.index(str(row.key["op"]))

    return [list(rows) for _, rows in groupby(sorted(results.rows, key=op), key=op)]


def are_choices(rows: Sequence[Row]) -> bool:
    """Return whether rows are of `--explain`."""
    return any("chosen" in row.texts for row in rows)


def _what(row: Row) -> str:
    return f"{row.key['op']}, {place_in_words(row.key)}"


def _width(rows: Sequence[Row]) -> int:
    return max(len(str(row.key["setup"])) for row in rows)


def _line(width: int, setup: str, algorithm: str, *figures: str) -> str:
    widths = (11, 11, 9, 6, 5, 10, 8, 8, 7, 12)
    shown = [f"{figure:>{each}}" for figure, each in zip(figures, widths, strict=True)]
    return " ".join([f"{setup:<{width}} {algorithm:<14}", *shown]).rstrip()


def _shown(row: Row) -> tuple[str, ...]:
    key, figures = row.key, row.figures
    share = all_ranks(row) if key["op"] in ("all_gather", "reduce_scatter") else 1
    count = int(key["bytes"] or 0) // itemsize_of(str(key["dtype"])) // share
    return (
        *(str(key["setup"]), row.texts["algorithm"], str(key["bytes"]), str(count), str(key["dtype"])),
        *(str(key["redop"]), "0" if key["op"] == "broadcast" else "-1", f"{figures['time_us']:.1f}"),
        *(f"{figures['algbw_gb_per_s']:.4f}", f"{figures['busbw_gb_per_s']:.4f}", str(int(figures["wrong"]))),
        f"{figures['gloo_ratio']:.2f}x" if "gloo_ratio" in figures else "",
    )


def _size(row: Row) -> str:
    return f"{row.key['bytes']:,}" if row.key.get("bytes") else ""


def table(rows: Sequence[Row]) -> Table:
    """Return the times of an op: a line for each size, columns for each setup, and findings in sentences."""
    names = list(dict.fromkeys(str(row.key["setup"]) for row in rows))
    compared = [name for name in names if not name.startswith("gloo")]
    columns = [column for name in names for column in ([name, "vs gloo"] if name in compared else [name])]
    shown = []
    for size, each in groupby(rows, key=_size):
        by_setup = {row.key["setup"]: row for row in each}
        cells = [size]
        for name in names:
            row = by_setup.get(name)
            figures = {} if row is None else row.figures
            cells.append(f"{figures['time_us']:,.1f}" if figures else row.failed if row else "")
            if name in compared:
                cells.append(f"{figures['gloo_ratio']:.2f}x" if "gloo_ratio" in figures else "")
        first = by_setup.get(compared[0]) if compared else None
        shown.append((*cells, "" if first is None else first.texts.get("algorithm", "")))
    title = f"{_what(rows[0])}, {rows[0].key['dtype']}, us"
    notes = [*([f"runs: the algorithm of {compared[0]}."] if compared else []), *_notes(rows)]
    return Table(title, ("size (B)", *columns, "runs"), tuple(shown), (), tuple(notes))


def _notes(rows: Sequence[Row]) -> list[str]:
    """Return findings of an op, in sentences."""
    measured = [row for row in rows if not row.failed]
    if not measured:
        return []
    copied = statistics.median(row.figures["copy_gb_per_s"] for row in measured)
    wrong = int(sum(row.figures["wrong"] for row in measured))
    notes = [
        "vs gloo: gloo's time / this one; above 1 is faster. "
        + (f"Wrong elements: {wrong}." if wrong else "Every element was right."),
        f"Copy bandwidth, all ranks at a time, read and written: {copied:.1f} GB/s a rank, "
        f"{copied * all_ranks(rows[0]):.1f} GB/s in all.",
    ]
    errors = [
        abs(row.figures["predicted_us"] / row.figures["time_us"] - 1)
        for row in measured
        if "predicted_us" in row.figures
    ]
    if errors:
        notes.append(f"The cost model's predictions are off by {statistics.median(errors):.0%} (median).")
    largest = max(int(row.key["bytes"] or 0) for row in measured)
    best = [
        f"{row.key['setup']} {row.figures['copy_efficiency']:.2f}"
        for row in measured
        if row.key["bytes"] == largest and "copy_efficiency" in row.figures
    ]
    if best:
        notes.append(f"At the largest size, bytes that must move / copy bandwidth: {', '.join(best)}.")
    return notes


def plot(rows: Sequence[Row]) -> Plot:
    """Return the algorithm bandwidth of an op over size, with what the hardware allows."""
    measured = [row for row in rows if not row.failed]
    series = []
    for name in dict.fromkeys(str(row.key["setup"]) for row in measured):
        points = [
            (float(row.key["bytes"] or 0), row.figures["algbw_gb_per_s"])
            for row in measured
            if row.key["setup"] == name
        ]
        x, y = zip(*points, strict=True)
        series.append(Points(name, x, y))
    if measured:
        copied = statistics.median(row.figures["copy_gb_per_s"] for row in measured)
        key = measured[0].key
        rate = None if key["rate"] is None else str(key["rate"])
        most, name = limit(str(key["op"]), all_ranks(measured[0]), int(key["hosts"] or 1), rate, copied)
        if most is not None:
            sizes = [each for points in series for each in points.x]
            series.append(Points(f"limit: {name}", (min(sizes), max(sizes)), (most, most), predicted=True))
    title = f"{_what(rows[0])}, {rows[0].key['dtype']}"
    return Plot(title, "curves", "bytes", "algorithm bandwidth, GB/s", tuple(series), log_x=True, log_y=True)


def choices_table(rows: Sequence[Row]) -> Table:
    """Return what each algorithm is predicted to take for an op, and what is chosen, with the reasons of the others."""
    able = list(dict.fromkeys(name.removesuffix("_us") for row in rows for name in row.figures))
    several = len({row.key["setup"] for row in rows}) > 1
    shown = [
        (
            _size(row),
            *([str(row.key["setup"])] if several else []),
            *(f"{row.figures[f'{name}_us']:,.0f}" if f"{name}_us" in row.figures else "-" for name in able),
            row.failed or row.texts["chosen"],
        )
        for row in rows
    ]
    links = next(row.texts["links"] for row in rows if "links" in row.texts)
    reasons = {name: text for name, text in rows[-1].texts.items() if name.removesuffix(" cannot") not in able}
    return Table(
        title=f"{_what(rows[0])}, {rows[0].key['dtype']}: predicted us",
        columns=("size (B)", *(["setup"] if several else []), *able, "chosen"),
        rows=tuple(shown),
        left=("setup", "chosen"),
        notes=(
            *(f"{name.removesuffix(' cannot')}: {text}" for name, text in reasons.items() if name.endswith(" cannot")),
            f"Predicted from links {links}.",
        ),
    )
