"""`deepytorch bench loss`: a linear layer and its cross-entropy."""

from __future__ import annotations

from typing import Annotated

import typer

from deepytorch.cli.options import Device, JsonFile, dtype_of
from deepytorch.cli.output import Output


def loss(
    rows: Annotated[int, typer.Option(min=1, help="Tokens.")] = 4096,
    hidden_size: Annotated[int, typer.Option(min=1, help="Width of the hidden states.")] = 256,
    vocab_size: Annotated[int, typer.Option(min=2, help="Classes; 128256 are those of Llama 3.")] = 128_256,
    ignored: Annotated[float, typer.Option(min=0.0, max=0.99, help="Fraction of the tokens that have no label.")] = 0.0,
    dtype: Annotated[
        str, typer.Option(parser=dtype_of, metavar="fp32|bf16|fp16", help="Of hidden states and weight.")
    ] = "fp32",
    device: Device = "cpu",
    rounds: Annotated[int, typer.Option(min=1, help="How often each setup is timed.")] = 3,
    json_file: JsonFile = None,
) -> None:
    """Time a language model's head and its loss, forward and backward, and what memory they take.

    In eager, compiled by Inductor, and in deepytorch's operator, which holds the logits in pieces.
    """
    from deepytorch.bench.linear_loss import LossOptions, run_loss

    output = Output(json_file)
    options = LossOptions(
        rows=rows,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        ignored=ignored,
        dtype=dtype,
        device=device,
        rounds=rounds,
    )
    result = output.watch(run_loss, options)
    title = (
        f"Linear and cross-entropy, {rows} x {hidden_size} x {vocab_size}, {100 * ignored:.0f} % ignored, "
        f"{dtype}, {result.device}; gradients {result.gradients_mb:,.0f} MiB"
    )
    rows_of_arms = [
        (
            arm.name,
            f"{1e3 * arm.seconds:,.1f}",
            f"{arm.time_ratio:.2f}",
            f"{arm.peak_mb:,.0f}",
            "-" if arm.memory_ratio is None else f"{arm.memory_ratio:.2f}",
            f"{arm.loss:.5f}",
        )
        for arm in result.arms
    ]
    output.table(title, ("", "ms", "of eager's", "peak, MiB", "of eager's", "loss"), rows_of_arms, left=("",))
    output.json(result.to_json())
