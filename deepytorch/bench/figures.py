"""Figures of trainings that took turns: what most benchmarks say of a setup's ranks."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from deepytorch.bench.benchmark import Cell
from deepytorch.bench.measurement import quantiles
from deepytorch.bench.results import Row

Rank = Mapping[str, Any]
"""What `training.run` returns."""
_LAST = 5  # steps of the warm-up that timed steps are compared with
PERCENTILES = (50, 75, 90, 95)
DISTURBED = 1.7  # times as long in turns as alone before: something else has taken the machine or its memory


def step_seconds(ranks: Sequence[Rank]) -> list[float]:
    """Return the seconds of each step: those of the slowest rank."""
    return [max(each) for each in zip(*(rank["seconds"] for rank in ranks), strict=True)]


def whole_passes(steps: int, batches: int) -> int:
    """Return a number of steps that goes through all batches equally often: batches of text differ in their cost."""
    return -(-steps // batches) * batches


def mean_step_s(ranks: Sequence[Rank]) -> float:
    """Return the mean over the batches of the median over their steps, of which each is as long as the slowest rank's.

    Of batches that differ, a median over all steps would be that of one of them. Where most were there once, it counts.
    """
    seconds, batches = step_seconds(ranks), ranks[0]["batches"]
    if len(seconds) < 2 * batches:
        return statistics.median(seconds)
    return statistics.fmean(statistics.median(seconds[at::batches]) for at in range(min(batches, len(seconds))))


def loss_rel_diff(expected: Sequence[Rank], found: Sequence[Rank]) -> float:
    """Return the largest relative difference of the first losses, over ranks and steps; 1e9 if one is not finite."""
    largest = 0.0
    for one, other in zip(expected, found, strict=True):
        for a, b in zip(one["losses"], other["losses"], strict=False):  # settling makes more steps
            difference = abs(a - b) / max(abs(a), 1e-12)
            largest = max(largest, difference if math.isfinite(difference) else math.inf)
    return largest if math.isfinite(largest) else 1e9


def training_rows(cell: Cell, found: Mapping[str, Sequence[Rank]], baseline: str) -> list[Row]:
    """Return a row for each setup.

    Its figures: `step_s` (see `mean_step_s`); `examples_per_s` of all ranks, and its standard deviation over steps;
    `tokens_per_s`, without pads, where text is learned; `speedup`, the median over pairs of steps on the same batches
    of the baseline's time over this one's; `loss_rel_diff` from the baseline's; `peak_mb`, the most memory of tensors
    in a step, if it was measured; `process_mb`, the most memory that the process ever took, if it has served this cell
    alone; `first_s`, of the first two steps.
    """
    rows = []
    for name, ranks in found.items():
        seconds, step_s = step_seconds(ranks), mean_step_s(ranks)
        examples, tokens = (sum(rank[what] for rank in ranks) / _replicas(cell, name) for what in ("rows", "tokens"))
        rates = [examples / each for each in seconds]
        figures = {
            "step_s": step_s,
            "examples_per_s": examples / step_s,
            "examples_per_s_deviation": statistics.stdev(rates) if len(rates) > 1 else 0.0,
            "first_s": max(rank["first_s"] for rank in ranks),
        }
        if not cell.keeps_processes:
            figures["process_mb"] = max(rank["process_mb"] for rank in ranks)
        if tokens:
            figures["tokens_per_s"] = tokens / step_s
        if any(rank["peak_mb"] for rank in ranks):
            figures["peak_mb"] = max(rank["peak_mb"] for rank in ranks)
        if baseline in found:
            pairs = zip(step_seconds(found[baseline]), seconds, strict=True)
            figures["speedup"] = statistics.median(theirs / own for theirs, own in pairs)
            figures["loss_rel_diff"] = loss_rel_diff(found[baseline], ranks)
        texts = {"runs": "; ".join(filter(None, [ranks[0]["plan"], *ranks[0]["fallbacks"]]))}
        if any(rank.get("alone") for rank in ranks):
            texts["alone"] = "measured alone, since the memory did not suffice for all setups at once"
        slowed = statistics.median(seconds) / statistics.median(ranks[0]["warm_up"][-_LAST:])
        if slowed > DISTURBED:
            texts["disturbed"] = (
                f"{slowed:.1f} times as long in turns as alone before, so the machine was not quiet: measure again"
            )
        rows.append(Row(key={**cell.key, "setup": name}, figures=figures, texts=texts))
    return rows


def all_ranks(row: Row) -> int:
    """Return the number of ranks of all hosts."""
    return int(row.key["hosts"] or 1) * int(row.key["ranks"] or 1)


def place_in_words(key: Mapping[str, Any]) -> str:
    """Return where rows of a key were measured: 4 ranks; 2 hosts of 2 ranks at 1gbit, 200mbit a connection."""
    shape = f"{key['ranks']} ranks" if key["hosts"] == 1 else f"{key['hosts']} hosts of {key['ranks']} ranks"
    flow = f", {key['flow_rate']} a connection" if key.get("flow_rate") else ""
    return f"{shape}{' at ' + key['rate'] if key['rate'] else ''}{flow}"


def percentiles(ranks: Sequence[Rank]) -> dict[str, float]:
    """Return those of PyTorch's DDP benchmark over the steps of all ranks: `p50_s`, `p75_s`, `p90_s`, `p95_s`."""
    cuts = quantiles([each for rank in ranks for each in rank["seconds"]], 100)
    return {f"p{part}_s": cuts[part - 1] for part in PERCENTILES}


def line_of(row: Row) -> str:
    """Return a row in the line format of PyTorch's DDP benchmark: seconds, and examples of a rank per second."""
    shape = f"{all_ranks(row)} ranks -- {row.key['hosts']}M/{row.key['ranks']}R"
    what = f"{row.key['model']:>24} {row.key['setup']:<31} {shape}"
    if row.failed:
        return f"{what}:  {row.failed}"
    rows = row.figures["examples_per_s"] * row.figures["p50_s"]
    parts = []
    for part in PERCENTILES:
        seconds = row.figures[f"p{part}_s"]
        parts.append(f"p{part}: {seconds:7.3f}s {rows / seconds:6.{0 if rows / seconds > 10 else 1}f}/s")
    return f"{what}:  {'  '.join(parts)}"


def by_setup(rows: Sequence[Row]) -> dict[str, Row]:
    """Return rows that were measured together by the names of their setups."""
    return {str(row.key["setup"]): row for row in rows}


def shown(row: Row | None, figure: str, form: str, times: float = 1.0, none: str = "") -> str:
    """Return a figure of a row as text. form: such as "{:.2f}x". times: what the figure is multiplied by.

    none: the text where the row is missing, or has no such figure.
    """
    return none if row is None or figure not in row.figures else form.format(times * row.figures[figure])


def _replicas(cell: Cell, name: str) -> int:
    """Return the number of ranks that get the same examples, since they share a replica of the model."""
    [setup] = (each for each in cell.setups if each.name == name)
    return int(setup.job.parallel.tensor * setup.job.parallel.pipeline)
