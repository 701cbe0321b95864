"""`deepytorch bench kernels`: the machine code of GPU kernels."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from deepytorch.cli.options import JsonFile


def kernels(
    named: Annotated[str, typer.Option(metavar="TEXT", help="Only kernels with this in their names.")] = "",
    capabilities: Annotated[
        str,
        typer.Option(metavar="LIST", help="Compute capabilities of GPUs, with commas: 80 is A100, 90 H100 and H200."),
    ] = "80,90,100",
    json_file: JsonFile = None,
) -> None:
    """Compile every Triton kernel to machine code, no GPU needed: registers, spills, shared memory, instructions.

    Ends with status 1 where one spills, takes more shared memory than there is, or multiplies without tensor cores.
    """
    from deepytorch.bench.json_results import write_json
    from deepytorch.bench.kernels import run_kernels, to_json
    from deepytorch.errors import ConfigError

    console = Console(stderr=json_file == "-")
    try:
        asked = [int(each) for each in capabilities.split(",")]
    except ValueError:
        raise ConfigError(f"--capabilities is {capabilities!r}; expected numbers with commas, as in 80,90.") from None
    with console.status("Starting") as status:
        rows = run_kernels(asked, named, notify=status.update)
    table = Table(box=box.SIMPLE_HEAD, title="Machine code of kernels", title_justify="left")
    for name in ("kernel", "variant", "GPU", "registers", "spilled", "shared", "instructions", "seconds"):
        table.add_column(name, justify="left" if name in ("kernel", "variant", "instructions") else "right")
    for row in rows:
        table.add_row(
            row.kernel,
            row.variant,
            f"sm_{row.capability}",
            str(row.registers),
            f"{row.spilled_bytes} B",
            f"{row.shared_bytes / 1024:.0f} KB",
            ", ".join(row.instructions),
            f"{row.compile_seconds:.1f}",
        )
    console.print(table)
    wrong = [f"{row.kernel}, {row.variant}, sm_{row.capability}: {each}" for row in rows for each in row.troubles]
    for each in wrong:
        console.print(f"[red]{each}[/red]")
    if json_file == "-":
        typer.echo(json.dumps(to_json(rows), indent=2))
    elif json_file:
        write_json(Path(json_file), to_json(rows))
    if wrong:
        raise typer.Exit(1)
