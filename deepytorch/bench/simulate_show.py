"""A simulation shown to people: a table of steps, a picture of timelines, and the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deepytorch.bench.plots import new_figure, save_figure
from deepytorch.bench.simulate import Simulation, Step
from deepytorch.bench.table import Table
from deepytorch.errors import ConfigError

_MOST_RANKS = 1 << 20


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the numbers of ranks of a list such as "8,64,1000", each once. Raises `ConfigError` for anything else."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= _MOST_RANKS for word in words):
        raise ConfigError(f"--ranks {text!r}; expected numbers from 1 to {_MOST_RANKS}, such as 8,64,1000.")
    return tuple(dict.fromkeys(int(word) for word in words))


def step_table(simulation: Simulation) -> Table:
    """Return a table with a line for each number of ranks and each algorithm, and what was assumed."""
    num_buckets = max(len(step.transfers) for step in simulation.steps)
    rows = []
    shown = None
    for step in simulation.steps:
        counts = (f"{step.num_ranks:,}", f"{step.num_hosts:,}") if step.num_ranks != shown else ("", "")
        shown = step.num_ranks
        times_ms = [f"{time_us / 1e3:,.1f}" for time_us in (step.step_us, step.communication_us, step.exposed_us)]
        rows.append((*counts, _name(step), *times_ms, f"{100 * step.efficiency:.1f} %"))
    columns = ("ranks", "hosts", "algorithm", "step ms", "all-reduce", "exposed", "efficiency")
    title = f"{simulation.model}, {num_buckets} buckets"
    return Table(title, columns, tuple(rows), ("algorithm",), tuple(assumptions(simulation)))


def assumptions(simulation: Simulation) -> list[str]:
    """Return what was assumed and not measured, a line for each set of numbers of ranks; none if all was measured."""
    by_names: dict[tuple[str, ...], list[str]] = {}
    for ranks, names in simulation.nominal.items():
        by_names.setdefault(names, []).append(f"{ranks:,}")
    return [
        f"Assumed, not measured ({', '.join(ranks)} ranks): {', '.join(names)}."
        for names, ranks in by_names.items()
        if names
    ]


def draw(path: Path, simulation: Simulation) -> None:
    """Write a PNG: efficiency over ranks, and the timelines on the most ranks. Raises `ConfigError` when it cannot."""
    most = max(step.num_ranks for step in simulation.steps)
    rows = [step for step in simulation.steps if step.num_ranks == most]
    figure = new_figure(13, max(4.2, 1.6 + 0.7 * len(rows)))
    left, right = figure.subplots(1, 2, width_ratios=(2, 3))
    for name in dict.fromkeys(step.algorithm for step in simulation.steps):
        steps = sorted((step for step in simulation.steps if step.algorithm == name), key=lambda step: step.num_ranks)
        ranks, efficiencies = [step.num_ranks for step in steps], [step.efficiency for step in steps]
        left.plot(ranks, efficiencies, label=name, marker="o", markersize=3.5, linewidth=1.5)
    left.grid(visible=True, alpha=0.3)
    left.legend()
    left.set_xscale("log")
    left.set(ylim=(0, 1.05), xlabel="ranks", ylabel="compute of one rank / step", title="Scaling efficiency")
    for at, step in enumerate(rows):
        _draw_timeline(right, at, step)
    right.set_yticks(range(len(rows)), [_name(step) for step in rows])
    right.invert_yaxis()
    right.set(xlabel="ms", title=f"One step on {most:,} ranks")
    right.legend()
    figure.suptitle(f"{simulation.model}: simulated steps")
    save_figure(figure, path, "Give another --plot path.")


def _draw_timeline(axes: Any, at: int, step: Step) -> None:
    """Draw one row: compute above, collectives below."""
    transfers = [(transfer.start_us, transfer.end_us) for transfer in step.transfers]
    for name, color, top, spans, style in (
        ("forward", "#bbbbbb", at - 0.4, [(0.0, step.forward_us)], {}),
        ("backward", "#0072b2", at - 0.4, [(step.forward_us, step.backward_us)], {}),
        ("optimizer", "#555555", at - 0.4, [(step.backward_us + step.exposed_us, step.step_us)], {}),
        ("collectives", "#e69f00", at, transfers, {"edgecolor": "white", "linewidth": 0.5}),
    ):
        spans_ms = [(start / 1e3, (end - start) / 1e3) for start, end in spans]
        axes.broken_barh(spans_ms, (top, 0.4), color=color, label=name if at == 0 else None, **style)


def _name(step: Step) -> str:
    """Return the algorithm, and which ones reduce its buckets if the name does not say it."""
    if set(step.algorithms) <= {step.algorithm}:
        return step.algorithm
    if len(step.algorithms) == 1:
        return f"{step.algorithm}: {next(iter(step.algorithms))}"
    return f"{step.algorithm}: {', '.join(f'{count} {name}' for name, count in step.algorithms.items())}"
