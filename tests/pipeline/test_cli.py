"""What a user gets wrong is one line and an exit code, never a traceback."""

from __future__ import annotations

import subprocess
import sys

import pytest

from pipeline import cli
from pipeline.job import JobError
from tiers.tier_config import ConfigError


@pytest.mark.parametrize(
    ("arguments", "said"),
    [(["wram"], "No such command 'wram'"), (["warm", "--all"], "No such option: --all"), ([], "Missing command")],
)
def test_misuse_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert len(captured.err.splitlines()) == 1


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        (ConfigError("x.toml: no [storage]"), 2),
        (JobError("reading: two\nlines"), 3),
        (PermissionError(13, "Permission denied", "/x"), 3),
        (ZeroDivisionError("of our own making"), 3),
        (KeyboardInterrupt(), 130),
    ],
)
def test_each_failure_has_its_exit_code(
    raised: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing() -> bool:
        raise raised

    monkeypatch.setattr("pipeline.decode.arrow_records.warm", failing)
    assert cli.run(["warm"]) == code
    assert len(capsys.readouterr().err.splitlines()) == (0 if code == 130 else 1)


def test_without_the_extra_it_says_what_to_install() -> None:
    hide = "import sys; sys.modules['pyspark'] = None; from pipeline.__main__ import main; main()"
    ended = subprocess.run([sys.executable, "-c", hide], capture_output=True, text=True, timeout=60, check=False)
    assert ended.returncode == 3
    assert ended.stderr == "tidegate-pipeline: pyspark is missing: pip install 'tidegate[pipeline]'\n"
