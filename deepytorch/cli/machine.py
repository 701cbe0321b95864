"""`deepytorch doctor`, `gpu-check`, `build` and `config`: this machine, and the settings."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.text import Text

from deepytorch.bench.table import table_of
from deepytorch.cli.options import JsonFile
from deepytorch.cli.output import Output
from deepytorch.errors import ConfigError


def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object, not tables.")] = False,
    topology: Annotated[
        bool,
        typer.Option(
            "--topology", help="Show instead what this machine is made of: GPUs, links between them, network."
        ),
    ] = False,
    file: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="With --topology: show this file, written by --topology --json, not this machine."
        ),
    ] = None,
    group: Annotated[
        int | None,
        typer.Option(
            metavar="PID",
            help="Show instead what the deepytorch process groups of a running process are doing, by its process id.",
        ),
    ] = None,
) -> None:
    """Show versions, devices and compilers of this machine, what is missing, and how to get it.

    Also warns of versions that deepytorch was not tested with, and lists what the import has changed in torch.
    """
    if group is not None:
        from deepytorch.comm.group.recorder import read_groups

        for number, text in enumerate(read_groups(group)):
            typer.echo(f"{'' if number == 0 else chr(10)}group {number + 1} of process {group}, on this host")
            typer.echo(text)
        return
    if file is not None and not topology:
        raise ConfigError(f"--file {file} was given without --topology, which it belongs to. Add --topology.")
    if topology:
        from deepytorch.topology_view import collect_topology, render_topology

        shown = collect_topology(file)
        if as_json:
            typer.echo(json.dumps(shown.to_json(), indent=2))
        else:
            Console().print(render_topology(shown))
        return

    from deepytorch.doctor import collect, render

    found = collect()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(render(found))


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
    words = {True: Text("ok", "green"), False: Text("failed", "red"), None: Text("not made")}
    rows = [
        (words[each.passed], each.group, each.name, each.said.partition("\n")[0], f"{each.seconds:.1f}")
        for each in outcomes
    ]
    columns = ("", "what", "check", "found", "seconds")
    output.console.print(table_of(f"Checks on {device}", columns, rows, left=columns[:-1]))
    failed = [each for each in outcomes if each.passed is False]
    for each in failed:
        if "\n" in each.said:
            output.line(f"{each.group}, {each.name}:\n{each.said}")
    output.json(to_json(outcomes, device))
    if failed:
        raise typer.Exit(1)


def build() -> None:
    """Compile the C++ code of the deepytorch process group and of attention on a CPU now, ahead of a first script.

    This takes most of a minute on two cores, once for each version of torch. The cache folder keeps the compiled code.
    """
    from deepytorch.comm.group.native import native as collectives
    from deepytorch.passes.ops.native import can_run
    from deepytorch.passes.ops.native import native as operators

    for extension in (collectives, operators) if can_run() else (collectives,):
        Console().print(f"compiled: {extension.build()}", soft_wrap=True)


def config() -> None:
    """Print every setting with its default and meaning, as Markdown."""
    from deepytorch.reference import markdown

    typer.echo(markdown())
