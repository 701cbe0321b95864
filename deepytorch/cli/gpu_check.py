"""`deepytorch gpu-check`: checks of results and speed on this GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from deepytorch.cli.options import JsonFile
from deepytorch.cli.output import Output


def gpu_check(
    device: Annotated[str, typer.Option(help="The GPU: cuda, cuda:1. cpu tries the checks themselves.")] = "cuda",
    quick: Annotated[bool, typer.Option("--quick", help="Only what is right and wrong, no figures.")] = False,
    budget: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="Checks that are not over by then are left out.")
    ] = 480.0,
    only: Annotated[list[str] | None, typer.Option(metavar="GROUP", help="Make this group; can be repeated.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Check kernels, models, synchronisations and speed on this machine's GPU; what failed comes first.

    Needs no network. Each group of checks runs in a process of its own: a check that crashes or hangs is reported with
    the others. Ends with status 1 if something failed.
    """
    from deepytorch.gpu_check import gpu_check as check
    from deepytorch.gpu_check import to_json

    output = Output(json_file)
    outcomes = output.watch(check, device, quick, budget, only or ())
    words = {True: "[green]ok[/green]", False: "[red]failed[/red]", None: "not made"}
    rows = [
        (words[each.passed], each.group, each.name, each.said.partition("\n")[0], f"{each.seconds:.1f}")
        for each in outcomes
    ]
    columns = ("", "what", "check", "found", "seconds")
    output.table(f"Checks on {device}", columns, rows, left=columns[:-1])
    failed = [each for each in outcomes if each.passed is False]
    for each in failed:
        if "\n" in each.said:
            output.line(f"{each.group}, {each.name}:\n{each.said}")
    output.json(to_json(outcomes, device))
    if failed:
        raise typer.Exit(1)
