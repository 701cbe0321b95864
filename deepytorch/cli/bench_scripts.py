"""`deepytorch bench hosts` and `start`: whole scripts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli.options import BatchSize, Data, JsonFile, Markdown, ModelSize, SizeOf
from deepytorch.cli.output import Output


def hosts(
    hosts: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="Frameworks, with commas: plain (a loop of its own), ddp, fsdp2, trainer, accelerate, zero1, zero2, "
            "zero2-offload, zero3, zero3-offload (DeepSpeed's ZeRO stages), lightning, peft, trl, megatron; or all. "
            "Recipes: lora-checkpoint, dpo, grpo (a step without generation), orpo, evaluate, sentence-transformers; "
            "or recipes.",
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
    markdown: Markdown = None,
) -> None:
    """Run one training script in each framework (Trainer, Lightning, DeepSpeed, ...) with the import and without it.

    Compares the losses of every step, lets each run go on from the other's checkpoint, and times the median step. On
    CPU, with two ranks where the framework has ranks. Exits with 1 if anything differs that is not known and explained.
    """
    from deepytorch.bench import hosts as measuring
    from deepytorch.bench.host_loops import HOSTS
    from deepytorch.bench.host_recipes import RECIPES
    from deepytorch.bench.hosts_worker import HostsOptions
    from deepytorch.bench.options import names
    from deepytorch.bench.results import write_text

    output = Output(json_file)
    options = HostsOptions(
        hosts={"all": tuple(HOSTS), "recipes": tuple(RECIPES)}.get(hosts) or names(hosts),
        models=names(models),
        size=size.value,
        data=data,
        batch_size=batch_size,
        max_length=max_length,
        steps=steps,
        timeout_s=timeout,
    )
    with output.console.status("Starting") as status:
        for result in measuring.run_hosts(options, notify=status.update):  # takes an hour or more: save partial results
            output.line(", ".join(filter(None, measuring.row_of(result.cells[-1]))))
            if json_file != "-":
                output.json(result.to_json())
            if markdown is not None:
                write_text(markdown, measuring.markdown(result), "--markdown")
    rows = [measuring.row_of(cell)[:-1] for cell in result.cells]
    output.table("deepytorch bench hosts", measuring.COLUMNS, rows, left=measuring.COLUMNS)
    for cell in result.cells:
        if cell.named:
            output.line(f"{cell.host}, {cell.model}: {cell.named}")
    if json_file == "-":
        output.json(result.to_json())
    if any(not cell.green and not cell.named for cell in result.cells):
        raise typer.Exit(1)


def start(
    command: Annotated[
        list[str] | None,
        typer.Argument(metavar="[SCRIPT [ARGS]]", help="Your training script. Default: a small Llama on random rows."),
    ] = None,
    steps: Annotated[int, typer.Option(min=1, help="Optimizer steps of each run.")] = 120,
    rounds: Annotated[int, typer.Option(min=1, help="How often each is run.")] = 3,
    ranks: Annotated[int, typer.Option(min=1, help="Processes of the script, which finds RANK and the like set.")] = 1,
    threads: Annotated[int | None, typer.Option(min=1, help="Threads of each process (OMP_NUM_THREADS).")] = None,
    timeout: Annotated[float, typer.Option(metavar="SECONDS", help="Time limit of one run.")] = 900.0,
    json_file: JsonFile = None,
) -> None:
    """Time a script from its process's first moment on: in eager, with the import, and with it a second time.

    Says how much later the first step is over, by how much the run was behind eager at most, and from which step on it
    is ahead. Cold runs begin with empty caches, and wait at their end until these are filled;
    warm ones begin with what they have left.
    """
    from deepytorch.bench.start import StartOptions, run_start

    output = Output(json_file)
    options = StartOptions(
        command=tuple(command or ()), steps=steps, rounds=rounds, ranks=ranks, threads=threads, timeout_s=timeout
    )
    result = output.watch(run_start, options)
    title = f"{Path(options.script[0]).name}: seconds since the process began, medians of {rounds}"
    last = f"step {len(result.eager.steps)}"
    columns = ("", "first step", "first packed", "compiled from", last, "at most behind", "ahead from step", "compiles")
    rows = []
    for arm in result.arms:
        seconds = [arm.steps[0], arm.first_packed, arm.change_over, arm.steps[-1]]
        row = ["-" if each is None else f"{each:.1f}" for each in seconds]
        if arm is not result.eager:
            ahead = arm.ahead_from(result.eager)
            row += [f"{max(arm.ratios(result.eager)):.2f}x", "-" if ahead is None else str(ahead), str(arm.compiles)]
        rows.append([arm.name, *row])
    output.table(title, columns, rows, left=("",))
    output.json(result.to_json())
