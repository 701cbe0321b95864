"""The comparison of results with earlier ones: figures that are worse or better, and rows that are missing or fail."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

from deepytorch.bench.pages import Section
from deepytorch.bench.results import Results, Row, direction
from deepytorch.bench.run import words_of
from deepytorch.bench.table import Table, number_text, value_text

_ROUNDING = 1e-5  # differences of losses and gradients below it are those of fp32


def compare(
    found: Mapping[str, Results], earlier: Mapping[str, Results], title: str, tolerance: float
) -> tuple[Section, dict[str, int]]:
    """Return the section and the counts of a comparison of rows with those of the same benchmark and key.

    tolerance: the share of what it was by which a figure may change and is not shown.

    Where several files have such a row, one of the same machine, and then one of the same name, is preferred.
    """
    before: dict[object, list[tuple[str, Results, str, Row]]] = {}
    for name, results in earlier.items():
        for what, row in named_rows(results):
            before.setdefault(_identity(results, row), []).append((name, results, what, row))
    compared, num_new, newly_failed = set(), 0, 0
    moved: list[tuple[float, tuple[str, ...]]] = []
    ends: list[tuple[str, ...]] = []
    besides: dict[tuple[str, ...], None] = {}  # in order, each once
    for name, results in found.items():
        for what, row in named_rows(results):
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
    moved = sorted((each for each in moved if abs(each[0]) > tolerance), key=lambda each: -abs(each[0]))
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
    least = _percent(tolerance).removeprefix("+")
    found_in_words = (
        f"{len(compared)} rows compared: {len(worse)} figures are worse by more than {least} of what they were, "
        f"{len(better)} are better. {len(gone)} rows are missing, {newly_failed} newly fail, {num_new} are new."
    )
    notes = [found_in_words, *(["Machines, versions or options differ: see the last table."] if besides else [])]
    counts = {"regressions": len(worse), "improvements": len(better), "missing": len(gone)}
    section = Section(title=title, notes=notes, tables=[table for table in tables if table.rows])
    return section, counts | {"newly_failed": newly_failed}


def _worse(old: Row, new: Row) -> Iterator[tuple[float, tuple[str, ...]]]:
    """Yield how much worse each figure has become, as a share, and the cells that show it."""
    if old.failed or new.failed:
        return
    for name, before in old.figures.items():
        now = new.figures.get(name, before)
        change = round(now / before - 1, 9) if before else (math.inf if now else 0.0)
        is_rounding = name.endswith("_diff") and max(before, now) < _ROUNDING
        if direction(name) and change and not is_rounding:
            yield -direction(name) * change, (name, number_text(before), number_text(now), _percent(change))


def _ends(old: Row, new: Row) -> Iterator[tuple[str, ...]]:
    """Yield the cells of a row that fails or no longer fails, and of figures that a measured row lacks."""
    if bool(old.failed) != bool(new.failed):
        yield old.failed or "measured", new.failed or "measured"
    elif not new.failed:
        for name in (each for each in old.figures if each not in new.figures):
            yield f"{name} {number_text(old.figures[name])}", "no such figure"


def _differences(old: Results, new: Results) -> Iterator[tuple[str, ...]]:
    before, now = ({"machine": each.machine} | each.versions | each.options for each in (old, new))
    for name in dict.fromkeys((*before, *now)):
        if before.get(name) != now.get(name):
            yield name, value_text(before.get(name)), value_text(now.get(name))


def _percent(change: float) -> str:
    return "from 0" if math.isinf(change) else f"{change:+.1%}"


def _identity(results: Results, row: Row) -> object:
    return results.benchmark, frozenset(row.key.items())


def named_rows(results: Results) -> list[tuple[str, Row]]:
    """Return the rows with the part of their keys in which the rows of the file differ, as text."""
    first = results.rows[0].key if results.rows else {}
    same = {name for name in first if len(results.having(**{name: first[name]})) == len(results.rows) > 1}
    own = ({name: value for name, value in row.key.items() if name not in same} for row in results.rows)
    return list(zip(map(words_of, own), results.rows, strict=True))
