"""A simulation shown to people: a table of steps, a picture of timelines, and the file."""

from __future__ import annotations

from pathlib import Path

from rich import box
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from deepytorch.bench.plots import EfficiencyCurve, TimelineRow, plot_steps
from deepytorch.bench.simulate import Simulation, Step
from deepytorch.errors import ConfigError

_MOST_RANKS = 1 << 20


def parse_ranks(text: str) -> tuple[int, ...]:
    """Return the numbers of ranks of a list such as "8,64,1000", each once. Raises `ConfigError` for anything else."""
    words = [word.strip() for word in text.split(",")]
    if not all(word.isdecimal() and 1 <= int(word) <= _MOST_RANKS for word in words):
        raise ConfigError(f"--ranks {text!r}; expected numbers from 1 to {_MOST_RANKS}, such as 8,64,1000.")
    return tuple(dict.fromkeys(int(word) for word in words))


def step_table(simulation: Simulation) -> RenderableType:
    """Return a table with a line for each number of ranks and each algorithm."""
    num_buckets = max(len(step.transfers) for step in simulation.steps)
    table = Table(
        title=f"{simulation.model}, {num_buckets} buckets", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0)
    )
    for heading in ("ranks", "hosts"):
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("algorithm", overflow="fold")
    for heading in ("step ms", "all-reduce", "exposed", "efficiency"):
        table.add_column(heading, justify="right", no_wrap=True)
    shown = None
    for step in simulation.steps:
        first = step.num_ranks != shown
        shown = step.num_ranks
        table.add_row(
            f"{step.num_ranks:,}" if first else "",
            f"{step.num_hosts:,}" if first else "",
            _name(step),
            *(f"{time_us / 1e3:,.1f}" for time_us in (step.step_us, step.communication_us, step.exposed_us)),
            f"{100 * step.efficiency:.1f} %",
        )
    return Group(table, *(Text(line) for line in assumptions(simulation)))


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
    algorithms = dict.fromkeys(step.algorithm for step in simulation.steps)
    curves = []
    for name in algorithms:
        steps = sorted((step for step in simulation.steps if step.algorithm == name), key=lambda step: step.num_ranks)
        curves.append(EfficiencyCurve(name, [step.num_ranks for step in steps], [step.efficiency for step in steps]))
    most = max(step.num_ranks for step in simulation.steps)
    rows = [_row(step) for step in simulation.steps if step.num_ranks == most]
    plot_steps(path, f"{simulation.model}: simulated steps", curves, f"One step on {most:,} ranks", rows)


def _name(step: Step) -> str:
    """Return the algorithm, and which ones reduce its buckets if the name does not say it."""
    if set(step.algorithms) <= {step.algorithm}:
        return step.algorithm
    if len(step.algorithms) == 1:
        return f"{step.algorithm}: {next(iter(step.algorithms))}"
    return f"{step.algorithm}: {', '.join(f'{count} {name}' for name, count in step.algorithms.items())}"


def _row(step: Step) -> TimelineRow:
    end_ms = step.step_us / 1e3
    forward_ms, backward_ms = step.forward_us / 1e3, step.backward_us / 1e3
    optimizer_ms = (step.backward_us + step.exposed_us) / 1e3
    return TimelineRow(
        _name(step),
        forward_ms=(0.0, forward_ms),
        backward_ms=(forward_ms, backward_ms),
        optimizer_ms=(optimizer_ms, end_ms),
        transfers_ms=[(transfer.start_us / 1e3, transfer.end_us / 1e3) for transfer in step.transfers],
    )
