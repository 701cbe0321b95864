"""`deepytorch profile`: a training command, and where the time of its steps goes."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli.options import JsonFile
from deepytorch.cli.output import Output
from deepytorch.cli.run import environment_of_run, program_of
from deepytorch.errors import ConfigError, ScriptError


def profile(
    command: Annotated[
        list[str],
        typer.Argument(
            metavar="COMMAND", help="Your training script, or what starts it (torchrun), with its arguments."
        ),
    ],
    module: Annotated[bool, typer.Option("-m", help="COMMAND is a module's name, as for python -m.")] = False,
    steps: Annotated[
        str | None,
        typer.Option(
            metavar="FIRST-LAST",
            help="Steps for the trace, by their numbers from 1 on. Left out: four, once nothing is compiled any more.",
        ),
    ] = None,
    stop_after: Annotated[
        int | None, typer.Option(min=1, help="End the script after so many steps. Left out: it runs to its end.")
    ] = None,
    out: Annotated[
        Path, typer.Option(metavar="FOLDER", help="Where profile.html, profile.json and trace.json are written.")
    ] = Path("deepytorch-profile"),
    json_file: JsonFile = None,
) -> None:
    """Run your training with `import deepytorch`, and say where the time of a step goes, and what follows from it.

    COMMAND is a script (train.py), a module (-m train) or any command that trains, such as torchrun train.py. Its exit
    status is passed on. A script that fails, or that you interrupt, has a profile of the steps that it made.
    """
    from deepytorch.profile.records import Job
    from deepytorch.profile.run import FIGURES, PAGE, TRACE
    from deepytorch.profile.run import profile as run_profile
    from deepytorch.profile.show import show

    output = Output(json_file)
    environment = environment_of_run()
    if environment.get("DEEPYTORCH", "").strip().lower() == "off":
        raise ConfigError("DEEPYTORCH=off is set; expected training with the import, which is profiled: unset it")
    first, num_traced = _traced(steps)
    job = Job(folder=out, first=first, num_traced=num_traced, stop_after=stop_after)
    shown = " ".join(["python -m", *command] if module else command)
    status, found = run_profile(
        _full(command, module), shown, environment, job, out, sys.stderr.fileno() if json_file == "-" else None
    )
    if found is None:
        if status:
            output.line(f"{shown} ended with status {status} before its first training step: there is nothing to show.")
            raise typer.Exit(status)
        raise ScriptError(
            f"{shown} made no step of an optimizer of torch.optim; expected a command that trains, in a Python "
            "that has deepytorch"
        )
    show(found, output.console)
    files = [each for each in (PAGE, FIGURES, TRACE) if (out / each).exists()]
    output.line(
        f"\nWritten to {out}: {', '.join(files)} (the trace is for https://ui.perfetto.dev or chrome://tracing)."
    )
    if status:
        output.line(f"{shown} ended with status {status}; the profile is of the steps before that.")
    output.json(found.to_json())
    raise typer.Exit(status)


def _full(command: list[str], module: bool) -> list[str]:
    """Return the command with the path of its program: this Python for scripts and modules."""
    if module:
        return [sys.executable, "-m", *command]
    if command[0].endswith(".py"):
        if not Path(command[0]).is_file():
            raise ConfigError(f"the script {command[0]!r} does not exist; expected a path to a Python script")
        return [sys.executable, *command]
    return [program_of(command[0]), *command[1:]]


def _traced(steps: str | None) -> tuple[int | None, int]:
    """Return the first step of the trace, if it is given, and the number of steps."""
    if steps is None:
        return None, 4
    first, _, last = steps.partition("-")
    if not (first.isdigit() and (last or first).isdigit() and 1 <= int(first) <= int(last or first)):
        raise ConfigError(f"--steps {steps}; expected two numbers from 1 on, such as 20-23")
    return int(first), int(last or first) - int(first) + 1
