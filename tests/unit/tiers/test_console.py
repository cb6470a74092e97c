"""Commands: whole lines on any terminal, a sentence in place of a traceback, and no option that is given twice."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Annotated

import pytest
import typer
from click import unstyle

from pipeline.config import parse_pipeline_config
from tiers.access.open_tier import UnknownTargetError, open_storage
from tiers.broker.tls import TlsError
from tiers.commands.console import FAILED, MISUSED, TERMINAL, explained, show_table
from tiers.commands.program import Program
from tiers.config.tier_config import ConfigError
from tiers.errors import BrokerError


@pytest.mark.parametrize("columns", [20, 36])
def test_no_number_is_folded_or_cut(
    columns: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("COLUMNS", str(columns))
    names = ("partition", "from", "bytes")
    show_table(names, [("orders-of-all-countries-0", 123_456_789_012, 1_073_741_824)], names[1:])
    lines = unstyle(capsys.readouterr().out).splitlines()
    cells = lines[next(number for number, line in enumerate(lines) if "\u2500" in line) + 1 :]
    assert cells[0].split()[1:] == ["123456789012", "1073741824"]
    assert "".join(line.split()[0] for line in cells if line.strip()) == "orders-of-all-countries-0"
    show_table(names, [])
    assert capsys.readouterr().out == "none\n"
    monkeypatch.delenv("FORCE_COLOR")
    show_table(names, [("orders-of-all-countries-0", 123_456_789_012, None)], names[1:])
    assert capsys.readouterr().out.splitlines()[3].split() == ["orders-of-all-countries-0", "123456789012", "-"]


@pytest.mark.parametrize(
    ("error", "said", "code"),
    [
        (ConfigError("x.toml: no [storage]"), "x.toml: no [storage]", MISUSED),
        (typer.BadParameter("no such thing"), "Invalid value: no such thing", MISUSED),
        (PermissionError(13, "Permission denied", "/x"), "/x: Permission denied", FAILED),
        (TimeoutError(), "TimeoutError()", FAILED),
        (UnknownTargetError("no such topic"), "no such topic", MISUSED),
        (TlsError("no certificate"), "no certificate", MISUSED),
        (ExceptionGroup("both", [ExceptionGroup("one", [BrokerError("gone")])]), "gone", FAILED),
        (ZeroDivisionError("of our own making"), "internal error: ZeroDivisionError: of our own making", FAILED),
    ],
)
def test_any_end_of_a_command_is_a_sentence_and_an_exit_code(error: Exception, said: str, code: int) -> None:
    assert explained(error) == (said, code)


@pytest.mark.parametrize("is_watched", [False, True])
def test_a_count_is_shown_on_a_terminal_alone(
    is_watched: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TTY_COMPATIBLE", str(int(is_watched)))
    read = [b"record"] * 41
    with TERMINAL.count("records of the metadata topic", lambda: len(read)):
        read.append(b"record")
    said = capsys.readouterr()
    assert said.out == ""
    assert ("records of the metadata topic 42" in unstyle(said.err)) is is_watched


def test_a_file_gets_the_milestones_that_a_terminal_shows_as_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with TERMINAL.bar("reading", 2) as advance:
        advance(1)
    TERMINAL.milestone("reading: 1 of 2 tasks")
    assert capsys.readouterr().err == "reading: 1 of 2 tasks\n"
    monkeypatch.setattr(typer, "get_text_stream", lambda name: SimpleNamespace(isatty=lambda: True))
    TERMINAL.milestone("reading: 2 of 2 tasks")
    assert capsys.readouterr().err == ""


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


@pytest.mark.parametrize(
    ("storage", "said"),
    [
        ('implementation = "s4"', r"\[storage\] s4: .*s3"),
        ('implementation = "local"\npth = "/tier"', r"\[storage\] local: .*pth"),
    ],
)
async def test_a_store_that_no_settings_can_be_of_is_misuse(storage: str, said: str) -> None:
    config = parse_pipeline_config(f'[upstream]\nbootstrap.servers = "localhost:1"\n[storage]\n{storage}\n')
    with pytest.raises(ConfigError, match=said) as refused:
        async with open_storage(config, "cluster"):
            pass
    assert explained(refused.value)[1] == MISUSED
