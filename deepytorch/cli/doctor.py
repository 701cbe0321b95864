"""`deepytorch doctor`: the check of this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

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
