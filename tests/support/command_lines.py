"""Parses the command lines of our programs, and runs none of them: an unknown subcommand or option is an error."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any
from unittest import mock

import typer

from pipeline import cli as pipeline_cli
from proxy import cli as proxy_cli
from tiers.commands.console import CONFIG_VARIABLE

APPS = {"tidegate": proxy_cli.app, "tidegate-pipeline": pipeline_cli.app}


def parse(program: str, words: Sequence[str]) -> None:
    """Parses the arguments of one of our programs. The settings file may be missing.

    Raises the error with which typer would end the program."""
    with mock.patch.dict(os.environ, {CONFIG_VARIABLE: "tidegate.toml"}):
        _parse(program, typer.main.get_command(APPS[program]), words)


def _parse(name: str, command: Any, words: Sequence[str]) -> None:
    for parameter in command.params:
        if parameter.is_eager:
            parameter.callback = None  # it would act at once: print the version, or install a completion
    context = command.make_context(name, list(words))
    rest = [*context._protected_args, *context.args]
    if rest and hasattr(command, "commands"):
        name, command, rest = command.resolve_command(context, rest)
        _parse(name, command, rest)
