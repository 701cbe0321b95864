"""The table that all commands print, and that the pages of results show."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table as RichTable


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


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str]) -> RichTable:
    """Return a table for a terminal. Figures are never wrapped."""
    table = RichTable(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        if name in left:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
