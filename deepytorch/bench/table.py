"""The table that all commands print."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from rich import box
from rich.table import Table


def table_of(title: str, columns: Sequence[str], rows: Iterable[Sequence[str]], left: Collection[str]) -> Table:
    """Return a table. left: the columns of words; figures stand on the right of theirs."""
    table = Table(title=title, title_justify="left", box=box.SIMPLE_HEAD)
    for name in columns:
        table.add_column(name, justify="left" if name in left else "right", overflow="fold")
    for row in rows:
        table.add_row(*row)
    return table
