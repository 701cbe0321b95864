"""`deepytorch bench hosts`: the same script in every training framework."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from deepytorch.cli.options import BatchSize, Data, JsonFile, ModelSize, SizeOf


def hosts(
    hosts: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Frameworks, with commas: plain (a loop of its own), ddp, fsdp2, trainer, accelerate, zero1, zero2, "
            "zero2-offload, zero3, zero3-offload (DeepSpeed's ZeRO stages), lightning, peft, trl; or all.",
        ),
    ] = "all",
    models: Annotated[
        str, typer.Option(metavar="LIST", help="Model architectures, with commas; weights are random.")
    ] = "llama,bert,t5",
    size: SizeOf = ModelSize.demo,
    data: Data = None,
    batch_size: BatchSize = 8,
    max_length: Annotated[int, typer.Option(min=8, help="Tokens that longer rows are cut to.")] = 384,
    steps: Annotated[int, typer.Option(min=4, help="Training steps of each run.")] = 20,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of one run.")] = 900.0,
    json_file: JsonFile = None,
    markdown: Annotated[Path | None, typer.Option(metavar="FILE", help="Write the table as a Markdown page.")] = None,
) -> None:
    """Run one training script in each framework (Trainer, Lightning, DeepSpeed, ...) with the import and without it.

    Compares the losses of every step, lets each run go on from the other's checkpoint, and times the median step. On
    CPU, with two ranks where the framework has ranks. Exits with 1 if anything differs that is not known and explained.
    """
    from deepytorch.bench import hosts as measuring
    from deepytorch.bench.comm import names
    from deepytorch.bench.host_loops import HOSTS

    console = Console(stderr=json_file == "-")
    options = measuring.HostsOptions(
        hosts=tuple(HOSTS) if hosts == "all" else names(hosts),
        models=names(models),
        size=size.value,
        data=data,
        batch_size=batch_size,
        max_length=max_length,
        steps=steps,
        timeout_s=timeout,
    )
    with console.status("Starting") as status:
        for result in measuring.run_hosts(options, notify=status.update):  # takes an hour or more: save partial results
            console.print(measuring.line(result), highlight=False, markup=False, soft_wrap=True)
            if json_file is not None and json_file != "-":
                measuring.save(result, Path(json_file))
            if markdown is not None:
                measuring.write_markdown(result, markdown)
    console.print(measuring.table(result))
    for remark in measuring.remarks(result):
        console.print(remark, highlight=False, markup=False, soft_wrap=True)
    if json_file == "-":
        typer.echo(json.dumps(result.to_json(), indent=2))
    if any(not cell.green and not cell.named for cell in result.cells):
        raise typer.Exit(1)
