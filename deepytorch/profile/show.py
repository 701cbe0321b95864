"""A profile on a terminal: the parts of a step, its regions, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console
from rich.table import Table

from deepytorch.bench.table import table_of
from deepytorch.profile.advice import advise
from deepytorch.profile.summary import Profile, beginning, reasons

MOST_COLUMNS = 4  # ranks that get a column of their own

NOTHING_STANDS_OUT = "Nothing stands out: most of a step is compiled computation."


def show(profile: Profile, console: Console) -> None:
    """Print a profile."""
    console.print()
    console.print(_parts(profile))
    if profile.regions():
        console.print(_regions(profile))
    for line in remarks(profile):
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    found = advise(profile)
    console.print("\n[bold]What follows[/]" if found else NOTHING_STANDS_OUT)
    for each in found:
        console.print(f"- {each.about}, {each.share:.0%}: {each.text}", highlight=False, markup=False, soft_wrap=True)


def title(profile: Profile) -> str:
    """Return the steps that the figures are of, in words."""
    steps = max(len(rank.steps) for rank in profile.ranks)
    number, ranks = len(profile.used), len(profile.ranks)
    kind = "settled steps" if profile.settled else "steps, none of them settled"
    return f"{profile.command}: {steps} steps; a mean of {number} {kind}" + f", {ranks} ranks" * (ranks > 1)


def rows(profile: Profile) -> Iterator[tuple[str, str, list[float], float]]:
    """Yield, for each part, its group, its name, its seconds on each rank, and its mean."""
    for part, mean in profile.parts.items():
        yield part.group, part.label, [means.get(part, 0.0) for means in profile.means], mean


def remarks(profile: Profile) -> Iterator[str]:
    """Yield what the table does not say."""
    padding = profile.padding
    if padding is None:
        yield "Padding: not known; no batch with a mask was seen."
    else:
        yield f"Padding: {padding[0]:.0%} of all positions are pads; {padding[1]:.0%} are pads that were computed."
    steps, seconds, compiling = beginning(profile.ranks[0])
    traced = sum(step.traced for step in profile.ranks[0].steps)
    yield (
        f"Not in the table: {steps} steps at the beginning or with something to trace or compile ({seconds:.1f} s, "
        f"{compiling:.1f} s of it for that), and {traced} steps in the trace."
    )


def _parts(profile: Profile) -> Table:
    own = [f"rank {rank.rank}" for rank in profile.ranks] if 1 < len(profile.ranks) <= MOST_COLUMNS else []
    columns = ["part of a step", "", "ms", "share", *own]
    content, group = [], ""
    for name, label, by_rank, mean in rows(profile):
        shown = [f"{1e3 * seconds:.2f}" for seconds in by_rank] if own else []
        content.append(
            (name if name != group else "", label, f"{1e3 * mean:.2f}", f"{mean / profile.seconds:.1%}", *shown)
        )
        group = name
    steps = [f"{1e3 * sum(means.values()):.2f}" for means in profile.means] if own else []
    content.append(("step", "", f"{1e3 * profile.seconds:.2f}", "100.0%", *steps))
    return table_of(title(profile), columns, content, ("part of a step", ""))


def _regions(profile: Profile) -> Table:
    content = []
    for region in profile.regions():
        ms = f"{1e3 * region['seconds']:.2f}"
        content.append((region["name"], region["outcome"], ", ".join(region["forms"]), ms, "\n".join(reasons(region))))
    columns = ("region", "outcome", "runs", "ms a step", "why padded or in eager")
    return table_of("Regions", columns, content, ("region", "outcome", "runs", "why padded or in eager"))
