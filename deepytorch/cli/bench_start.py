"""`deepytorch bench start`: the time until a script trains."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli.options import JsonFile
from deepytorch.cli.output import Output


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
    from deepytorch.bench.start import StartOptions, run_start

    output = Output(json_file)
    options = StartOptions(
        command=tuple(command or ()), steps=steps, rounds=rounds, ranks=ranks, threads=threads, timeout_s=timeout
    )
    result = output.watch(run_start, options)
    title = f"{Path(options.script[0]).name}: seconds since the process began, medians of {rounds}"
    last = f"step {len(result.eager.steps)}"
    columns = ("", "first step", "first packed", "compiled from", last, "at most behind", "ahead from step", "compiles")
    rows = []
    for arm in result.arms:
        seconds = [arm.steps[0], arm.first_packed, arm.change_over, arm.steps[-1]]
        row = ["-" if each is None else f"{each:.1f}" for each in seconds]
        if arm is not result.eager:
            ahead = arm.ahead_from(result.eager)
            row += [f"{max(arm.ratios(result.eager)):.2f}x", "-" if ahead is None else str(ahead), str(arm.compiles)]
        rows.append([arm.name, *row])
    output.table(title, columns, rows, left=("",))
    output.json(result.to_json())
