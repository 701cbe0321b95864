"""`deepytorch bench kernels` and `roofline`: GPUs that need not be there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli.options import JsonFile, Markdown
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


def roofline(
    rows: Annotated[int, typer.Option(min=1, help="Rows of the batch.")] = 16,
    positions: Annotated[int, typer.Option(min=1, help="Tokens of the longest row.")] = 1024,
    real: Annotated[float, typer.Option(help="The share of positions that are tokens.")] = 0.5,
    measured: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help='Steps that were run, in JSON: {"Llama-3-8B on H200": {"padded_ms": 700, "packed_ms": 400}}. '
            "Default: none.",
        ),
    ] = None,
    markdown: Markdown = None,
    json_file: JsonFile = None,
) -> None:
    """Compute what a training step takes at least on A100, H100, H200 and B200, padded and packed; no GPU needed."""
    from deepytorch.bench import roofline as computing
    from deepytorch.bench.results import write_text
    from deepytorch.errors import DataError

    output = Output(json_file)
    found = None
    if measured is not None:
        try:
            found = json.loads(measured.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise DataError(f"{measured} is not readable JSON: {error}.") from error
        if not isinstance(found, dict) or not all(isinstance(each, dict) for each in found.values()):
            raise DataError(f"{measured} holds no object of objects; expected it as --help shows.")
    lengths = computing.row_lengths(rows, positions, real)
    computed = computing.roofline(lengths, found)
    columns = ["model", "GPU", "padded", "packed", "gain", "launches", "collectives", *(["measured"] if found else [])]
    shown = [
        (
            row.model,
            row.gpu,
            f"{row.padded_ms:.4g} ms",
            f"{row.packed_ms:.4g} ms",
            f"{row.gain:.2f}x",
            str(row.launches),
            str(row.collectives),
            *((computing.measured_text(row),) if found else ()),
        )
        for row in computed
    ]
    output.table("The least time of a training step (computed)", columns, shown, left=("model", "GPU"))
    if markdown is not None:
        command = f"deepytorch bench roofline --rows {rows} --positions {positions} --real {real:g}"
        write_text(markdown, computing.markdown(computed, lengths, command), "--markdown")
    output.json(computing.to_json(computed, lengths))
