"""`deepytorch bench hosts`: every host of a training loop, with and without the import, on the same batches."""

from __future__ import annotations

import math
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from deepytorch.bench.host_recipes import ARMS
from deepytorch.bench.host_scripts import Script, ScriptFailed, results
from deepytorch.bench.hosts_worker import HostJob, HostsOptions
from deepytorch.bench.results import machine

COLUMNS = ("host", "model", "ranks", "losses", "speedup", "checkpoints", "padding")
LOSS_TOLERANCE = 1e-3  # relative, after some steps of AdamW, which amplifies rounding
RESUMED_TOLERANCE = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One host with one model.

    seconds: median step without the import and with it, over the second half of the steps, rank 0. speedup: the ratio
    of the two. checkpoint_rel_diff: of the losses after each has continued from the other's checkpoint. named: why a
    cell is empty or not green.
    """

    host: str
    model: str
    ranks: int
    max_loss_rel_diff: float | None = None
    speedup: float | None = None
    seconds: tuple[float, float] | None = None
    checkpoint_rel_diff: float | None = None
    steps_packed: int = 0
    steps_padded: int = 0
    how: str = ""
    named: str = ""

    @property
    def green(self) -> bool:
        """Return whether losses agree and checkpoints are interchangeable."""
        differences = (self.max_loss_rel_diff, self.checkpoint_rel_diff)
        bounds = (LOSS_TOLERANCE, RESUMED_TOLERANCE)
        return all(each is not None and each <= bound for each, bound in zip(differences, bounds, strict=True))


@dataclass(frozen=True, kw_only=True, slots=True)
class HostsResult:
    """The result of `deepytorch bench hosts`."""

    options: HostsOptions
    machine: str
    versions: dict[str, str]
    cells: tuple[Cell, ...]

    def to_json(self) -> dict[str, Any]:
        """Return plain JSON values."""
        options = asdict(self.options) | {"data": None if self.options.data is None else self.options.data.name}
        cells = [asdict(cell) | {"green": cell.green} for cell in self.cells]
        return {"options": options, "machine": self.machine, "versions": self.versions, "cells": cells}


def run_hosts(options: HostsOptions, notify: Callable[[str], None]) -> Iterator[HostsResult]:
    """Run every cell, one after the other, and yield the results so far after each.

    A host that fails or is not installed leaves a cell with its name.
    """
    cells: list[Cell] = []
    for host in options.hosts:
        for model in options.models:
            notify(f"{host}, {model}")
            cells.append(_cell(host, model, options))
            yield HostsResult(options=options, machine=machine(), versions=_versions(), cells=tuple(cells))


def _versions() -> dict[str, str]:
    found = {}
    for name in ("torch", "transformers", "accelerate", "deepspeed", "lightning", "peft", "trl", "megatron-core"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _cell(host: str, model: str, options: HostsOptions) -> Cell:
    loop = ARMS[host]
    if model not in loop.models:
        return Cell(host=host, model=model, ranks=loop.ranks, named=f"it is for {', '.join(loop.models)}")
    missing = [name for name in loop.packages if find_spec(name) is None]
    if missing:
        return Cell(host=host, model=model, ranks=loop.ranks, named=f"not installed: {', '.join(missing)}")
    with tempfile.TemporaryDirectory(prefix="deepytorch-bench-") as scratch:
        saves = {name: Path(scratch, name, "save") for name in ("plain", "ours", "crossed", "again")}

        def script(name: str, *, on: bool, in_turns: bool = False, **given: Any) -> Script:
            folder = saves[name].parent
            folder.mkdir()
            job = HostJob(options=options, host=host, model=model, save=saves[name], **given)
            timeout_s = options.timeout_s * (2 if in_turns else 1)  # the other script's steps take part of the time
            return Script(job, folder, loop.ranks, timeout_s, on=on, in_turns=in_turns)

        other = saves["plain"] if loop.resumes_in_process else None
        try:
            plain, ours = results(
                script("plain", on=False, in_turns=True),
                script("ours", on=True, in_turns=True, other=other),  # its last step comes after the other's
            )
            if other is None:
                [resumed] = results(script("again", on=True, first=options.save_at, resume=saves["plain"]))
                for found, each in zip(ours, resumed, strict=True):
                    found["resumed"] = each["steps"]
            [back] = results(script("crossed", on=False, first=options.save_at, resume=saves["ours"]))
        except ScriptFailed as failure:
            return Cell(host=host, model=model, ranks=loop.ranks, named=str(failure))
    half = options.steps // 2
    without, with_import = (
        statistics.median(each["seconds"] for each in found[0]["steps"][half:]) for found in (plain, ours)
    )
    report = ours[0]["report"]
    return Cell(
        host=host,
        model=model,
        ranks=loop.ranks,
        max_loss_rel_diff=_difference(plain, ours, "steps", "steps"),
        speedup=without / with_import,
        seconds=(without, with_import),
        checkpoint_rel_diff=_difference(back, ours, "steps", "resumed"),
        steps_packed=report["steps_packed"],
        steps_padded=report["steps_padded"],
        how=_how(ours[0]["regions"]),
        named="; ".join(fallback for region in ours[0]["regions"] for fallback in region["fallbacks"]),
    )


def _how(regions: Sequence[dict[str, Any]]) -> str:
    packed = [region["name"] for region in regions if region["outcome"] == "packed"]
    if any(name.startswith("model entry") for name in packed):
        return "at model entry"
    return "in the graph" if packed else "compiled, padded" if regions else "left alone"


def _difference(one: list[Any], other: list[Any], mine: str, others: str) -> float:
    """Return the largest relative difference of losses, over ranks and steps; infinite if a step is missing."""
    largest = 0.0
    for expected, found in zip(one, other, strict=True):
        losses = [[each["loss"] for each in run] for run in (expected[mine], found[others])]
        if len(losses[0]) != len(losses[1]) or not losses[0]:
            return math.inf
        for a, b in zip(*losses, strict=True):
            difference = abs(a - b) / max(abs(a), 1e-12)
            largest = max(largest, difference if math.isfinite(difference) else math.inf)
    return largest


def row_of(cell: Cell) -> tuple[str, ...]:
    """Return a row of the matrix: a text for each of `COLUMNS`, and the reason why the cell is empty or not green."""
    if cell.speedup is None:
        return cell.host, cell.model, str(cell.ranks), "", "", "", "", cell.named
    losses, checkpoints = (
        f"{'equal' if each <= bound else 'DIFFER'} ({each:.0e})"
        for each, bound in (
            (cell.max_loss_rel_diff or 0.0, LOSS_TOLERANCE),
            (cell.checkpoint_rel_diff or 0.0, RESUMED_TOLERANCE),
        )
    )
    padding = f"{cell.how}, {cell.steps_packed} of {cell.steps_packed + cell.steps_padded} steps"
    return cell.host, cell.model, str(cell.ranks), losses, f"{cell.speedup:.2f}x", checkpoints, padding, cell.named


def markdown(result: HostsResult) -> str:
    """Return the matrix as a page of the documentation."""
    options = result.options
    versions = ", ".join(f"{name} {version}" for name, version in result.versions.items())
    data = "the embedded text" if options.data is None else f"`{options.data.name}`"
    lines = [
        "# Compatibility",
        "",
        "Made by `deepytorch bench hosts`: the same script twice, with the import and without, on the same batches.",
        "The two take turns, step by step.",
        "",
        f"- **losses**: equal in each of {options.steps} steps, on every rank (largest relative difference; "
        f"{LOSS_TOLERANCE:.0e} is allowed).",
        "- **speedup**: median step of the second half, without the import / with it, on rank 0.",
        "- **checkpoints**: each script goes on from the other's, and the losses that follow agree.",
        "- **padding**: where it was stripped ([how it works](how-it-works.md)), and in how many steps.",
        "",
        f"Size `{options.size}`, batch {options.batch_size}, up to {options.max_length} tokens, fp32, {data}; "
        f"one thread a rank on {result.machine}; {versions}.",
        "",
        f"| {' | '.join(COLUMNS)} | |",
        "| --- " * (len(COLUMNS) + 1) + "|",
        *("| " + " | ".join(row_of(cell)) + " |" for cell in result.cells),
        "",
    ]
    return "\n".join(lines)
