"""A program refuses an option that is given twice, in each of its commands and groups."""

from __future__ import annotations

from typing import Annotated

import pytest
import typer

from tiers.commands.console import explained
from tiers.commands.program import Program

app = Program(name="program")
group = Program(name="group")
app.add_typer(group)


@app.callback(invoke_without_command=True)
def _program(loud: Annotated[bool, typer.Option("--loud")] = False) -> None:
    """Has an option of its own."""


@group.callback(invoke_without_command=True)
def _group(color: Annotated[str, typer.Option("--color")] = "") -> None:
    """Has an option of its own."""


@group.command()
def run(
    words: Annotated[list[str] | None, typer.Argument()] = None,
    topic: Annotated[str, typer.Option("--topic", "-t")] = "",
    conf: Annotated[list[str] | None, typer.Option("--conf")] = None,
    yes: Annotated[bool, typer.Option("--yes", "--apply")] = False,
    fast: Annotated[bool, typer.Option("--fast/--slow")] = False,
) -> None:
    """Has options of each kind."""


@pytest.mark.parametrize(
    ("arguments", "option"),
    [
        (["--loud", "--loud", "group"], "--loud"),
        (["group", "--color=a", "--color", "b", "run"], "--color"),
        (["group", "run", "--topic", "a", "word", "--topic", "a"], "--topic"),
        (["group", "run", "-ta", "--topic=b"], "--topic"),
        (["group", "run", "--yes", "--apply"], "--yes"),
        (["group", "run", "--fast", "--slow"], "--fast"),
    ],
)
def test_an_option_that_is_given_twice_is_misuse(arguments: list[str], option: str) -> None:
    with pytest.raises(Exception, match="given more than once") as raised:
        app(arguments, standalone_mode=False)
    said, code = explained(raised.value)
    assert (said.partition(". See: ")[0], code) == (f"{option} is given more than once", 2)


def test_options_that_take_several_values_may_be_repeated() -> None:
    arguments = ["group", "run", "a", "b", "--conf", "x=1", "--conf", "x=2", "--", "--topic", "--topic"]
    assert app(arguments, standalone_mode=False) is None
