"""The output of commands: tables for people, and one JSON object for programs."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import typer
from rich.console import Console

from deepytorch.bench.results import write_json

T = TypeVar("T")

_LINE_SECONDS = 60.0  # between two lines of progress in a file


class Output:
    """The output of one command. Text goes to stdout, or to stderr if stdout is for the JSON alone (`--json -`)."""

    def __init__(self, json_file: str | None) -> None:
        self._json_file = json_file
        self.console = Console(stderr=json_file == "-")

    def watch(self, measure: Callable[..., T], *given: Any) -> T:
        """Call `measure`, and show what it says of its progress to `notify`."""
        with self.progress() as notify:
            return measure(*given, notify=notify)

    @contextmanager
    def progress(self) -> Iterator[Callable[[str], None]]:
        """Give the function that shows what a long run is doing: a line that changes on a terminal.

        Where the output goes to a file, as under a cluster's scheduler, stderr gets a line each minute.
        """
        if self.console.is_terminal:
            with self.console.status("Starting") as status:
                yield status.update
        else:
            yield _Lines()

    def line(self, text: str) -> None:
        """Print text as it is, however long its lines."""
        self.console.print(text, highlight=False, markup=False, soft_wrap=True)

    def json(self, content: dict[str, Any]) -> None:
        """Write the result where --json says, if it was given."""
        if self._json_file == "-":
            typer.echo(json.dumps(content, indent=2))
        elif self._json_file is not None:
            write_json(Path(self._json_file), content)


class _Lines:
    """Lines of progress with the time of day, for a file: one a minute, the first after a minute."""

    def __init__(self) -> None:
        self._shown, self._next = "", time.monotonic() + _LINE_SECONDS

    def __call__(self, text: str) -> None:
        now = time.monotonic()
        if now >= self._next and text != self._shown:
            typer.echo(f"{time.strftime('%H:%M:%S')} {text}", err=True)
            self._shown, self._next = text, now + _LINE_SECONDS
