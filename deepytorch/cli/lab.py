"""`deepytorch lab`: a command on simulated hosts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deepytorch.bench.options import FlowRate, LabRate, RanksOfHost


def lab(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND", help="What each rank runs, after --. A file that ends with .py runs in this Python."
        ),
    ],
    hosts: Annotated[int, typer.Option(min=1, help="Simulated hosts (machines), up to 250.")] = 2,
    ranks: RanksOfHost = 1,
    rate: LabRate = "1gbit",
    flow_rate: FlowRate = None,
    logs: Annotated[
        Path | None,
        typer.Option(metavar="FOLDER", help="Where each rank's output goes. Default: a new temporary folder, printed."),
    ] = None,
    timeout: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="End all ranks after so many seconds. Default: never.")
    ] = None,
) -> None:
    """Run a command on simulated machines with slow network links, started as torchrun would. Needs Linux and root.

    For example: deepytorch lab --hosts 2 --ranks 2 --rate 200mbit -- train.py. The exit status is that of the first
    rank that fails, 124 after the timeout. The simulated network is removed at the end.
    """
    from deepytorch.bench.lab import LabOptions, run_lab

    options = LabOptions(hosts=hosts, ranks=ranks, rate=rate, flow_rate=flow_rate, logs=logs, timeout_s=timeout)
    raise typer.Exit(run_lab(options, command, Console()))
