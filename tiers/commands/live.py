"""`show_live` redraws tables on a terminal until the user ends it. Elsewhere it prints them once."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table
from rich.text import Text

from tiers.commands.console import show_table


@dataclass(frozen=True, slots=True)
class LiveTable:
    """A table with a title. The columns with a heading in `numbers` are right-aligned."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[Sequence[object]]
    numbers: tuple[str, ...] = ()


async def show_live(screens: AsyncIterator[Sequence[LiveTable]], console: Console | None = None) -> None:
    """Shows each screen in the place of the one before it. Without a terminal, it prints the first screen and returns.

    Errors of `screens` reach the caller after the terminal is as it was."""
    console = console or Console()
    if not console.is_terminal:
        async for tables in screens:
            for table in tables:
                console.print(Text(table.title))
                show_table(table.headings, table.rows, table.numbers)
            return
    with Live(console=console, screen=False, auto_refresh=False) as live:
        async for tables in screens:
            live.update(Group(*map(_drawn, tables)), refresh=True)


def _drawn(table: LiveTable) -> Table:
    drawn = Table(box=box.SIMPLE_HEAD, title=Text(table.title), title_justify="left", expand=False)
    for heading in table.headings:
        drawn.add_column(heading, justify="right" if heading in table.numbers else "left")
    for row in table.rows:
        drawn.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    return drawn
