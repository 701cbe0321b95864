"""`deepytorch bench report`: the result files of a folder as two pages, and what is worse or better than it was before.

A page is a list of sections, one for each file; `_markdown` and `_html` write the same sections.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from urllib.parse import quote

from deepytorch.bench.options import check_at_least
from deepytorch.bench.plots import Plot, draw, save_figure, svg_of
from deepytorch.bench.results import Results, Row, decoded, direction, read_json, write_text
from deepytorch.bench.run import words_of
from deepytorch.bench.suite import BENCHMARKS
from deepytorch.bench.table import Table, html_of, markdown_of, markdown_text
from deepytorch.errors import ConfigError, DataError

LAYOUT = 1  # of the result files that are read

_ROUNDING = 1e-5  # differences of losses and gradients below it are those of fp32
_STYLE = """
:root { color-scheme: light dark; --page: #fcfcfb; --card: #ffffff; --text: #1b1c1e; --soft: #5c6066; --line: #dfe1e4; }
@media (prefers-color-scheme: dark) {
  :root { --page: #17181a; --card: #202225; --text: #e8e9eb; --soft: #a3a8af; --line: #383b40; } }
@media (min-width: 700px) { td:first-child { white-space: nowrap; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1080px; padding: 24px 20px 48px; background: var(--page); color: var(--text);
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 22px; margin: 0 0 2px; } h3 { font-size: 14px; margin: 24px 0 4px; }
h2 { font-size: 18px; margin: 40px 0 8px; padding-top: 12px; border-top: 1px solid var(--line); }
h1, h2, h3, p, li, dd, pre { overflow-wrap: anywhere; } p, li { max-width: 80ch; } a { color: inherit; }
.soft, dt { color: var(--soft); font-size: 13px; } nav a { margin-right: 16px; }
dl { display: grid; grid-template-columns: max-content 1fr; gap: 2px 16px; margin: 0 0 8px; } dd { margin: 0; }
pre, figure { margin: 8px 0; padding: 10px 12px; background: var(--card); border: 1px solid var(--line);
  border-radius: 8px; overflow-x: auto; font-size: 13px; white-space: pre-wrap; }
.plots { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 480px), 1fr)); gap: 0 12px; }
svg { display: block; width: 100%; max-width: 760px; min-width: 400px; height: auto; }
.scroll { overflow: auto; max-height: 520px; } table { border-collapse: collapse; font-size: 14px; }
th, td { text-align: left; padding: 4px 20px 4px 0; border-bottom: 1px solid var(--line); vertical-align: top; }
th { color: var(--soft); font-weight: 500; position: sticky; top: 0; background: var(--page); }
.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ReportOptions:
    """The folder of results, the earlier one they are compared with, and the pages.

    Attributes:
        folder: The folder of result files.
        against: A folder of earlier results.
        html: The page as HTML; None is report.html in the folder.
        markdown: The page as Markdown; None is report.md in the folder.
        tolerance: By how much a figure may become worse, as a share, before it is shown; likewise better.
        title: Of both pages; empty is one with the folder's name.
    """

    folder: Path
    against: Path | None = None
    html: Path | None = None
    markdown: Path | None = None
    tolerance: float = 0.05
    title: str = ""


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


@dataclass(frozen=True, kw_only=True, slots=True)
class _Section:
    title: str
    facts: Mapping[str, str] = field(default_factory=dict)
    notes: Sequence[str] = ()
    command: str = ""
    tables: Sequence[Table] = ()
    plots: Mapping[str, Plot] = field(default_factory=dict)  # by the name of its picture


def run_report(options: ReportOptions) -> Report:
    """Read the results and write both pages, and a picture of each plot in `plots` of the folder, for Markdown.

    Raises `ConfigError` for options that are not accepted, and `DataError` for a result file that cannot be read.
    """
    check_at_least(options, 0, "tolerance")
    found, others = _read(options.folder)
    sections = [_overview(found, others)]
    counts: dict[str, int] = {}
    if options.against is not None:
        comparison, counts = _compare(found, _read(options.against)[0], options)
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
    write_text(report.markdown, "\n".join(_markdown(title, sections, shown)) + "\n", "--markdown")
    write_text(report.html, _html(title, sections), "--html")
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
        numbers = [_number(row.figures[name]) if name in row.figures else "" for name in figures]
        words = [row.texts.get(name, "") for name in texts]
        lines.append((*(_value(row.key[name]) for name in keys), *numbers, *words))
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


def _overview(found: Mapping[str, Results], others: Sequence[str]) -> _Section:
    lines = tuple(
        (name, results.benchmark, str(len(results.rows)), str(_failed(results)), results.date, results.machine)
        for name, results in found.items()
    )
    columns = ("file", "benchmark", "rows", "not measured", "date", "machine")
    table = Table("Result files", columns, lines, ("file", "benchmark", "date", "machine"))
    return _Section(title="Overview", facts={"Other files": ", ".join(others)} if others else {}, tables=[table])


def _section(name: str, results: Results) -> _Section:
    """Return the section of a result file, whose tables and plots are the benchmark's own where it is known."""
    benchmark = BENCHMARKS.get(results.benchmark)
    tables = list(benchmark.tables(results) if benchmark else generic_tables(results))
    plots = benchmark.plots(results) if benchmark else []
    failed = tuple((what, row.failed) for what, row in _named(results) if row.failed)
    if failed:
        tables.append(Table("Not measured", ("row", "why"), failed, ("row", "why")))
    versions = ", ".join(f"{package} {version}" for package, version in results.versions.items())
    return _Section(
        title=f"{results.benchmark}: {name}",
        facts={"Machine": results.machine, "Versions": versions, "Date": results.date},
        notes=results.notes,
        command=results.command,
        tables=tables,
        plots={f"{name.removesuffix('.json')}-{number}.png": plot for number, plot in enumerate(plots, 1)},
    )


def _compare(
    found: Mapping[str, Results], earlier: Mapping[str, Results], options: ReportOptions
) -> tuple[_Section, dict[str, int]]:
    """Return the section and the counts of a comparison of rows with those of the same benchmark and key.

    Where several files have such a row, one of the same machine, and then one of the same name, is preferred.
    """
    before: dict[object, list[tuple[str, Results, str, Row]]] = {}
    for name, results in earlier.items():
        for what, row in _named(results):
            before.setdefault(_identity(results, row), []).append((name, results, what, row))
    compared, num_new, newly_failed = set(), 0, 0
    moved: list[tuple[float, tuple[str, ...]]] = []
    ends: list[tuple[str, ...]] = []
    besides: dict[tuple[str, ...], None] = {}  # in order, each once
    for name, results in found.items():
        for what, row in _named(results):
            same = before.get(_identity(results, row))
            if same is None:
                num_new += 1
                continue
            _, old_results, _, old = min(same, key=lambda each: (each[1].machine != results.machine, each[0] != name))
            compared.add(id(old))
            newly_failed += bool(row.failed) and not old.failed
            moved += [(change, (name, what, *cells)) for change, cells in _worse(old, row)]
            ends += [(name, what, *cells) for cells in _ends(old, row)]
            besides |= dict.fromkeys((name, *cells) for cells in _differences(old_results, results))
    moved = sorted((each for each in moved if abs(each[0]) > options.tolerance), key=lambda each: -abs(each[0]))
    rows = (each for candidates in before.values() for each in candidates)
    gone = [(name, what, row.failed or "measured", "missing") for name, _, what, row in rows if id(row) not in compared]
    worse = tuple(cells for change, cells in moved if change > 0)
    better = tuple(cells for change, cells in moved if change < 0)
    figures = ("file", "row", "figure", "before", "now", "change")
    lines, others = (("file", what, "before", "now") for what in ("row", "what"))
    tables = (
        Table("Regressions", figures, worse, figures[:3]),
        Table("Improvements", figures, better, figures[:3]),
        Table("Rows and figures that are missing, fail, or no longer fail", lines, (*gone, *ends), lines),
        Table("What else differs between these runs", others, tuple(besides), others),
    )
    least = _percent(options.tolerance).removeprefix("+")
    found_in_words = (
        f"{len(compared)} rows compared: {len(worse)} figures are worse by more than {least} of what they were, "
        f"{len(better)} are better. {len(gone)} rows are missing, {newly_failed} newly fail, {num_new} are new."
    )
    notes = [found_in_words, *(["Machines, versions or options differ: see the last table."] if besides else [])]
    section = _Section(
        title=f"Compared with {options.against}", notes=notes, tables=[table for table in tables if table.rows]
    )
    numbers = (len(worse), len(better), len(gone), newly_failed)
    return section, dict(zip(("regressions", "improvements", "missing", "newly_failed"), numbers, strict=True))


def _worse(old: Row, new: Row) -> Iterator[tuple[float, tuple[str, ...]]]:
    """Yield how much worse each figure has become, as a share, and the cells that show it."""
    if old.failed or new.failed:
        return
    for name, before in old.figures.items():
        now = new.figures.get(name, before)
        change = round(now / before - 1, 9) if before else (math.inf if now else 0.0)
        is_rounding = name.endswith("_diff") and max(before, now) < _ROUNDING
        if direction(name) and change and not is_rounding:
            yield -direction(name) * change, (name, _number(before), _number(now), _percent(change))


def _ends(old: Row, new: Row) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a row that fails or no longer fails, and of figures that a measured row lacks."""
    if bool(old.failed) != bool(new.failed):
        yield old.failed or "measured", new.failed or "measured"
    elif not new.failed:
        for name in (each for each in old.figures if each not in new.figures):
            yield f"{name} {_number(old.figures[name])}", "no such figure"


def _differences(old: Results, new: Results) -> Iterator[tuple[str, ...]]:
    before, now = ({"machine": each.machine} | each.versions | each.options for each in (old, new))
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) != now.get(name):
            yield name, _value(before.get(name)), _value(now.get(name))


def _percent(change: float) -> str:
    return "from 0" if math.isinf(change) else f"{change:+.1%}"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value == int(value) or value >= 1e4 else f"{value:.4g}"


def _value(value: object) -> str:
    if value is None:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _identity(results: Results, row: Row) -> object:
    return results.benchmark, frozenset(row.key.items())


def _named(results: Results) -> list[tuple[str, Row]]:
    """Return the rows with the part of their keys in which the rows of the file differ, as text."""
    first = results.rows[0].key if results.rows else {}
    same = {name for name in first if len(results.having(**{name: first[name]})) == len(results.rows) > 1}
    own = ({name: value for name, value in row.key.items() if name not in same} for row in results.rows)
    return list(zip(map(words_of, own), results.rows, strict=True))


def _failed(results: Results) -> int:
    return sum(bool(row.failed) for row in results.rows)


def _markdown(title: str, sections: Iterable[_Section], pictures: str) -> list[str]:
    """Return the lines of the page. pictures: the folder of pictures, as seen from the page."""
    lines = [f"# {markdown_text(title)}"]
    for section in sections:
        lines += ["", f"## {markdown_text(section.title)}", ""]
        lines += [f"- {name}: {markdown_text(text)}" for name, text in section.facts.items()]
        lines += [f"- {markdown_text(note)}" for note in section.notes]
        if section.command:
            fence = "`" * max([3, *(1 + len(ticks) for ticks in re.findall("`+", section.command))])
            lines += ["", f"{fence}bash", section.command, fence]
        for table in section.tables:
            lines += ["", *markdown_of(table)]
        for name, plot in section.plots.items():
            lines += ["", f"![{markdown_text(plot.title)}]({pictures}/{quote(name)})"]
    return lines


def _html(title: str, sections: Sequence[_Section]) -> str:
    links = [f'<a href="#s{number}">{escape(section.title)}</a>' for number, section in enumerate(sections)][1:]
    parts = []
    for number, section in enumerate(sections):
        facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in section.facts.items())
        notes = "".join(f"<li>{escape(note)}</li>" for note in section.notes)
        plots = "".join(f"<figure>{svg_of(plot, name)}</figure>" for name, plot in section.plots.items())
        parts += [
            f'<section id="s{number}"><h2>{escape(section.title)}</h2>',
            f"<dl>{facts}</dl>" if facts else "",
            f"<ul>{notes}</ul>" if notes else "",
            f"<pre><code>{escape(section.command)}</code></pre>" if section.command else "",
            f'<div class="plots">{plots}</div>' if plots else "",
            *map(html_of, section.tables),
            "</section>",
        ]
    return f"""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(title)}</title><style>{_STYLE}</style></head><body>
<h1>{escape(title)}</h1>
<nav>{" ".join(links)}</nav>
{"".join(parts)}
</body></html>
"""
