"""`deepytorch bench models`: every model class of the installed transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from deepytorch.cli.options import Lowering
from deepytorch.cli.output import Output


def models(
    only: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME", help="Class or family, such as LlamaForCausalLM or llama; may be repeated."),
    ] = None,
    task: Annotated[
        str,
        typer.Option(metavar="LIST", help="Tasks, with commas: causal, masked, seq2seq, sequence, token, question."),
    ] = "causal,masked,seq2seq,sequence,token,question",
    out: Annotated[
        Path, typer.Option(metavar="FILE", help="The results, a line of JSON a model. A later run goes on with it.")
    ] = Path("models.jsonl"),
    again: Annotated[bool, typer.Option("--again", help="Run models anew that the file has.")] = False,
    jobs: Annotated[int, typer.Option(min=1, help="Models at a time, with one thread each.")] = 1,
    timeout: Annotated[
        float,
        typer.Option(min=1.0, metavar="SECONDS", help="Time limit of a model, in eager and again with the import."),
    ] = 180.0,
    lowering: Annotated[Lowering, typer.Option(help="How graphs are lowered; inductor takes longest.")] = (
        Lowering.aot_eager
    ),
    page: Annotated[Path | None, typer.Option(metavar="FILE", help="Write a Markdown page of all lines.")] = None,
) -> None:
    """Train every model class of the installed transformers, made small, in eager and with the import, and compare.

    Weights are random and nothing is downloaded. Each model runs in processes of its own; numbers are compared over a
    few optimizer steps in fp32, beside eager's own sensitivity to a change of the last bit of its weights. The table
    says where padding was stripped, and why not. Exits with 1 if numbers are wrong or the import makes a model fail.
    """
    from deepytorch.bench.model_classes.catalog import model_classes
    from deepytorch.bench.model_classes.page import COUNTS, counts_of, reasons_of, row_of
    from deepytorch.bench.model_classes.page import page as page_of
    from deepytorch.bench.model_classes.run import FAILS, WRONG, ModelsOptions, read_lines, run_models
    from deepytorch.bench.options import names
    from deepytorch.bench.results import write_text

    output = Output(None)
    options = ModelsOptions(
        out=out,
        tasks=names(task),
        only=tuple(only or ()),
        again=again,
        jobs=jobs,
        timeout_s=timeout,
        lowering=lowering.value,
    )
    with output.console.status("Starting") as status:
        for line in run_models(options, notify=status.update):
            output.line(f"{line.task}: " + "  ".join(filter(None, row_of(line))))
    lines = read_lines(out)
    for title, *counts in counts_of(lines):
        output.line(f"{title}: " + ", ".join(f"{name} {count}" for name, count in zip(COUNTS[1:], counts, strict=True)))
    for reason, of in reasons_of(lines):
        output.line(f"{len(of)} not packed: {reason}")
    if page is not None:
        write_text(page, page_of(lines, len(model_classes())), "--page")
    if any(line.outcome in (WRONG, FAILS) for line in lines):
        raise typer.Exit(1)
