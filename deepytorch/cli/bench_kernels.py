"""`deepytorch bench kernels`: the machine code of GPU kernels."""

from __future__ import annotations

from typing import Annotated

import typer

from deepytorch.cli.options import JsonFile
from deepytorch.cli.output import Output


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
    from deepytorch.bench.kernels import run_kernels, to_json
    from deepytorch.errors import ConfigError

    output = Output(json_file)
    try:
        asked = [int(each) for each in capabilities.split(",")]
    except ValueError:
        raise ConfigError(f"--capabilities is {capabilities!r}; expected numbers with commas, as in 80,90.") from None
    rows = output.watch(run_kernels, asked, named)
    columns = ("kernel", "variant", "GPU", "registers", "spilled", "shared", "instructions", "seconds")
    shown = [
        (
            row.kernel,
            row.variant,
            f"sm_{row.capability}",
            str(row.registers),
            f"{row.spilled_bytes} B",
            f"{row.shared_bytes / 1024:.0f} KB",
            ", ".join(row.instructions),
            f"{row.compile_seconds:.1f}",
        )
        for row in rows
    ]
    output.table("Machine code of kernels", columns, shown, left=("kernel", "variant", "instructions"))
    wrong = [f"{row.kernel}, {row.variant}, sm_{row.capability}: {each}" for row in rows for each in row.troubles]
    for each in wrong:
        output.console.print(f"[red]{each}[/red]")
    output.json(to_json(rows))
    if wrong:
        raise typer.Exit(1)
