"""How a command shows its answer: tables for people, JSON for programs, progress where somebody watches."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, is_dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

FINDINGS = 1
MISUSED = 2
_WIDTH = 1_000
"""Of a table that goes into a file or a pipe: nothing is ever cut short."""

ConfigFile = Annotated[Path, typer.Option("--config", help="The TOML file; docs/configuration.md names every key.")]
AsJson = Annotated[bool, typer.Option("--json", help="For programs.")]


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """On standard error, and only where somebody watches; gives what to call with every advance."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


def say(text: str) -> None:
    """To whoever watches: standard output is the answer's."""
    typer.echo(text, err=True)


def show_json(answer: object) -> None:
    typer.echo(json.dumps(answer, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


def show_table(headings: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str] = ()) -> None:
    """`numbers` are the headings of columns that stand to the right. None is a dash."""
    table = Table(box=box.SIMPLE_HEAD)
    for heading in headings:
        # Folded, for rich would cut what a narrow terminal has no room for, digits too.
        table.add_column(heading, justify="right" if heading in numbers else "left", overflow="fold")
    for row in rows:
        # As text: brackets of an error are no markup.
        table.add_row(*(Text("-" if cell is None else str(cell)) for cell in row))
    console = Console()
    (console if console.is_terminal else Console(width=_WIDTH)).print(table)


def time_text(timestamp_ms: int | None) -> str | None:
    if timestamp_ms is None or timestamp_ms < 0:
        return None
    try:
        return datetime.fromtimestamp(timestamp_ms / 1000, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return str(timestamp_ms)
