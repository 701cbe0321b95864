"""The page of the documentation that says what was found, made from the lines of a file."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

from deepytorch.bench.model_classes.judge import BOUNDS
from deepytorch.bench.model_classes.run import (
    DECLINED,
    EAGER_FAILS,
    ENTRY,
    EQUAL,
    FAILS,
    GRAPH,
    NOT_BUILT,
    PART,
    WRONG,
    Line,
)

TITLES = {
    "causal": "Causal language models",
    "masked": "Masked language models",
    "seq2seq": "Sequence to sequence",
    "sequence": "Sequence classification",
    "token": "Token classification",
    "question": "Question answering",
}
COUNTS = (
    "task",
    "classes",
    "trained",
    "equal",
    "wrong",
    "fail",
    "in graph",
    "at entry",
    "in part",
    "declined",
    "packed",
)


def counts_of(lines: Sequence[Line]) -> list[tuple[str, ...]]:
    """Return a row of `COUNTS` for each task that has lines, and one for all."""
    rows = []
    for task in (*TITLES, ""):
        these = [line for line in lines if line.task == task or not task]
        if not these:
            continue
        trained = [line for line in these if line.outcome in (EQUAL, WRONG, FAILS)]
        outcomes = Counter(line.outcome for line in these)
        masked = [line for line in trained if line.has_mask]
        how = Counter(line.how for line in trained)
        packed = sum(line.how in (GRAPH, ENTRY) for line in masked)
        share = f"{packed / len(masked):.0%} of {len(masked)}" if masked else "-"
        numbers = (len(these), len(trained), outcomes[EQUAL], outcomes[WRONG], outcomes[FAILS])
        ways = (how[GRAPH], how[ENTRY], how[PART], how[DECLINED])
        rows.append((TITLES.get(task, "all"), *map(str, (*numbers, *ways)), share))
    return rows


def reasons_of(lines: Sequence[Line]) -> list[tuple[str, list[str]]]:
    """Return the reasons of what was not packed, with the models, most first, whatever their names and numbers."""
    found: dict[str, list[str]] = {}
    for line in lines:
        if line.outcome in (EQUAL, WRONG, FAILS) and line.how not in (GRAPH, ENTRY):
            kinds = [_kind(reason, line.name) for reason in line.reasons or ["no region was compiled"]]
            for reason in dict.fromkeys(kinds):
                found.setdefault(reason, []).append(line.name)
    return sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))


def _kind(reason: str, name: str) -> str:
    return re.sub(r"\d+", "N", reason.replace(name, "the class"))


def row_of(line: Line) -> tuple[str, ...]:
    """Return a model's row: class, numbers, eager's own sensitivity, where it is packed, seconds, and why not."""
    if line.outcome in (NOT_BUILT, EAGER_FAILS):
        return line.name, line.outcome, "", "", "", line.error
    numbers = line.outcome if line.difference is None else f"{line.outcome} ({line.difference:.0e})"
    own = "" if line.own is None else f"{line.own:.0e}"
    why = line.error or ("" if line.how in (GRAPH, ENTRY) else "; ".join(line.reasons))
    notes = [] if line.has_mask else ["no attention mask"]
    notes += ["draws random numbers"] if line.draws else []
    notes += [] if line.finite else ["eager's numbers are not all finite"]
    return line.name, numbers, own, line.how, f"{line.compile_seconds:.1f}", "; ".join([*notes, why] if why else notes)


def page(lines: Sequence[Line], num_listed: int) -> str:
    """Return the page. num_listed: the classes that transformers lists, whether they were run or not."""
    versions = sorted({", ".join(f"{name} {text}" for name, text in line.versions.items()) for line in lines})
    lowerings = ", ".join(sorted({line.lowering for line in lines}))
    text = [
        "# Models",
        "",
        "Made by `deepytorch bench models`: every class that transformers lists for these tasks, small, with random",
        "weights, on rows of uneven lengths, trained for a few steps in eager and with the import, in processes of",
        "their own.",
        "",
        "- **equal**: loss, outputs at tokens, every gradient and the weights, in each step. In brackets: the relative",
        "  difference that comes nearest to what is allowed; beside it **own**, eager's own if every weight is moved",
        "  by its last bit. Ten times that is allowed, and at least "
        + ", ".join(f"{bound:.0e} ({kind})" for kind, bound in BOUNDS.items())
        + ".",
        "- **where**: padding is stripped in the graph, at model entry, in part (in some regions of the model), or not",
        "  at all (declined).",
        "- **packed**: in the graph or at entry, of the classes with an attention mask that eager trains.",
        "",
        f"{len(lines)} of {num_listed} classes were run. Lowering {lowerings}, fp32, one thread.",
        f"{'; '.join(versions)}.",
        "",
        *_table(COUNTS, counts_of(lines)),
    ]
    reasons = reasons_of(lines)
    if reasons:
        text += ["## Why not packed", "", *_table(("classes", "reason"), [(str(len(of)), why) for why, of in reasons])]
    for task, title in TITLES.items():
        these = [line for line in lines if line.task == task]
        if these:
            columns = ("class", "numbers", "own", "where", "compile s", "why not, notes")
            text += [f"## {title}", "", *_table(columns, map(row_of, these))]
    return "\n".join(text)


def _table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    return [
        "| " + " | ".join(columns) + " |",
        "| --- " * len(columns) + "|",
        *("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows),
        "",
    ]
