"""The output of commands: tables for people, and one JSON object for programs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console

from deepytorch.bench.results import write_json

T = TypeVar("T")


class Output:
    """The output of one command. Text goes to stdout, or to stderr if stdout is for the JSON alone (`--json -`)."""

    def __init__(self, json_file: str | None) -> None:
        self._json_file = json_file
        self.console = Console(stderr=json_file == "-")

    def watch(self, measure: Callable[..., T], *given: Any) -> T:
        """Call `measure`, and show on a terminal what it says of its progress to `notify`."""
        with self.console.status("Starting") as status:
            return measure(*given, notify=status.update)

    def line(self, text: str) -> None:
        """Print text as it is, however long its lines."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def json(self, content: dict[str, Any]) -> None:
        """Write the result where --json says, if it was given."""
        if self._json_file == "-":
            typer.echo(json.dumps(content, indent=2))
        elif self._json_file is not None:
            write_json(Path(self._json_file), content)
