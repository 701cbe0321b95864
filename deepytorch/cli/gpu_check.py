"""`deepytorch gpu-check`: checks of results and speed on this GPU."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from deepytorch.cli.options import JsonFile, quiet_transformers


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
    from deepytorch.bench.json_results import write_json
    from deepytorch.gpu_check import gpu_check as check
    from deepytorch.gpu_check import to_json

    console = Console(stderr=json_file == "-")
    quiet_transformers()
    with console.status("Starting") as status:
        outcomes = check(device, quick, budget, only or (), notify=status.update)
    table = Table(box=box.SIMPLE_HEAD, title=f"Checks on {device}", title_justify="left")
    for name in ("", "what", "check", "found", "seconds"):
        table.add_column(name, justify="right" if name == "seconds" else "left")
    words = {True: "[green]ok[/green]", False: "[red]failed[/red]", None: "not made"}
    for each in outcomes:
        said = each.said.partition("\n")[0]
        table.add_row(words[each.passed], each.group, each.name, said, f"{each.seconds:.1f}")
    console.print(table)
    failed = [each for each in outcomes if each.passed is False]
    for each in failed:
        if "\n" in each.said:
            console.print(f"{each.group}, {each.name}:", markup=False)
            console.print(each.said, markup=False)
    if json_file == "-":
        typer.echo(json.dumps(to_json(outcomes, device), indent=2))
    elif json_file is not None:
        write_json(Path(json_file), to_json(outcomes, device))
    if failed:
        raise typer.Exit(1)
