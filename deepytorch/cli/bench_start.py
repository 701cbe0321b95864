"""`deepytorch bench start`: the time until a script trains."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from deepytorch.cli.options import JsonFile


def start(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SCRIPT [ARGS]]", help="Your training script. Default: a small Llama on random rows."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 120,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is run.")] = 3,
    ranks: Annotated[int, typer.Option(min=1, help="Processes of the script, which finds RANK and the like set.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each process (OMP_NUM_THREADS).")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of one run.")] = 900.0,
    json_file: JsonFile = None,
) -> None:
    """Time a script from its process's first moment on: in eager, with the import, and with it a second time.

    Says how much later the first step is over, by how much the run was behind eager at most, and from which step on it
    is ahead. Cold runs begin with empty caches, and wait at their end until these are filled;
    warm ones begin with what they have left.
    """
    from deepytorch.bench.json_results import write_json
    from deepytorch.bench.start import StartOptions, run_start

    console = Console(stderr=json_file == "-")
    options = StartOptions(
        command=tuple(command or ()), steps=steps, rounds=rounds, ranks=ranks, threads=threads, timeout_s=timeout
    )
    with console.status("Starting") as status:
        result = run_start(options, notify=status.update)
    title = f"{Path(options.script[0]).name}: seconds since the process began, medians of {rounds}"
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in (
        "",
        "first step",
        "first packed",
        "compiled from",
        f"step {len(result.eager.steps)}",
        "at most behind",
    ):
        table.add_column(name, justify="right" if name else "left")
    table.add_column("ahead from step", justify="right")
    table.add_column("compiles", justify="right")
    for arm in result.arms:
        seconds = [arm.steps[0], arm.first_packed, arm.change_over, arm.steps[-1]]
        row = ["-" if each is None else f"{each:.1f}" for each in seconds]
        if arm is not result.eager:
            ahead = arm.ahead_from(result.eager)
            row += [f"{max(arm.ratios(result.eager)):.2f}x", "-" if ahead is None else str(ahead), str(arm.compiles)]
        table.add_row(arm.name, *row)
    console.print(table)
    if json_file == "-":
        typer.echo(json.dumps(result.to_json(), indent=2))
    elif json_file is not None:
        write_json(Path(json_file), result.to_json())
