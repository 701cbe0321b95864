"""The table that all commands print, and that the pages of results show."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from html import escape
from textwrap import wrap

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

_WORDS_WIDTH, _FIGURES_WIDTH = 12, 10  # of columns in narrow terminals, the latter of their names
_LONGEST_FIGURE = 24  # a longer text among figures is the reason why there is none


@dataclass(frozen=True, slots=True)
class Table:
    """A table of texts.

    Attributes:
        title: The line above it.
        columns: The names of its columns.
        rows: A text for each column.
        left: The columns of words; figures stand on the right of theirs.
        notes: Lines below it.
    """

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    left: tuple[str, ...]
    notes: tuple[str, ...] = ()

    def without_empty_columns(self) -> Table:
        """Return the table without the columns in which no row has a text."""
        used = [at for at, _ in enumerate(self.columns) if any(row[at] for row in self.rows)]
        rows = tuple(tuple(row[at] for at in used) for row in self.rows)
        return replace(self, columns=tuple(self.columns[at] for at in used), rows=rows)


def print_table(console: Console, table: Table) -> None:
    """Print a table and its notes. Lines may be longer than the terminal's: no figure is cut off."""
    shown = table_of(table.title, table.columns, table.rows, table.left)
    least = Measurement.get(console, console.options.update(width=1000), shown).minimum
    console.print(shown, width=max(console.width, least), crop=False)
    for note in table.notes:
        console.print(note, highlight=False, markup=False, soft_wrap=True)


def table_of(
    title: str, columns: Sequence[str], rows: Iterable[Sequence[str | Text]], left: Collection[str]
) -> RichTable:
    """Return a table for a terminal. Figures are never wrapped, other texts are, and all are shown as they are."""
    table = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    rows = list(rows)
    for at, name in enumerate(columns):
        if name in left:
            longest = max(len(text) for text in (*name.split(), *(str(row[at]) for row in rows), ""))
            table.add_column(name, overflow="fold", min_width=min(longest, _WORDS_WIDTH))
        else:
            header, cells = wrap(name, _FIGURES_WIDTH), [str(row[at]) for row in rows]
            least = min(max(map(len, (*header, *cells))), _LONGEST_FIGURE)
            whole = all(len(text) <= _LONGEST_FIGURE for text in cells)
            table.add_column("\n".join(header), justify="right", no_wrap=whole, overflow="fold", min_width=least)
    for row in rows:
        table.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return table


def markdown_of(table: Table) -> list[str]:
    """Return the lines of a table in Markdown: title, table and notes, with an empty line between them."""

    def line(cells: Iterable[str]) -> str:
        return f"| {' | '.join(cells)} |"

    sides = ("---" if name in table.left else "---:" for name in table.columns)
    rows = (line(map(markdown_text, row)) for row in table.rows)
    notes = (part for note in table.notes for part in ("", markdown_text(note)))
    return [
        f"**{markdown_text(table.title)}**",
        "",
        line(map(markdown_text, table.columns)),
        line(sides),
        *rows,
        *notes,
    ]


def markdown_text(text: str) -> str:
    """Return a text as Markdown that shows it as it is, in one line."""
    return re.sub(_MARKS, r"\\\g<0>", " ".join(text.split()))


_MARKS = r"[\\`*|<\[\]&~]|(?<!\w)_|_(?!\w)|^>|^[#+-](?=[\s#])"


def html_of(table: Table) -> str:
    """Return a table as HTML, in a box that scrolls by itself where the page is narrow. `n` is the class of figures."""

    def line(cells: Sequence[str], tag: str) -> str:
        kinds = ("" if name in table.left else ' class="n"' for name in table.columns)
        shown = (f"<{tag}{kind}>{escape(cell)}</{tag}>" for kind, cell in zip(kinds, cells, strict=True))
        return f"<tr>{''.join(shown)}</tr>"

    body = "".join(line(row, "td") for row in table.rows)
    notes = "".join(f'<p class="soft">{escape(note)}</p>' for note in table.notes)
    return (
        f'<h3>{escape(table.title)}</h3><div class="scroll"><table><thead>{line(table.columns, "th")}</thead>'
        f"<tbody>{body}</tbody></table></div>{notes}"
    )


def number_text(value: float) -> str:
    """Return a figure of any kind: whole, or with four digits."""
    return f"{value:,.0f}" if value == int(value) or value >= 1e4 else f"{value:.4g}"


def value_text(value: object) -> str:
    """Return the value of an option or a key."""
    if value is None:
        return "-"
    return ", ".join(map(str, value)) if isinstance(value, list) else str(value)
