"""The log lines of the code: the messages of its calls, as the syntax tree has them."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from proxy.log_events import phrase
from tests.support.repository import ROOT

ERRORS = {"error", "exception", "critical"}
LEVELS = {"debug", "info", "warning"} | ERRORS


@cache
def sources() -> tuple[tuple[Path, ast.Module], ...]:
    return tuple(
        (path, ast.parse(path.read_text()))
        for folder in ("protocol", "tiers", "proxy")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if path.name != "lasting_trouble.py"  # it logs the messages of its callers
    )


def error_phrases() -> set[str]:
    """Returns the phrases of the lines that may have the level ERROR."""
    return {found for _, module in sources() for found in _phrases(module, ERRORS)}


def all_phrases() -> set[str]:
    """Returns the phrases of all lines whose message is a literal where the code logs it."""
    return {found for _, module in sources() for found in _phrases(module, LEVELS)}


def _phrases(module: ast.Module, levels: set[str]) -> Iterator[str]:
    known = constants(module)
    for node in ast.walk(module):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="logger"), attr=level)) if level in {*levels, "log"}:
                for text in texts(node.args[1 if level == "log" else 0], known):
                    yield phrase(text)
            case ast.Call(func=ast.Name(id="LastingTrouble") | ast.Attribute(attr="_lasting")) if "info" in levels:
                for argument in node.args:
                    if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                        yield phrase(argument.value)


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
    raise AssertionError(f"the log line does not have a literal message: {ast.unparse(value)}")
