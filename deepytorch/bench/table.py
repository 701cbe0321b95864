"""The table that all commands print."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.table import Table


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str]) -> Table:
    """Return a table. left: the columns of words; figures stand on the right of theirs, and are never wrapped."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in columns:
        if name in left:
            table.add_column(name, overflow="fold")
        else:
            table.add_column(name, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
