"""The commands of `deepytorch bench`, made of the benchmarks' own options."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import typer

from deepytorch.bench.benchmark import Benchmark
from deepytorch.cli.output import Output
from deepytorch.config import process_environment
from deepytorch.errors import ConfigError

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


def add_command(app: typer.Typer, benchmark: Benchmark[Any]) -> None:
    """Add the command of a benchmark. What follows its first argument, if it takes any, is no option of it."""
    kinds = get_type_hints(benchmark.options, include_extras=True).values()
    settings = {"allow_interspersed_args": False} if any(map(_is_argument, kinds)) else None
    app.command(benchmark.name, context_settings=settings)(command_of(benchmark))


def command_of(benchmark: Benchmark[Any]) -> Callable[..., None]:
    """Return the command of a benchmark: an option for each field of its options, of that name and default.

    A field whose type has a `typer.Argument` takes all arguments behind the options.
    """
    kinds = get_type_hints(benchmark.options, include_extras=True)
    own = [_parameter(each.name, kinds[each.name], each.default) for each in fields(benchmark.options)]
    common = [("out", _Out, None), ("again", _Again, False), ("timeout", _Timeout, 600.0)]
    keyword = inspect.Parameter.KEYWORD_ONLY
    parameters = [inspect.Parameter(name, keyword, default=default, annotation=kind) for name, kind, default in common]

    def command(out: Path | None, again: bool, timeout: float, **given: Any) -> None:
        texts = {name: _value(kinds[name], value, name) for name, value in given.items()}
        run_and_show(benchmark, benchmark.options(**texts), out, again=again, timeout_s=timeout)

    command.__signature__ = inspect.Signature([*own, *parameters])  # type: ignore[attr-defined]
    command.__doc__ = inspect.getdoc(benchmark.options)
    return command


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
        with output.console.status("Starting") as status:
            results = run_benchmark(benchmark, options, path, status.update, show, timeout_s, again)
        stopped = False
    except KeyboardInterrupt:
        if path is None or not path.exists():
            raise
        results, stopped = read_result(Results, path), True
    if process_environment().get("RANK", "0") != "0":  # of torchrun's processes the first has the results
        return
    for table in benchmark.tables(results):
        output.show(table)
    if path is not None:
        output.line(f"Results: {path}. As a page: deepytorch bench report {path.parent}")
    if stopped:
        output.line("Stopped: the same command goes on from here.")
        raise typer.Exit(130)
    benchmark.verdict(results)


def _is_argument(kind: Any) -> bool:
    return any(isinstance(extra, typer.models.ArgumentInfo) for extra in get_args(kind))


def _parameter(name: str, kind: Any, default: Any) -> inspect.Parameter:
    inner, *extras = get_args(kind)
    if _is_argument(kind):
        inner, default = list[str] | None, None
    elif get_origin(inner) is tuple:
        inner, default = str, ",".join(map(str, default))
        extras[0].metavar = extras[0].metavar or "LIST"
    return inspect.Parameter(
        name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=_annotated(inner, extras)
    )


def _annotated(kind: Any, extras: Sequence[Any]) -> Any:
    return Annotated[(kind, *extras)]  # type: ignore[valid-type]


def _value(kind: Any, value: Any, name: str) -> Any:
    """Return the parts of a list where an option has several values."""
    inner = get_args(kind)[0]
    if _is_argument(kind):
        return tuple(value or ())
    if get_origin(inner) is not tuple:
        return value
    of = get_args(inner)[0]
    parts = [part.strip() for part in value.split(",") if part.strip()]
    try:
        return tuple(of(part) for part in parts)
    except ValueError:
        raise ConfigError(
            f"--{name.replace('_', '-')} is {value!r}; expected numbers with commas, as in 1,2."
        ) from None
