"""`deepytorch run`: a command that trains with the import, without a line in any script."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from deepytorch.config import Environment, process_environment
from deepytorch.errors import CommandError, ConfigError
from deepytorch.run_hook import FOLDER

_EXAMPLE = "for example: deepytorch run torchrun train.py"


def run(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="COMMAND", help="What starts the training, with its own options.", show_default=False),
    ] = None,
) -> None:
    """Run a command; it and every Python process that it starts train as if their scripts had `import deepytorch`.

    For example: deepytorch run torchrun train.py. The command takes this process's place: signals reach it, and its
    exit status is what comes back. Processes that never import torch import nothing of deepytorch's.
    """
    if not command:
        raise CommandError(f"no command was given; expected what starts the training, {_EXAMPLE}")
    _replace_this_process(command)


def _replace_this_process(command: list[str]) -> NoReturn:
    program, environment = program_of(command[0]), environment_of_run()
    try:
        os.execve(program, command, environment)
    except OSError as error:
        raise CommandError(f"{program} cannot be started: {error.strerror}; expected a program, {_EXAMPLE}") from error


def program_of(name: str) -> str:
    """Return the path of a command. Raises `CommandError` if there is none of this name."""
    program = shutil.which(name)
    if program is None:
        raise CommandError(f"{name} is no command here; {_advice(name)}")
    return program


def environment_of_run() -> dict[str, str]:
    """Return the environment in which a command trains with the import. Raises `ConfigError` for a wrong variable."""
    environment = dict(process_environment())
    Environment.read()  # a wrong value is said here, once, and not by each process
    environment["DEEPYTORCH_RUN"] = "on"
    environment["PYTHONPATH"] = python_path(environment.get("PYTHONPATH", ""))
    return environment


def _advice(name: str) -> str:
    if name.endswith(".py") and Path(name).is_file():
        return f"expected a program. Put the Python before it: deepytorch run python {name}"
    if os.sep in name and Path(name).is_file():
        return f"expected a program, and this file may not be executed: chmod +x {name}, or put what runs it before it"
    return (
        "expected a program that PATH leads to, or its path. Install it, or activate the environment that it is "
        f"installed in; {_EXAMPLE}"
    )


def python_path(given: str) -> str:
    """Return a PYTHONPATH that begins with our folder and goes on as `given`. Raises `ConfigError` if it cannot."""
    if os.pathsep in FOLDER:
        raise ConfigError(
            f"deepytorch is installed below {FOLDER}, and PYTHONPATH can hold no folder with {os.pathsep!r} in its "
            "name; expected another name: move the environment, or write `import deepytorch` in the script"
        )
    if not given:  # an empty entry would be the working directory
        return FOLDER
    return os.pathsep.join([FOLDER, *(entry for entry in given.split(os.pathsep) if entry != FOLDER)])
