"""`deepytorch bench roofline`: GPUs that need not be there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli.options import JsonFile
from deepytorch.cli.output import Output


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
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as a Markdown page.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Compute what a training step takes at least on A100, H100, H200 and B200, padded and packed; no GPU needed."""
    from deepytorch.bench import roofline as computing
    from deepytorch.bench.results import write_text
    from deepytorch.bench.table import table_of
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
    title = "The least time of a training step (computed)"
    output.console.print(table_of(title, columns, shown, left=("model", "GPU")))
    if markdown is not None:
        command = f"deepytorch bench roofline --rows {rows} --positions {positions} --real {real:g}"
        write_text(markdown, computing.markdown(computed, lengths, command), "--markdown")
    output.json(computing.to_json(computed, lengths))
