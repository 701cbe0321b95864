"""Tables of model classes, for a terminal and the page of the documentation: counts, reasons, and each class."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence

from deepytorch.bench.results import Results, Row
from deepytorch.bench.table import Table

EQUAL, WRONG, FAILS, EAGER_FAILS, NOT_BUILT = "equal", "wrong", "fails", "eager fails", "not built"
GRAPH, ENTRY, PART, DECLINED = "in graph", "at entry", "in part", "declined"
NO_MASK = "no attention mask"
TITLES = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Sequence to sequence",
    "sequence": "Sequence classification",
    "token": "Token classification",
    "question": "Question answering",
}
COUNTS = ("", "classes", "trained", EQUAL, WRONG, FAILS, GRAPH, ENTRY, PART, DECLINED, "with a mask", "packed")
_ABOUT = (
    "equal: loss, outputs at tokens, every gradient and the weights, in each step. In brackets: the relative "
    "difference that comes nearest to what is allowed; beside it own, eager's own if every weight is moved by its last "
    "bit. Ten times that is allowed, and at least {bounds}.",
    "where: padding is stripped in the graph, at model entry, in part (in some regions of the model), or not at all "
    "(declined).",
    "packed: in the graph or at entry, of the classes with an attention mask that eager trains (with a mask).",
)


def tables_of(results: Results) -> list[Table]:
    """Return the tables of a result file: counts, reasons, and the classes of each task."""
    from deepytorch.bench.model_classes.judge import BOUNDS  # loads torch

    rows = sorted(results.rows, key=lambda row: str(row.key["class"]))
    listed = max((row.figures.get("listed", 0.0) for row in rows), default=0.0)
    versions = sorted({row.texts["deepytorch"] for row in rows if not row.failed})
    bounds = ", ".join(f"{bound:.0e} ({kind})" for kind, bound in BOUNDS.items())
    notes = (
        "Every class that transformers lists for these tasks, small, with random weights, on rows of uneven lengths, "
        "trained for a few steps in eager and with the import, in processes of their own.",
        *(text.format(bounds=bounds) for text in _ABOUT),
        f"{len(rows)} of {listed:.0f} classes were run. Lowering {results.options['lowering']}, fp32, one thread; "
        f"deepytorch {'; '.join(versions)}.",
    )
    tasks, *counts = zip(COUNTS, *counts_of(rows), strict=True)
    found = [Table("Model classes", tasks, tuple(counts), ("",), notes)]
    reasons = tuple((str(len(of)), why) for why, of in reasons_of(rows))
    if reasons:
        found.append(Table("Why not packed", ("classes", "reason"), reasons, ("reason",)))
    columns = ("class", "numbers", "own", "where", "compile s", "why not, notes")
    left = ("class", "numbers", "where", "why not, notes")
    for task, title in TITLES.items():
        these = tuple(line_of(row) for row in rows if row.key["task"] == task)
        if these:
            found.append(Table(title, columns, these, left))
    return found


def counts_of(rows: Sequence[Row]) -> list[tuple[str, ...]]:
    """Return `COUNTS` of each task that has rows, and of all."""
    lines = []
    for task in (*TITLES, ""):
        these = [row for row in rows if row.key["task"] == task or not task]
        if not these:
            continue
        trained = [row for row in these if _is_trained(row)]
        outcomes = Counter(row.texts.get("outcome") for row in these)
        masked = [row for row in trained if NO_MASK not in row.texts["notes"]]
        where = Counter(row.texts.get("where", DECLINED) for row in trained)
        packed = f"{sum(map(_is_packed, masked)) / len(masked):.0%}" if masked else "-"
        numbers = (len(these), len(trained), outcomes[EQUAL], outcomes[WRONG], outcomes[FAILS])
        ways = (where[GRAPH], where[ENTRY], where[PART], where[DECLINED])
        lines.append((task or "all", *map(str, (*numbers, *ways, len(masked))), packed))
    return lines


def reasons_of(rows: Sequence[Row]) -> list[tuple[str, list[str]]]:
    """Return the reasons of what was not packed, with the models, most first, whatever their names and numbers."""
    found: dict[str, list[str]] = {}
    for row in rows:
        if _is_trained(row) and not _is_packed(row):
            name = str(row.key["class"])
            kinds = [_kind(reason, name) for reason in _reasons(row) or ["no region was compiled"]]
            for reason in dict.fromkeys(kinds):
                found.setdefault(reason, []).append(name)
    return sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))


def _kind(reason: str, name: str) -> str:
    return re.sub(r"\d+", "N", reason.replace(name, "the class"))


def _reasons(row: Row) -> list[str]:
    return row.texts.get("reasons", "").splitlines()


def _is_trained(row: Row) -> bool:
    return row.texts.get("outcome") in (EQUAL, WRONG, FAILS)


def _is_packed(row: Row) -> bool:
    return row.texts.get("where") in (GRAPH, ENTRY)


def line_of(row: Row) -> tuple[str, ...]:
    """Return a model's line: class, numbers, eager's own sensitivity, where it is packed, seconds, and why not."""
    name, texts, figures = str(row.key["class"]), row.texts, row.figures
    error = row.failed or texts.get("error", "")
    if not _is_trained(row):
        return name, texts.get("outcome", "not measured"), "", "", "", error
    numbers = f"{texts['outcome']} ({figures['rel_diff']:.0e})" if "rel_diff" in figures else texts["outcome"]
    own = f"{figures['own_rel_diff']:.0e}" if "own_rel_diff" in figures else ""
    why = error or ("" if _is_packed(row) else "; ".join(_reasons(row)))
    notes = "; ".join(filter(None, [texts["notes"], why]))
    return name, numbers, own, texts.get("where", DECLINED), f"{figures.get('compile_s', 0.0):.1f}", notes
