"""The command line: `deepytorch demo`, `deepytorch bench unpad`, `deepytorch doctor`."""

from __future__ import annotations

import json
import sys
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich import box
from rich.console import Console, Group
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from deepytorch.errors import DeepytorchError
from deepytorch.version import __version__

if TYPE_CHECKING:
    from deepytorch.bench.schema import UnpadResult

# torch takes seconds to import: commands import what they need, so that --help and --version answer at once.

app = typer.Typer(
    name="deepytorch",
    help="A training accelerator for PyTorch: torch.compile(model, backend='deepytorch').",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure what deepytorch gains on this machine.", no_args_is_help=True)
app.add_typer(bench, name="bench")


class Model(str, Enum):
    """Families of Hugging Face models, made with random weights."""

    llama = "llama"
    qwen2 = "qwen2"
    gpt2 = "gpt2"
    bert = "bert"
    bart = "bart"
    t5 = "t5"


class Dtype(str, Enum):
    """fp32, or autocast to a lower one with fp32 weights."""

    fp32 = "fp32"
    bf16 = "bf16"
    fp16 = "fp16"


class LabelsOf(str, Enum):
    """Which tokens are learned: the response's, as instruction tuning does, or the prompt's too."""

    response = "response"
    all = "all"


_Data = Annotated[
    Path | None, typer.Option("--data", help="JSON file in the Alpaca layout, in place of the embedded data set.")
]
_Model = Annotated[Model, typer.Option(help="Family of the model.")]
_BatchSize = Annotated[int, typer.Option(min=1, help="Rows in a batch.")]
_Device = Annotated[str, typer.Option(help="Where to run: cpu, cuda, cuda:1, ...")]
_DtypeOf = Annotated[Dtype, typer.Option(help="fp32, or autocast to a lower one with fp32 weights.")]


def main() -> None:
    """Run the command line; what deepytorch raises on purpose is one message and exit status 2, never a traceback."""
    try:
        app()
    except DeepytorchError as error:
        Console(stderr=True).print(f"[bold red]Error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        sys.exit(2)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"deepytorch {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""


@app.command()
def demo(
    data: _Data = None,
    model: _Model = Model.llama,
    steps: Annotated[int, typer.Option(min=4, help="Training steps of each arm.")] = 50,
    batch_size: _BatchSize = 8,
    device: _Device = "cpu",
    dtype: _DtypeOf = Dtype.fp32,
    out: Annotated[Path, typer.Option(help="Folder for the plot.")] = Path("deepytorch-demo"),
) -> None:
    """Fine-tune a small random-weight model in eager, under stock torch.compile and under deepytorch, and compare.

    About 3 minutes on 2 cores. Exits with 2 when an arm fails or its losses leave eager's.
    """
    from deepytorch.demo import DemoOptions, run_demo

    console = Console()
    _quiet_transformers()
    options = DemoOptions(
        data=data,
        model=model.value,
        steps=steps,
        batch_size=batch_size,
        device=device,
        dtype=dtype.value,
        out=out,
    )
    run_demo(options, console)


@bench.command()
def unpad(
    labels: Annotated[LabelsOf, typer.Option(help="Which tokens are learned.")] = LabelsOf.response,
    data: _Data = None,
    model: _Model = Model.llama,
    batch_size: _BatchSize = 8,
    steps: Annotated[int, typer.Option(min=1, help="Batches, each measured in every arm.")] = 8,
    rounds: Annotated[int, typer.Option(min=1, help="How often each batch is measured.")] = 3,
    dtype: _DtypeOf = Dtype.fp32,
    device: _Device = "cpu",
    json_file: Annotated[
        str | None, typer.Option("--json", metavar="FILE|-", help="Write the result as one JSON object; -: to stdout.")
    ] = None,
) -> None:
    """Compare steps with padding stripped to eager, to stock torch.compile and to packing by hand.

    The same batches go through every arm in alternation; losses and gradients are compared with eager's.
    """
    from deepytorch.bench.schema import write_result
    from deepytorch.bench.unpad import UnpadOptions, run_unpad

    console = Console(stderr=json_file == "-")  # stdout is then the JSON's alone
    _quiet_transformers()
    options = UnpadOptions(
        labels=labels.value,
        data=data,
        model=model.value,
        batch_size=batch_size,
        steps=steps,
        rounds=rounds,
        dtype=dtype.value,
        device=device,
    )
    with console.status("Starting") as status:
        result = run_unpad(options, notify=status.update)
    console.print(_unpad_table(result))
    if json_file == "-":
        typer.echo(json.dumps(result.to_json(), indent=2))
    elif json_file is not None:
        write_result(Path(json_file), result)


@app.command()
def doctor(
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object.")] = False,
) -> None:
    """Say which versions, devices and compilers are here, what is missing and how to get it."""
    from deepytorch.doctor import collect, render

    found = collect()
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    else:
        Console().print(render(found))


def _quiet_transformers() -> None:
    """Keep transformers' advice about configurations out of the tables."""
    try:
        from transformers import logging
    except ImportError:
        return  # building a model says what to install
    logging.set_verbosity_error()


def _unpad_table(result: UnpadResult) -> Group:
    title = f"{result.model}, batch {result.batch_size}, {result.dtype}, {result.device}"
    table = Table(title=title, title_justify="left", box=box.SIMPLE)
    table.add_column("arm", no_wrap=True)
    for heading in ("step ms", "deepytorch is", "quartiles", "compile s", "peak MB"):
        table.add_column(heading, justify="right")
    ratios = {
        "eager": result.ratio_vs_eager,
        "inductor": result.ratio_vs_inductor,
        "handpacked": result.ratio_vs_handpacked,
    }
    compile_seconds = {"inductor": result.compile_seconds_inductor, "deepytorch": result.compile_seconds}
    for arm, milliseconds in result.step_ms.items():
        ratio, quartiles = ratios.get(arm), result.ratio_quartiles.get(arm)
        table.add_row(
            arm,
            f"{milliseconds:,.1f}",
            f"{ratio:.2f}x" if ratio is not None else "",
            f"{quartiles[0]:.2f} - {quartiles[2]:.2f}" if quartiles is not None else "",
            f"{compile_seconds[arm]:.1f}" if arm in compile_seconds else "",
            f"{result.peak_bytes[arm] / 1e6:,.0f}" if arm in result.peak_bytes else "",
        )
    return Group(table, Text("\n".join(_unpad_lines(result))))


def _unpad_lines(result: UnpadResult) -> list[str]:
    return [
        f"Real tokens: {result.real_token_fraction:.3f} of the positions, so dropping pads alone gives up to "
        f"{result.token_ceiling:.2f}x in token-wise work; {result.labelled_fraction:.2f} of the tokens are labelled.",
        f"Against eager: loss within {result.max_loss_rel_diff:.1e}, gradients within {result.max_grad_rel_diff:.1e} "
        f"(relative), peak memory x {result.peak_memory_ratio_vs_eager:.2f}.",
        f"Steps: {result.steps_packed} packed, {result.steps_padded} padded, {result.recompiles} recompiles, "
        f"{result.host_ms_per_step:.2f} ms of host work each.",
        f"Batches without any padding: {result.ratio_no_padding:.2f}x stock torch.compile.",
    ]
