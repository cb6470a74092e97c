"""Generates `docs/commands.md` from the command line.

`python -m proxy.command_reference > docs/commands.md` writes the page.
"""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Iterator
from typing import Any

import typer
from typer.core import TyperGroup

from proxy.cli import app

Command = Any
"""A command of the library below typer, which typer does not publish."""

INTRODUCTION = """\
# Commands

Every command, its arguments and its options, as `--help` prints them. `proxy/command_reference.py` generates
this page from the code. [day-to-day.md](day-to-day.md) says which command answers which question.

The exit codes of all commands, also those of `tidegate-pipeline`:

| Code | Meaning |
|---|---|
| 0 | The command succeeded, and found nothing wrong. SIGTERM or SIGINT ended `serve`, or Ctrl-C ended `top`. |
| 1 | The command worked, and found something that needs an operator: a problem, damage, or records at risk. |
| 2 | The command line or the settings file is wrong, or a file that it names: a certificate, a key, a secret. |
| 3 | The command failed, or `tidegate serve` could not start. One line on standard error says why. |
| 130 | Ctrl-C interrupted another command. A command of `tidegate-pipeline` also ends so at SIGTERM. |
| 141 | The reader of the output ended before it had read all of it, as `head -1` does. |
"""
"""The part of the page that does not depend on the code."""


def page() -> str:
    lines = [INTRODUCTION]
    for name, command in _commands("tidegate", typer.main.get_command(app)):
        lines += [f"## `{name}`", "", *_description(command), *_usage(name, command), *_parameters(command)]
    return "\n".join(lines).rstrip() + "\n"


def _commands(name: str, command: Command) -> Iterator[tuple[str, Command]]:
    """Yields the commands that do something, with their full names."""
    if not isinstance(command, TyperGroup):
        yield name, command
        return
    for child_name, child in sorted(command.commands.items()):
        if not child.hidden:
            yield from _commands(f"{name} {child_name}", child)


def _description(command: Command) -> list[str]:
    paragraphs = (command.help or "").strip().split("\n\n")
    return [line for paragraph in paragraphs for line in (textwrap.fill(" ".join(paragraph.split()), 120), "")]


def _usage(name: str, command: Command) -> list[str]:
    with typer.Context(command, info_name=name) as context:
        pieces = command.collect_usage_pieces(context)
    return ["```text", " ".join([name, *pieces]), "```", ""]


def _parameters(command: Command) -> list[str]:
    with typer.Context(command) as context:
        records = [parameter.get_help_record(context) for parameter in command.params]
    rows = [(_cell(names), _cell(meaning)) for names, meaning in filter(None, records)]
    if not rows:
        return []
    return ["| Option | Meaning |", "|---|---|", *(f"| `{names}` | {meaning} |" for names, meaning in rows), ""]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    sys.stdout.write(page())
