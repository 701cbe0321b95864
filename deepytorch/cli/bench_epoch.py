"""`deepytorch bench epoch`: real tokens a second, against batches of like lengths."""

from __future__ import annotations

from typing import Annotated

import typer

from deepytorch.cli.options import (
    BatchSize,
    Data,
    Device,
    DtypeOf,
    JsonFile,
    LabelsOf,
    Model,
    ModelFamily,
    ModelSize,
    SizeOf,
)
from deepytorch.cli.output import Output


def epoch(
    labels: Annotated[
        LabelsOf, typer.Option(help="Which tokens have labels: those of the response, or of the instruction too.")
    ] = LabelsOf.response,
    data: Data = None,
    model: ModelFamily = Model.llama,
    size: SizeOf = ModelSize.small,
    batch_size: BatchSize = 8,
    rows: Annotated[int, typer.Option(min=1, help="Rows of the epoch that batches are taken from.")] = 3200,
    steps: Annotated[int, typer.Option(min=1, help="Batches that are timed, spread evenly over the epoch.")] = 32,
    rounds: Annotated[int, typer.Option(min=1, help="How often each batch is timed in each setup.")] = 3,
    dtype: DtypeOf = "fp32",
    device: Device = "cpu",
    json_file: JsonFile = None,
) -> None:
    """Time training over an epoch, rows in random order and grouped by length as Trainer's group_by_length does.

    Each setup trains its own model with AdamW; what counts is real tokens a second, without padding.
    """
    from deepytorch.bench.epoch import EpochOptions, run_epoch

    output = Output(json_file)
    options = EpochOptions(
        model=model.value,
        size=size.value,
        labels=labels.value,
        data=data,
        rows=rows,
        batch_size=batch_size,
        steps=steps,
        rounds=rounds,
        dtype=dtype,
        device=device,
    )
    result = output.watch(run_epoch, options)
    title = (
        f"{result.model}, batch {result.batch_size}, {result.dtype}, {result.device}: an epoch of {result.rows} rows"
    )
    words = ("compiled by", "rows in order of")
    rows_of_arms = [
        (
            arm.backend,
            arm.order,
            f"{arm.tokens_per_s:,.0f}",
            f"{arm.ratio:.2f}x",
            f"{100 * arm.real_token_fraction:.0f} %",
        )
        for arm in result.arms
    ]
    output.table(title, (*words, "real tokens/s", "ratio", "real tokens"), rows_of_arms, left=words)
    output.json(result.to_json())
