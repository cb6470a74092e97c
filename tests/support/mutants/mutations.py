"""Generates the mutants of a source file: copies of it with one small change inside of one function.

The kinds of changes:

* `negate`: a condition is negated (`if`, `while`, `assert`, a conditional expression, a filter of a comprehension, a
  returned truth value).
* `drop-call`: a statement that is a call does nothing, for example `check_positions(...)`.
* `drop-raise`: an error is not raised.
* `boundary`: `<` becomes `<=`, `>` becomes `>=`, and the reverse.
* `number`: a small whole number is one greater.

Logging, metrics and representations have no mutants, and code outside of functions has none.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

from tests.support.mutants.live_functions import first_line

LARGEST_NUMBER = 100
"""Larger numbers are times and sizes. One more or less of them changes nothing that a test could show."""
_SILENT_NAMES = {"logger", "logging", "metrics", "_metrics", "checkpoint"}
"""A call whose dotted name has one of these changes nothing but logs and metrics, or is a place for planned crashes."""
_SILENT_FUNCTIONS = {"__repr__", "__str__"}
_SILENT_FILES = {"metrics.py"}
_BOUNDARIES: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
}


@dataclass(frozen=True, slots=True)
class Mutant:
    name: str
    """`<file>:<function>:<kind>:<ordinal>`. It stays the same when other functions change."""
    path: str
    function: tuple[str, int]
    """The qualified name and the first line of the innermost function, as its code object has them."""
    kind: str
    line: int
    change: str
    """The changed line, with `[-old-]{+new+}` at the change."""
    owner: int
    """The number of the changed node in the order of `ast.walk`."""
    field: str
    position: int | None
    """The position in the field, if the field is a list."""

    def tree(self, source: str) -> ast.Module:
        """Returns the changed file. All line numbers are those of the source."""
        tree = ast.parse(source)
        owner = next(islice(ast.walk(tree), self.owner, None))
        _replace(owner, self.field, self.position, _KINDS[self.kind](_value(owner, self.field, self.position)))
        return ast.fix_missing_locations(tree)


@dataclass(frozen=True, slots=True)
class _Site:
    function: tuple[str, int]
    kind: str
    owner: ast.AST
    field: str
    position: int | None = None


def mutants_of(path: str, source: str) -> list[Mutant]:
    """Returns all mutants of a file, in the order of its lines."""
    if path.rpartition("/")[2] in _SILENT_FILES:
        return []
    tree = ast.parse(source)
    numbers = {id(node): number for number, node in enumerate(ast.walk(tree))}
    ordinals: Counter[tuple[str, str]] = Counter()
    found = []
    for site in _in_body(tree, ""):
        qualname = site.function[0].replace(".<locals>", "")
        ordinals[qualname, site.kind] += 1
        name = f"{path}:{qualname}:{site.kind}:{ordinals[qualname, site.kind]}"
        line, change = _change(site, source)
        owner = numbers[id(site.owner)]
        found.append(Mutant(name, path, site.function, site.kind, line, change, owner, site.field, site.position))
    return found


def _in_body(node: ast.AST, prefix: str) -> Iterator[_Site]:
    """Yields the changes inside of the functions and classes of a module or class."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
            yield from _in_function(child, prefix)
        elif isinstance(child, ast.ClassDef):
            yield from _in_body(child, f"{prefix}{child.name}.")
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _in_body(child, prefix)


def _in_function(function: ast.FunctionDef | ast.AsyncFunctionDef, prefix: str) -> Iterator[_Site]:
    decorators = {ast.unparse(each).rpartition(".")[2] for each in function.decorator_list}
    if function.name in _SILENT_FUNCTIONS or not decorators.isdisjoint({"abstractmethod", "overload"}):
        return
    qualname = f"{prefix}{function.name}"
    returns_bool = isinstance(function.returns, ast.Name) and function.returns.id == "bool"
    for position in range(len(function.body)):
        yield from _at(_Site((qualname, first_line(function)), "", function, "body", position), returns_bool)


