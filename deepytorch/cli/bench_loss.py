"""`deepytorch bench loss`: a linear layer and its cross-entropy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from deepytorch.cli.options import Device, Dtype, JsonFile, dtype_of


def loss(
    rows: Annotated[int, typer.Option(min=1, help="Tokens.")] = 4096,
    hidden_size: Annotated[int, typer.Option(min=1, help="Width of the hidden states.")] = 256,
    vocab_size: Annotated[int, typer.Option(min=2, help="Classes; 128256 are those of Llama 3.")] = 128_256,
    ignored: Annotated[float, typer.Option(min=0.0, max=0.99, help="Fraction of the tokens that have no label.")] = 0.0,
    dtype: Annotated[
        Dtype, typer.Option(parser=dtype_of, metavar="fp32|bf16|fp16", help="Of hidden states and weight.")
    ] = Dtype.fp32,
    device: Device = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="How often each setup is timed.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Time a language model's head and its loss, forward and backward, and what memory they take.

    In eager, compiled by Inductor, and in deepytorch's operator, which holds the logits in pieces.
    """
    from deepytorch.bench.json_results import write_json
    from deepytorch.bench.linear_loss import LossOptions, run_loss

    console = Console(stderr=json_file == "-")
    options = LossOptions(
        rows=rows,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        ignored=ignored,
        dtype=dtype.value,
        device=device,
        rounds=rounds,
    )
    with console.status("Starting") as status:
        result = run_loss(options, notify=status.update)
    title = (
        f"Linear and cross-entropy, {rows} x {hidden_size} x {vocab_size}, {100 * ignored:.0f} % ignored, "
        f"{dtype.value}, {result.device}; gradients {result.gradients_mb:,.0f} MiB"
    )
    table = Table(box=box.SIMPLE_HEAD, title=title, title_justify="left")
    for name in ("", "ms", "of eager's", "peak, MiB", "of eager's", "loss"):
        table.add_column(name, justify="right" if name else "left")
    for arm in result.arms:
        table.add_row(
            arm.name,
            f"{1e3 * arm.seconds:,.1f}",
            f"{arm.time_ratio:.2f}",
            "-" if arm.peak_mb is None else f"{arm.peak_mb:,.0f}",
            "-" if arm.memory_ratio is None else f"{arm.memory_ratio:.2f}",
            f"{arm.loss:.5f}",
        )
    console.print(table)
    if json_file == "-":
        typer.echo(json.dumps(result.to_json(), indent=2))
    elif json_file is not None:
        write_json(Path(json_file), result.to_json())
