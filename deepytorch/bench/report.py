"""`deepytorch bench report`: the result files of a folder as two pages, with a section for each file."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated
from urllib.parse import quote

from typer import Argument, Option

from deepytorch.bench.comparison import compare, named_rows
from deepytorch.bench.options import check_at_least
from deepytorch.bench.pages import Section, markdown_page, sections_page
from deepytorch.bench.plots import draw, save_figure
from deepytorch.bench.results import Results, Row, decoded, read_json, write_text
from deepytorch.bench.suite import BENCHMARKS
from deepytorch.bench.table import Table, number_text, value_text
from deepytorch.errors import ConfigError, DataError

LAYOUT = 1  # of the result files that are read


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """Make one HTML page and one Markdown page of result files: tables, plots, machine, versions, commands.

    The HTML page needs no network.
    """

    folder: Annotated[Path, Argument(metavar="DIR", help="The folder of result files.")]
    against: Annotated[
        Path | None,
        Option(metavar="DIR", help="An earlier folder: the report says what is worse, better or missing."),
    ] = None
    html: Annotated[Path | None, Option(metavar="FILE", help="The page. Default: DIR/report.html.")] = None
    markdown: Annotated[Path | None, Option(metavar="FILE", help="The page. Default: DIR/report.md.")] = None
    tolerance: Annotated[
        float, Option(help="The share by which a figure may be worse or better and is not said to be.")
    ] = 0.05
    title: Annotated[str, Option(help="The title of both pages.", show_default=False)] = ""

    def __post_init__(self) -> None:
        """Raise `ConfigError` for a value that is not accepted."""
        check_at_least(self, 0, "tolerance")


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """The pages that were written, and how much was found.

    Attributes:
        html, markdown: The pages.
        files, rows, failed: The numbers of result files, of their rows, and of rows that could not be measured.
        regressions, improvements: The numbers of figures; 0 where nothing is compared, as those below.
        missing, newly_failed: The numbers of earlier rows that are not there, or could not be measured this time.
    """

    html: Path
    markdown: Path
    files: int
    rows: int
    failed: int
    regressions: int = 0
    improvements: int = 0
    missing: int = 0
    newly_failed: int = 0


def run_report(options: ReportOptions) -> Report:
    """Read the results and write both pages, and a picture of each plot in `plots` of the folder, for Markdown.

    Raises `ConfigError` for a folder that is not there, and `DataError` for a result file that cannot be read.
    """
    found, others = _read(options.folder)
    sections = [_overview(found, others)]
    counts: dict[str, int] = {}
    if options.against is not None:
        earlier, title = _read(options.against)[0], f"Compared with {options.against}"
        comparison, counts = compare(found, earlier, title, options.tolerance)
        sections.append(comparison)
    sections += [_section(name, results) for name, results in found.items()]
    report = Report(
        html=options.html or options.folder / "report.html",
        markdown=options.markdown or options.folder / "report.md",
        files=len(found),
        rows=sum(len(results.rows) for results in found.values()),
        failed=sum(_failed(results) for results in found.values()),
        **counts,
    )
    title = options.title or f"Benchmark results: {options.folder.resolve().name}"
    pictures = options.folder / "plots"
    for section in sections:
        for name, plot in section.plots.items():
            save_figure(draw(plot), pictures / name, "Give a folder that can be written to.")
    shown = quote(Path(os.path.relpath(pictures, report.markdown.parent)).as_posix())
    write_text(report.markdown, "\n".join(markdown_page(title, sections, shown)) + "\n", "--markdown")
    write_text(report.html, sections_page(title, sections), "--html")
    return report


def generic_tables(results: Results) -> list[Table]:
    """Return keys, figures and texts of results: a table for the rows of each set of keys."""
    kinds: dict[tuple[str, ...], list[Row]] = {}
    for row in results.rows:
        kinds.setdefault(tuple(row.key), []).append(row)
    return [_generic(results.benchmark, keys, rows) for keys, rows in kinds.items()]


def _generic(title: str, keys: tuple[str, ...], rows: Sequence[Row]) -> Table:
    figures = tuple(dict.fromkeys(name for row in rows for name in row.figures))
    texts = tuple(dict.fromkeys(name for row in rows for name in row.texts))
    lines = []
    for row in rows:
        numbers = [number_text(row.figures[name]) if name in row.figures else "" for name in figures]
        words = [row.texts.get(name, "") for name in texts]
        lines.append((*(value_text(row.key[name]) for name in keys), *numbers, *words))
    return Table(title, (*keys, *figures, *texts), tuple(lines), (*keys, *texts))


def _read(folder: Path) -> tuple[dict[str, Results], list[str]]:
    """Return the results of a folder by file name, and the names of its other JSON files."""
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder, expected one with result files. Give the folder that they are in.")
    found: dict[str, Results] = {}
    others = []
    for path in sorted(folder.glob("*.json")):
        content = read_json(path)
        if not (isinstance(content, dict) and {"benchmark", "rows"} <= set(content)):
            others.append(path.name)
            continue
        try:
            results = decoded(Results, content)
            results.require(results.layout == LAYOUT, "layout", f"{LAYOUT}")
            for number, row in enumerate(results.rows):
                row.require(row.key not in [each.key for each in results.rows[:number]], "key", "each key once")
        except DataError as error:
            remedy = "Run its benchmark again, or move the file to another folder."
            raise DataError(f"{path} has a benchmark and rows, but is no result file. {error} {remedy}") from error
        found[path.name] = results
    if not found:
        raise DataError(
            f"{folder} has {len(others)} JSON files and none is a result file, expected one or more with a benchmark "
            "and rows. Write them there with the --out option of deepytorch bench."
        )
    return found, others


def _overview(found: Mapping[str, Results], others: Sequence[str]) -> Section:
    lines = tuple(
        (name, results.benchmark, str(len(results.rows)), str(_failed(results)), results.date, results.machine)
        for name, results in found.items()
    )
    columns = ("file", "benchmark", "rows", "not measured", "date", "machine")
    table = Table("Result files", columns, lines, ("file", "benchmark", "date", "machine"))
    return Section(title="Overview", facts={"Other files": ", ".join(others)} if others else {}, tables=[table])


def _section(name: str, results: Results) -> Section:
    """Return the section of a result file, whose tables and plots are the benchmark's own where it is known."""
    benchmark = BENCHMARKS.get(results.benchmark)
    tables = list(benchmark.tables(results) if benchmark else generic_tables(results))
    plots = benchmark.plots(results) if benchmark else []
    failed = tuple((what, row.failed) for what, row in named_rows(results) if row.failed)
    if failed:
        tables.append(Table("Not measured", ("row", "why"), failed, ("row", "why")))
    versions = ", ".join(f"{package} {version}" for package, version in results.versions.items())
    return Section(
        title=f"{results.benchmark}: {name}",
        facts={"Machine": results.machine, "Versions": versions, "Date": results.date},
        notes=results.notes,
        command=results.command,
        tables=tables,
        plots={f"{name.removesuffix('.json')}-{number}.png": plot for number, plot in enumerate(plots, 1)},
    )


def _failed(results: Results) -> int:
    return sum(bool(row.failed) for row in results.rows)