def _at(place: _Site, returns_bool: bool) -> Iterator[_Site]:
    """Yields the changes of the node at a place and of all nodes below it."""
    node = _value(place.owner, place.field, place.position)
    function = place.function
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        yield from _in_function(node, f"{function[0]}.<locals>.")
        return
    if isinstance(node, ast.ClassDef):
        yield from _in_body(node, f"{function[0]}.<locals>.{node.name}.")
        return
    if isinstance(node, ast.Call) and _is_silent(node):
        return
    if isinstance(node, ast.Raise):
        yield _Site(function, "drop-raise", place.owner, place.field, place.position)
    if isinstance(node, ast.Expr):
        called = node.value.value if isinstance(node.value, ast.Await) else node.value
        if isinstance(called, ast.Call) and not _is_silent(called):
            yield _Site(function, "drop-call", place.owner, place.field, place.position)
    if isinstance(node, ast.If | ast.While | ast.Assert | ast.IfExp):
        yield _Site(function, "negate", node, "test")
    if isinstance(node, ast.comprehension):
        yield from (_Site(function, "negate", node, "ifs", position) for position in range(len(node.ifs)))
    if isinstance(node, ast.Return) and node.value is not None and (returns_bool or _is_truth_value(node.value)):
        yield _Site(function, "negate", node, "value")
    if isinstance(node, ast.Compare):
        for position, operator in enumerate(node.ops):
            if type(operator) in _BOUNDARIES:
                yield _Site(function, "boundary", node, "ops", position)
    if isinstance(node, ast.Constant) and type(node.value) is int and abs(node.value) <= LARGEST_NUMBER:
        yield _Site(function, "number", place.owner, place.field, place.position)
    for field, value in ast.iter_fields(node):
        if isinstance(value, list):
            for position, each in enumerate(value):
                if isinstance(each, ast.AST):
                    yield from _at(_Site(function, "", node, field, position), returns_bool)
        elif isinstance(value, ast.AST) and field not in ("annotation", "returns"):
            yield from _at(_Site(function, "", node, field), returns_bool)


def _is_silent(call: ast.Call) -> bool:
    node: ast.AST = call
    while isinstance(node, ast.Call | ast.Attribute | ast.Subscript):
        if isinstance(node, ast.Attribute) and node.attr in _SILENT_NAMES:
            return True
        node = node.func if isinstance(node, ast.Call) else node.value
    return isinstance(node, ast.Name) and node.id in _SILENT_NAMES


def _is_truth_value(node: ast.expr) -> bool:
    is_negation = isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not)
    return is_negation or isinstance(node, ast.Compare) or (isinstance(node, ast.Constant) and type(node.value) is bool)


def _negated(condition: ast.expr) -> ast.expr:
    if isinstance(condition, ast.UnaryOp) and isinstance(condition.op, ast.Not):
        return condition.operand
    return ast.copy_location(ast.UnaryOp(ast.Not(), condition), condition)


def _dropped(statement: ast.stmt) -> ast.stmt:
    """Returns a statement that never runs. It still names the same variables, so the function stays of its kind."""
    return ast.copy_location(ast.If(ast.Constant(False), [statement], []), statement)


def _greater(number: ast.Constant) -> ast.Constant:
    assert isinstance(number.value, int)
    return ast.copy_location(ast.Constant(number.value + 1), number)


def _moved(operator: ast.cmpop) -> ast.cmpop:
    return _BOUNDARIES[type(operator)]()


_KINDS: Mapping[str, Callable[[Any], Any]] = {
    "negate": _negated,
    "drop-call": _dropped,
    "drop-raise": _dropped,
    "boundary": _moved,
    "number": _greater,
}


def _value(owner: ast.AST, field: str, position: int | None) -> Any:
    value = getattr(owner, field)
    return value if position is None else value[position]


def _replace(owner: ast.AST, field: str, position: int | None, new: ast.AST) -> None:
    if position is None:
        setattr(owner, field, new)
    else:
        getattr(owner, field)[position] = new


def _change(site: _Site, source: str) -> tuple[int, str]:
    """Returns the line of a change, and the line with the old and the new text."""
    old = _value(site.owner, site.field, site.position)
    new = _KINDS[site.kind](old)
    if site.kind == "boundary":
        place: Any = site.owner
        assert isinstance(place, ast.Compare)
        assert site.position is not None
        operators = [*place.ops[: site.position], new, *place.ops[site.position + 1 :]]
        text = ast.unparse(ast.Compare(place.left, operators, place.comparators))
    else:
        place = old
        text = "" if site.kind.startswith("drop") else ast.unparse(new)
    line = source.splitlines()[place.lineno - 1].encode()
    end = place.end_col_offset if place.end_lineno == place.lineno else len(line)
    before, changed, after = (
        part.decode() for part in (line[: place.col_offset], line[place.col_offset : end], line[end:])
    )
    return place.lineno, f"{before.lstrip()}[-{changed}-]{{+{text}+}}{after}"
