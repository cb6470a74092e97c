"""The output of commands: tables for people, JSON for programs, progress on a terminal, errors and exit codes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich import box
from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from tiers.access.open_tier import RemoteTierError, UnknownTargetError
from tiers.access.progress import Progress
from tiers.broker.tls import TlsError
from tiers.config.environment import PREFIX
from tiers.config.tier_config import ConfigError
from tiers.errors import TRY_AGAIN, RemoteLogError, RetriableRemoteStorageError
from tiers.texts import moment_text, size_text

logger = logging.getLogger(__name__)

FINDINGS = 1
MISUSED = 2
FAILED = 3
_WIDTH = 1_000
"""The width of a table that goes to a file or a pipe: large enough that no cell is folded."""

CONFIG_VARIABLE = "TIDEGATE_CONFIG"
_CONFIG_FILES = (Path("tidegate.toml"), Path("/etc/tidegate/tidegate.toml"))


def default_config_file() -> Path:
    """Returns the first file that exists. Without one, variables alone can configure Tidegate.

    Raises `ConfigError`."""
    for path in _CONFIG_FILES:
        if path.exists():
            return path
    if any(name.startswith(PREFIX) for name in os.environ):
        return Path(os.devnull)
    places = " or ".join(map(str, _CONFIG_FILES))
    raise ConfigError(
        f"there is no configuration: name a file with --config or {CONFIG_VARIABLE}, write {places}, or set"
        f" {PREFIX}* variables (docs/configuration.md)"
    )


ConfigFile = Annotated[
    Path,
    typer.Option(
        "--config",
        envvar=CONFIG_VARIABLE,
        show_default="tidegate.toml, or /etc/tidegate/tidegate.toml",
        help="The TOML file; docs/configuration.md describes every key.",
        default_factory=default_config_file,
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print JSON, for programs.")]


def say(text: str) -> None:
    """Prints a message on standard error, because standard output is for the answer."""
    typer.echo(text, err=True)


class Terminal(Progress):
    """Shows the progress on standard error. Bars and counters appear if that is a terminal."""

    @contextmanager
    def bar(self, what: str, total: int | None) -> Iterator[Callable[[int], None]]:
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        with _progress(*columns) as progress:
            task = progress.add_task(what, total=total)
            yield lambda count: progress.advance(task, count)

    @contextmanager
    def count(self, what: str, count: Callable[[], int]) -> Iterator[None]:
        class Count(ProgressColumn):
            def render(self, task: Task) -> Text:
                return Text(str(count()))

        with _progress(TextColumn("{task.description}"), Count()) as progress:
            progress.add_task(what)
            yield

    def say(self, text: str) -> None:
        say(text)

    def milestone(self, text: str) -> None:
        if not typer.get_text_stream("stderr").isatty():
            say(text)


def _progress(*columns: ProgressColumn) -> Bars:
    console = Console(stderr=True)
    return Bars(*columns, console=console, transient=True, disable=not console.is_terminal)


TERMINAL: Final = Terminal()


def explained(error: Exception) -> tuple[str, int]:
    """Returns the message and the exit code for an error that ended a command.

    The exit code is `FAILED`, or `MISUSED` for an error in the configuration, in a file that it names, or on the
    command line.
    """
    match error:
        case ExceptionGroup(exceptions=(only,)):
            return explained(only)
        case ConfigError() | TlsError() | UnknownTargetError():
            return str(error), MISUSED
        case OSError(strerror=str(reason), filename=str() | Path() as file):
            return f"{file}: {reason}", FAILED
        case OSError():
            return error.strerror or str(error) or repr(error), FAILED
        case RetriableRemoteStorageError():
            return f"{error}: {TRY_AGAIN}", FAILED
        case RemoteTierError() | RemoteLogError():
            return str(error), FAILED
    # These are Click's errors about the command line, whose base class typer does not export.
    if hasattr(error, "format_message") and hasattr(error, "exit_code"):
        said = error.format_message().replace("Value error, ", "")  # pydantic puts it before an enumeration's message
        context = getattr(error, "ctx", None)
        if hasattr(error, "option_name") and hasattr(getattr(context, "command", None), "commands"):
            said += ". Options follow the name of a command"
        return _with_help(said, context), MISUSED
    logger.debug("the traceback of the internal error", exc_info=error)
    return f"internal error: {type(error).__name__}: {error}", FAILED


def _with_help(message: str, context: Any) -> str:
    """Returns the message with a reference to the command's help."""
    if context is None:
        return message
    stop = "" if message.endswith((".", "?")) else "."
    return f"{message}{stop} See: {context.command_path} --help"


def show_json(answer: object) -> None:
    typer.echo(json.dumps(answer, indent=2, default=_plain))


def _plain(value: Any) -> Any:
    return asdict(value) if is_dataclass(value) and not isinstance(value, type) else str(value)


@dataclass(frozen=True, slots=True)
class LiveTable:
    """A table with a title. The columns with a heading in `numbers` are right-aligned. None appears as a dash."""

    title: str
    headings: Sequence[str]
    rows: Iterable[Sequence[object]]
    numbers: Sequence[str] = ()

    def drawn(self) -> Table:
        cells = [["-" if cell is None else str(cell) for cell in row] for row in self.rows]
        table = Table(box=box.SIMPLE_HEAD, title=Text(self.title) if self.title else None, title_justify="left")
        for place, heading in enumerate(self.headings):
            if heading in self.numbers:
                # On a narrow terminal, the other columns make room: a number that is broken in two reads as another.
                widest = max((len(row[place]) for row in cells), default=0)
                table.add_column(heading, justify="right", min_width=widest)
            else:
                # Cells fold, because on a narrow terminal rich would otherwise truncate them.
                table.add_column(heading, overflow="fold")
        for row in cells:
            # `Text` prevents rich from taking brackets in an error message for markup.
            table.add_row(*map(Text, row))
        return table


def show_table(headings: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str] = ()) -> None:
    """Prints a table as `LiveTable` draws it. Without rows, it prints that there are none."""
    table = LiveTable("", headings, rows, numbers).drawn()
    if not table.row_count:
        typer.echo("none")
        return
    console, wide = Console(), Console(width=_WIDTH)
    if not console.is_terminal:
        wide.print(table)
        return
    # A terminal that is narrower than the numbers wraps the lines. Rich would cut them.
    console.print(table, width=max(console.width, wide.measure(table).minimum), crop=False)


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
            live.update(Group(*(table.drawn() for table in tables)), refresh=True)


def time_text(timestamp_ms: int | None) -> str | None:
    """Returns None without a time, which a table shows as a dash."""
    return None if timestamp_ms is None or timestamp_ms < 0 else moment_text(timestamp_ms)


def size_cell(size_bytes: int | None) -> str | None:
    """Returns None without a size, which a table shows as a dash."""
    return None if size_bytes is None else size_text(size_bytes)
