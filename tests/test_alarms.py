"""docs/alarms.md has every log line of the level ERROR and every reason of the alarm counter, and no other."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from proxy.commands.metrics_reference import all_metrics
from tests.support.repository import ROOT
from tiers.tasks.alarms import AlarmReason

PAGE = (ROOT / "docs" / "alarms.md").read_text()
LEVELS = {"error", "exception", "critical"}


def sources() -> Iterator[tuple[Path, ast.Module]]:
    for folder in ("protocol", "tiers", "proxy"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            if path.name != "lasting_trouble.py":  # it logs the messages of its callers
                yield path, ast.parse(path.read_text())


def constants(module: ast.Module) -> dict[str, ast.expr]:
    assigned = [node for node in module.body if isinstance(node, ast.Assign)]
    return {node.targets[0].id: node.value for node in assigned if isinstance(node.targets[0], ast.Name)}


def texts(value: ast.expr, known: dict[str, ast.expr]) -> list[str]:
    """Returns the possible values of an argument: a string, a constant of the module, or an entry of a dictionary."""
    match value:
        case ast.Constant(value=str() as text):
            return [text]
        case ast.Name(id=name) if name in known:
            return texts(known[name], known)
        case ast.Subscript(value=ast.Name(id=name)):
            entries = known[name]
            assert isinstance(entries, ast.Dict)
            return [text for each in entries.values for text in texts(each, known)]
    raise AssertionError(f"the test does not understand the message {ast.unparse(value)}")


def is_error(call: ast.Call) -> bool:
    match call.func:
        case ast.Attribute(value=ast.Name(id="logger"), attr=level):
            return level in LEVELS or level == "log"
    return False


def phrase(message: str) -> str:
    """Returns the beginning of a message, by which an operator recognizes it."""
    return re.sub(r"%[sd]", "…", message).partition(": ")[0]


def phrases_of_the_code() -> set[str]:
    found = set()
    for _, module in sources():
        known = constants(module)
        for node in ast.walk(module):
            if isinstance(node, ast.Call) and is_error(node):
                assert isinstance(node.func, ast.Attribute)
                message = node.args[1 if node.func.attr == "log" else 0]
                found |= {phrase(text) for text in texts(message, known)}
    return found


def reasons_of_the_code() -> set[str]:
    """Returns the reasons that code outside of their module names."""
    return {
        AlarmReason[node.attr]
        for path, module in sources()
        if path.name != "alarms.py"
        for node in ast.walk(module)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "AlarmReason"
    }


def rows() -> Iterator[dict[str, str]]:
    headings: list[str] = []
    for line in PAGE.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")] if line.startswith("|") else []
        if not cells:
            headings = []
        elif not headings:
            headings = cells
        elif set(line) - set("|-"):
            assert len(cells) == len(headings), line
            assert all(cells), line
            yield dict(zip(headings, cells, strict=True))


def test_the_page_has_every_error_line() -> None:
    said = [phrase for row in rows() for phrase in row["Log line"].split("<br>")]
    assert len(said) == len(set(said))
    assert set(said) == phrases_of_the_code()


def test_the_page_has_every_reason() -> None:
    said = [row["Reason"].strip("`") for row in rows() if "Reason" in row]
    assert len(said) == len(set(said))
    assert set(said) == reasons_of_the_code() == set(AlarmReason)


def test_the_metrics_of_the_page_exist() -> None:
    exposed = {spec.exposed_name for spec in all_metrics()}
    assert set(re.findall(r"`(tidegate_\w+)`", PAGE)) <= exposed
