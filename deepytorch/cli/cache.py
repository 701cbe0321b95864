"""`deepytorch cache`: the compiled graphs that are kept on this machine."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deepytorch.bench.table import table_of

cache = typer.Typer(help="Compiled graphs that are kept on disk: list, export, import, clear.", no_args_is_help=True)


@cache.command("list")
def list_entries() -> None:
    """List the graphs that are kept, the most recently used first."""
    from deepytorch.compiler.code.worker.store import entries, folder

    rows = []
    for entry in entries():
        used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.used))
        seconds, torch = entry.about.get("seconds"), entry.about.get("torch", "")
        size, compiled = f"{entry.num_bytes / 2**20:.1f}", f"{seconds:.1f}" if isinstance(seconds, (int, float)) else ""
        rows.append((str(entry.about.get("model", "")), entry.digest[:12], size, compiled, str(torch), used))
    columns = ("model", "graph", "MB", "compiled in s", "torch", "used")
    table = table_of(f"compiled graphs in {folder()}", columns, rows, left=columns)
    Console().print(table if rows else f"nothing is kept in {folder()}", soft_wrap=True)


@cache.command("export")
def export_entries(file: Annotated[Path, typer.Argument(help="The file to write, such as compiled.tar.gz.")]) -> None:
    """Write all graphs that are kept into one file, for a cluster's other hosts or a container image.

    Hosts need the same versions of Python, torch and deepytorch and the same kind of CPU; others do not use the file.
    """
    from deepytorch.compiler.code.worker.store import export

    Console().print(f"{export(file)} compiled graphs are in {file}", soft_wrap=True)


@cache.command("import")
def import_entries(file: Annotated[Path, typer.Argument(help="A file that `cache export` has written.")]) -> None:
    """Add the graphs of a file to those that are kept. The file is code that will run: import only your own."""
    from deepytorch.compiler.code.worker.store import take_in

    Console().print(f"{take_in(file)} compiled graphs are new here", soft_wrap=True)


@cache.command("clear")
def clear_entries() -> None:
    """Remove all graphs that are kept. Running scripts go on."""
    from deepytorch.compiler.code.worker.store import entries, remove

    found = entries()
    for entry in found:
        remove(entry)
    Console().print(f"{len(found)} compiled graphs were removed", soft_wrap=True)
