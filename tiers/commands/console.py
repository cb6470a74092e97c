"""The output of commands: tables for people, JSON for programs, progress on a terminal, errors and exit codes."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, is_dataclass
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from tiers.access.open_tier import RemoteTierError, UnknownTargetError
from tiers.broker.tls import TlsError
from tiers.config.environment import PREFIX
from tiers.config.tier_config import ConfigError
from tiers.errors import TRY_AGAIN, RemoteLogError, RetriableRemoteStorageError
from tiers.texts import moment_text, size_text

logger = logging.getLogger(__name__)

FINDINGS = 1
MISUSED = 2
FAILED = 3
INTERRUPTED = 130
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


@contextmanager
def progress_bar(what: str, total: int | None) -> Iterator[Callable[[int], None]]:
    """Shows a progress bar on standard error if that is a terminal. Yields the function to call with each advance."""
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(what, total=total)
        yield lambda count: progress.advance(task, count)


@contextmanager
def progress_count(what: str, count: Callable[[], int]) -> Iterator[None]:
    """Shows a counter for an unknown total, where `progress_bar` would show a bar.

    Another thread calls `count`, which returns the current number."""

    class Count(ProgressColumn):
        def render(self, task: Task) -> Text:
            return Text(str(count()))

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), Count())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what)
        yield


def say(text: str) -> None:
    """Prints a message on standard error, because standard output is for the answer."""
    typer.echo(text, err=True)


class Terminal:
    """Implements `Progress` on standard error."""

    def bar(self, what: str, total: int | None) -> AbstractContextManager[Callable[[int], None]]:
        return progress_bar(what, total)

    def count(self, what: str, count: Callable[[], int]) -> AbstractContextManager[None]:
        return progress_count(what, count)

    def say(self, text: str) -> None:
        say(text)

    def milestone(self, text: str) -> None:
        if not typer.get_text_stream("stderr").isatty():
            say(text)


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
        return _with_help(error.format_message(), getattr(error, "ctx", None)), MISUSED
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


def show_table(headings: Sequence[str], rows: Iterable[Sequence[object]], numbers: Sequence[str] = ()) -> None:
    """Prints a table. The columns with a heading in `numbers` are right-aligned. None appears as a dash.

    Without rows, it prints that there are none."""
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    if not cells:
        typer.echo("none")
        return
    table = Table(box=box.SIMPLE_HEAD)
    for place, heading in enumerate(headings):
        if heading in numbers:
            # On a narrow terminal, the other columns make room: a number that is broken in two reads as another one.
            table.add_column(heading, justify="right", min_width=max(len(row[place]) for row in cells))
        else:
            # Cells fold, because on a narrow terminal rich would otherwise truncate them.
            table.add_column(heading, overflow="fold")
    for row in cells:
        # `Text` prevents rich from taking brackets in an error message for markup.
        table.add_row(*map(Text, row))
    console, wide = Console(), Console(width=_WIDTH)
    if not console.is_terminal:
        wide.print(table)
        return
    # A terminal that is narrower than the numbers wraps the lines. Rich would cut them.
    console.print(table, width=max(console.width, wide.measure(table).minimum), crop=False)


def time_text(timestamp_ms: int | None) -> str | None:
    """Returns None without a time, which a table shows as a dash."""
    return None if timestamp_ms is None or timestamp_ms < 0 else moment_text(timestamp_ms)


def size_cell(size_bytes: int | None) -> str | None:
    """Returns None without a size, which a table shows as a dash."""
    return None if size_bytes is None else size_text(size_bytes)
