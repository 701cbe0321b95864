"""A profile on a terminal: the parts of a step, its regions, and what follows from them."""

from __future__ import annotations

from collections.abc import Iterator

from rich.console import Console

from deepytorch.bench.table import Table, print_table
from deepytorch.profile.advice import advise
from deepytorch.profile.summary import Profile, beginning, reasons

MOST_COLUMNS = 4  # ranks that get a column of their own

NOTHING_STANDS_OUT = "Nothing stands out: most of a step is compiled computation."


def show(profile: Profile, console: Console) -> None:
    """Print a profile."""
    console.print()
    print_table(console, parts_table(profile, MOST_COLUMNS))
    if profile.regions():
        print_table(console, regions_table(profile))
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


def parts_table(profile: Profile, most_ranks: int) -> Table:
    """Return the table of the parts of a step. most_ranks: more than so many have no columns of their own."""
    means = profile.means if 1 < len(profile.ranks) <= most_ranks else []
    own = [f"rank {rank.rank}" for rank, _ in zip(profile.ranks, means, strict=False)]
    content, group = [], ""
    for part, mean in profile.parts.items():
        shown = [f"{1e3 * each.get(part, 0.0):.2f}" for each in means]
        name = part.group if part.group != group else ""
        content.append((name, part.label, f"{1e3 * mean:.2f}", f"{mean / profile.seconds:.1%}", *shown))
        group = part.group
    steps = [f"{1e3 * sum(each.values()):.2f}" for each in means]
    content.append(("step", "", f"{1e3 * profile.seconds:.2f}", "100.0%", *steps))
    columns = ("part of a step", "", "ms", "share", *own)
    return Table(title(profile), columns, tuple(content), columns[:2], tuple(remarks(profile)))


def regions_table(profile: Profile) -> Table:
    """Return the table of a step's regions."""
    content = []
    for region in profile.regions():
        ms = f"{1e3 * region['seconds']:.2f}"
        content.append((region["name"], region["outcome"], ", ".join(region["forms"]), ms, "\n".join(reasons(region))))
    columns = ("region", "outcome", "runs", "ms a step", "why padded or in eager")
    return Table("Regions", columns, tuple(content), ("region", "outcome", "runs", "why padded or in eager"))
