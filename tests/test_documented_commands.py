"""Every command of ours in the documents parses."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from tests.support.command_lines import APPS, parse
from tests.support.documents import inline_commands, shell_commands
from tests.support.repository import tracked

PROGRAM = re.compile(
    r"(?:^|spark-submit .*/|^kubectl exec .* -- )(?:[\w./]*/)?(tidegate(?:[-_]pipeline(?:\.py)?)?) (.*)"
)
"""At the beginning of a command, or what a command of Spark or Kubernetes starts."""


def commands(page: Path) -> list[str]:
    """The commands of blocks, and those in the text of the runbook, which an operator types as they stand."""
    return shell_commands(page) + (inline_commands(page, list(APPS)) if page.parent.name == "runbook" else [])


FOUND = sorted(
    {found.groups() for page in tracked("*.md") for each in commands(page) if (found := PROGRAM.search(each))}
)


@pytest.mark.parametrize(("program", "arguments"), FOUND)
def test_a_documented_command_parses(program: str, arguments: str) -> None:
    name = program.removesuffix(".py").replace("_", "-")
    parse(name, shlex.split(arguments.replace("OFFSET", "0").replace("UUID", "0" * 32)))


@pytest.mark.parametrize("wrong", ["tier bonds", "tier bounds --confg x", "explain --config tidegate.toml"])
def test_a_wrong_command_is_an_error(wrong: str) -> None:
    with pytest.raises(Exception, match=r"No such (command|option)|[Mm]issing"):
        parse("tidegate", wrong.split())
