"""The commands of `deepytorch bench`, made of the benchmarks' own options."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from deepytorch.bench.benchmark import Benchmark
from deepytorch.bench.table import print_table
from deepytorch.cli.options import add_command
from deepytorch.cli.output import Output
from deepytorch.config import process_environment

_Out = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="The result file, which gets each row when it is measured. A later run with the same options goes on with "
        "it. Default: the benchmark's name, and .json.",
    ),
]
_Again = Annotated[bool, typer.Option("--again", help="Begin anew where the result file has rows already.")]
_Timeout = Annotated[
    float, typer.Option(metavar="SECONDS", help="End processes that give no sign of life for so long; the run goes on.")
]


def add_benchmark(app: typer.Typer, benchmark: Benchmark[Any]) -> None:
    """Add the command of a benchmark."""

    def command(options: Any, out: Path | None, again: bool, timeout: float) -> None:
        run_and_show(benchmark, options, out, again=again, timeout_s=timeout)

    common = (("out", _Out, None), ("again", _Again, False), ("timeout", _Timeout, 600.0))
    add_command(app, benchmark.name, benchmark.options, command, *common)


def run_and_show(benchmark: Benchmark[Any], options: Any, out: Path | None, *, again: bool, timeout_s: float) -> None:
    """Measure, show rows as they come and the tables in the end. Ctrl-C ends it, with the tables of what is done."""
    from deepytorch.bench.results import Results, read_result
    from deepytorch.bench.run import run_benchmark

    output = Output(None)
    path = out or (Path(f"{benchmark.name}.json") if benchmark.keeps(options) else None)
    above: list[str] = []

    def show(rows: Sequence[Any]) -> None:
        nonlocal above
        head = benchmark.head(rows)
        for line in [*([] if head == above else head), *benchmark.lines(rows)]:
            output.line(line)
        above = head

    try:
        with output.progress() as notify:
            results = run_benchmark(benchmark, options, path, notify, show, timeout_s, again)
        stopped = False
    except KeyboardInterrupt:
        if path is None or not path.exists():
            raise
        results, stopped = read_result(Results, path), True
    if process_environment().get("RANK", "0") != "0":  # of torchrun's processes the first has the results
        return
    for table in benchmark.tables(results):
        print_table(output.console, table)
    if path is not None:
        output.line(f"Results: {path}. As a page: deepytorch bench report {path.parent}")
    if stopped:
        output.line("Stopped: the same command goes on from here.")
        raise typer.Exit(130)
    benchmark.verdict(results)
