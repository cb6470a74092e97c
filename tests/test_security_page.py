"""docs/security.md names tests and settings that exist."""

from __future__ import annotations

import ast
import re

from tests.support.repository import ROOT

PAGE = (ROOT / "docs" / "security.md").read_text()
ROWS = [[cell.strip() for cell in line.strip("|").split("|")] for line in PAGE.splitlines() if line.startswith("|")]
ATTACKS = [row for row in ROWS if len(row) == 4 and row[0] != "Attack" and not set(row[0]) <= set("-")]
CONFIGURATION = (ROOT / "docs" / "configuration.md").read_text()


def is_test(path: str, name: str) -> bool:
    file = ROOT / path
    functions = ast.FunctionDef, ast.AsyncFunctionDef
    return file.is_file() and any(
        isinstance(node, functions) and node.name == name for node in ast.walk(ast.parse(file.read_text()))
    )


def test_every_row_names_tests_that_exist() -> None:
    assert ATTACKS
    for row in ATTACKS:
        named = re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", row[3])
        assert named, row[0]
        assert all(is_test(*each) for each in named), row[0]


def test_every_other_named_test_exists() -> None:
    assert all(is_test(*each) for each in re.findall(r"`(tests/[\w/]+\.py)::(test_\w+)`", PAGE))


def test_every_setting_of_a_row_exists() -> None:
    keys = [key for row in ATTACKS for key in re.findall(r"`([a-z]+(?:\.[a-z]+)+)`", row[2])]
    sections = [section for row in ATTACKS for section in re.findall(r"`(\[[a-z.]+\])`", row[2])]
    assert keys
    assert sections
    assert [key for key in keys if f"| `{key}` |" not in CONFIGURATION and key != "timeout.ms"] == []
    assert [section for section in sections if f"## `{section}`" not in CONFIGURATION] == []
