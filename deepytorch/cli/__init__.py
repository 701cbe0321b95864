"""The command line, `deepytorch`: its commands in the order of `--help`.

torch takes seconds to import. So a command imports the modules that it needs when it runs, and --help and --version
answer at once.
"""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console
from rich.markup import escape

from deepytorch.bench.report import ReportOptions
from deepytorch.bench.suite import BENCHMARKS
from deepytorch.cli import (
    bench_report,
    bench_roofline,
    cache,
    demo,
    lab,
    machine,
    profile,
    run,
    simulate,
    verify,
)
from deepytorch.cli.benchmark import add_benchmark
from deepytorch.cli.options import JsonFile, add_command
from deepytorch.config import process_environment
from deepytorch.errors import DeepytorchError
from deepytorch.switch import SWITCH
from deepytorch.verify.records import VerifyOptions
from deepytorch.version import __version__

_BEFORE_A_COMMAND = {"allow_interspersed_args": False}  # later arguments belong to the command that is started

app = typer.Typer(
    name="deepytorch",
    help="Faster training in PyTorch, without the padding. `import deepytorch` at the top of a script switches it on; "
    "these commands try it out, check it, measure it, and say what a machine lacks.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
bench = typer.Typer(help="Measure what deepytorch gains on this machine.", no_args_is_help=True)

app.command("demo")(demo.demo)
app.command("run", context_settings=_BEFORE_A_COMMAND)(run.run)
add_command(app, "verify", VerifyOptions, verify.verify, ("json_file", JsonFile, None))
app.command("profile", context_settings=_BEFORE_A_COMMAND)(profile.profile)
app.command("doctor")(machine.doctor)
app.command("gpu-check")(machine.gpu_check)
app.command("config")(machine.config)
app.command("build")(machine.build)
app.add_typer(cache.cache, name="cache")
app.add_typer(bench, name="bench")
for _benchmark in BENCHMARKS.values():
    add_benchmark(bench, _benchmark)
bench.command("roofline")(bench_roofline.roofline)
add_command(bench, "report", ReportOptions, bench_report.report)
app.command("lab", context_settings=_BEFORE_A_COMMAND)(lab.lab)
app.command("simulate")(simulate.simulate)


def main() -> None:
    """Run the command line. An error of deepytorch's own is one message and exit status 2, never a traceback."""
    SWITCH.enabled = False  # measured code says itself what is compiled
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
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Take the options that stand before a command."""
    # Measured and compared code is to be compiled from the first step on; `doctor` shows the user's own setting,
    # and what `run` starts has it.
    if context.invoked_subcommand not in ("lab", "doctor", "run"):
        process_environment().setdefault("DEEPYTORCH_COMPILE", "wait")
    if context.invoked_subcommand == "bench":
        from deepytorch.bench.processes import sigterm_unwinds

        context.with_resource(sigterm_unwinds())  # what a benchmark has started ends with it
