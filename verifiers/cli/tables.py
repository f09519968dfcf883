"""Tables for a person: drawn on a terminal, a plain line a row elsewhere, where they are searched and cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["print_table"]


def print_table(console: Console, columns: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> None:
    """Print rows under columns; the first column names the row, the others hold numbers.

    Args:
        columns: names; the first may be "".
        rows: as many cells each as there are columns.
        title: printed above.
    """
    from rich.markup import escape
    from rich.table import Table

    if not console.is_terminal:
        if title:
            console.print(title, markup=False, soft_wrap=True)
        for row in rows:
            cells = ", ".join(f"{column} {cell}" for column, cell in zip(columns[1:], row[1:], strict=True))
            console.print(f"{row[0]}: {cells}", markup=False, soft_wrap=True)
        return
    table = Table(title=escape(title) or None, title_justify="left")
    for number, column in enumerate(columns):
        table.add_column(escape(column), justify="right" if number else "left", no_wrap=number > 0)
    for row in rows:
        table.add_row(*map(escape, row))
    console.print(table)
