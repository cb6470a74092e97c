"""The gate generates small defects, runs the tests that execute them, and says which defects no test finds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mutants.mutations import mutants_of
from tests.support.repository import ROOT

SOURCE = '''
"""A toy."""
import logging

logger = logging.getLogger(__name__)
LIMIT = 3


def check(amount: int) -> None:
    if amount < 0:
        raise ValueError(amount)


class Sum:
    """The sum of 2 amounts."""

    def __init__(self) -> None:
        self.total = 0

    def __repr__(self) -> str:
        return "Sum" if self.total > 1 else ""

    def add(self, amount: int) -> bool:
        check(amount)
        logger.info("adds 1 amount", extra={"amount": 1 if amount > 2 else 0})
        self.total += amount
        return True

    @property
    def is_large(self) -> bool:
        return self.total > 100_000


def halve(amount: int) -> int:
    """The amount is even."""
    halves = 0
    while amount != 0:
        amount -= 2
        halves += 1
    return halves
'''

TESTS = """
import pytest
from toy.sums import Sum, halve


def test_a_sum_grows():
    made = Sum()
    assert made.add(2)
    assert made.total == 2


def test_a_debt_is_refused():
    with pytest.raises(ValueError):
        Sum().add(-1)


def test_a_half():
    assert halve(4) == 2
"""


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy/sums.py").write_text(SOURCE)
    (tmp_path / "tests/unit/toy").mkdir(parents=True)
    (tmp_path / "tests/unit/toy/test_sums.py").write_text(TESTS)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\nmarkers = full")
    return tmp_path


def run(toy: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.support.mutants", "toy", "--more-seconds=1", *arguments]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (ROOT, toy)))}
    return subprocess.run(command, capture_output=True, text=True, timeout=300, cwd=toy, env=environment)


def test_each_kind_of_change_is_generated() -> None:
    assert {one.name.partition(":")[2]: one.change for one in mutants_of("toy/sums.py", SOURCE)} == {
        "check:negate:1": "if [-amount < 0-]{+not amount < 0+}:",
        "check:boundary:1": "if [-amount < 0-]{+amount <= 0+}:",
        "check:number:1": "if amount < [-0-]{+1+}:",
        "check:drop-raise:1": "[-raise ValueError(amount)-]{++}",
        "Sum.__init__:number:1": "self.total = [-0-]{+1+}",
        "Sum.add:drop-call:1": "[-check(amount)-]{++}",
        "Sum.add:negate:1": "return [-True-]{+not True+}",
        "Sum.is_large:negate:1": "return [-self.total > 100_000-]{+not self.total > 100000+}",
        "Sum.is_large:boundary:1": "return [-self.total > 100_000-]{+self.total >= 100000+}",
        "halve:number:1": "halves = [-0-]{+1+}",
        "halve:negate:1": "while [-amount != 0-]{+not amount != 0+}:",
        "halve:number:2": "while amount != [-0-]{+1+}:",
        "halve:number:3": "amount -= [-2-]{+3+}",
        "halve:number:4": "halves += [-1-]{+2+}",
    }


def test_the_report_names_what_no_test_finds(toy: Path) -> None:
    ended = run(toy, f"--save={toy / 'rates.json'}")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "toy    |      14 |      8 |         2 |        2 |            2 |     71.4%" in ended.stdout
    saved = json.loads((toy / "rates.json").read_text())["toy"]["outcomes"]
    assert {name.partition(":")[2]: outcome for name, outcome in saved.items() if outcome != "killed"} == {
        "check:boundary:1": "survived",
        "check:number:1": "survived",
        "Sum.is_large:negate:1": "not executed",
        "Sum.is_large:boundary:1": "not executed",
        "halve:number:2": "timed out",
        "halve:number:3": "timed out",
    }
    assert "survived: toy/sums.py:check:number:1 (line 10)\n    if amount < [-0-]{+1+}:" in ended.stdout
    assert (toy / "toy/sums.py").read_text() == SOURCE


def test_a_lower_kill_rate_fails_the_comparison(toy: Path) -> None:
    file = toy / "rates.json"
    assert run(toy, f"--save={file}").returncode == 0
    assert run(toy, f"--compare={file}").returncode == 0
    (toy / "tests/unit/toy/test_sums.py").write_text(TESTS.replace("== 2\n", ">= 2\n"))
    ended = run(toy, f"--compare={file}")
    assert ended.returncode == 1
    assert "toy: the kill rate fell from 71.4% to" in ended.stdout
    assert "toy/sums.py:halve:number:1 was killed, and is survived" in ended.stdout


def test_a_test_that_fails_without_a_mutant_ends_the_run(toy: Path) -> None:
    (toy / "tests/unit/toy/test_sums.py").write_text(TESTS + "\n\ndef test_that_fails():\n    assert not halve(2)\n")
    ended = run(toy)
    assert ended.returncode == 1
    assert "these tests fail without a mutant:\ntests/unit/toy/test_sums.py::test_that_fails" in ended.stdout
