"""`Program`: a Typer program, or a group of its commands, that refuses an option that is given twice.

Without it, the last value would count, and the command would ignore the others without a word. `exit_code` runs one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any, Final

import typer
from typer.core import TyperCommand, TyperGroup

INTERRUPTED: Final = 130
OUTPUT_CLOSED: Final = 141


class OnceCommand(TyperCommand):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _check_repetitions(self, ctx, args)
        return super().parse_args(ctx, args)


class OnceGroup(TyperGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        _check_repetitions(self, ctx, args)
        return super().parse_args(ctx, args)


class Program(typer.Typer):
    """Its commands and groups refuse repeated options. Options that take several values may be repeated."""

    def __init__(self, cls: type[OnceGroup] = OnceGroup, **settings: Any) -> None:
        super().__init__(cls=cls, **settings)

    def command(self, name: str | None = None, **settings: Any) -> Callable[[Any], Any]:
        return super().command(name, cls=OnceCommand, **settings)


def exit_code(program: Program, name: str, arguments: list[str], report: Callable[[Exception], int]) -> int:
    """Runs one command and returns its exit code. `report` prints an error, and returns its exit code."""
    try:
        result = program(arguments, standalone_mode=False, prog_name=name)
    except typer.Exit as ended:
        return ended.exit_code
    except (typer.Abort, KeyboardInterrupt):
        return INTERRUPTED
    except SystemExit as ended:
        if ended.code != 1:
            raise  # a shell's completion
        return OUTPUT_CLOSED  # Click and rich end a command so when the reader of its output has ended
    except Exception as error:
        return report(error)
    return result if isinstance(result, int) else 0


def _check_repetitions(command: TyperCommand | TyperGroup, context: Any, arguments: list[str]) -> None:
    """Raises Click's error about the command line."""
    if context.resilient_parsing:
        return  # a completion of a command line that is not whole
    _, _, given = command.make_parser(context).parse_args(list(arguments))
    for parameter, times in Counter(given).items():
        if times > 1 and not getattr(parameter, "multiple", False):
            context.fail(f"{parameter.opts[0]} is given more than once")
