"""Gives the functions of this process other code, as if their source were changed.

No module is imported again, so every reference to a function stays valid, and no file changes.
"""

from __future__ import annotations

import ast
import gc
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import CodeType, FunctionType
from typing import Protocol


class Defect(Protocol):
    """A change of one function of a source file."""

    @property
    def name(self) -> str: ...

    @property
    def path(self) -> str: ...

    @property
    def function(self) -> tuple[str, int]:
        """The qualified name and the first line of the innermost function, as its code object has them."""

    def tree(self, source: str) -> ast.Module:
        """Returns the changed file. All line numbers are those of the source."""


class LiveFunctions:
    """The functions of some files that exist in this process. The modules of the files are imported."""

    def __init__(self, root: Path, paths: Iterable[str]) -> None:
        """`paths` are below `root`."""
        self._sources = {path: (root / path).read_text() for path in paths}
        self._by_path: defaultdict[str, list[FunctionType]] = defaultdict(list)
        names = {str(root / path): path for path in self._sources}
        gc.unfreeze()  # `gc.get_objects` has no frozen objects
        for each in gc.get_objects():
            if type(each) is FunctionType and (path := names.get(each.__code__.co_filename)) is not None:
                self._by_path[path].append(each)

    def apply(self, defect: Defect) -> dict[FunctionType, CodeType]:
        """Returns the functions that have other code now, with their own code."""
        functions = self._by_path[defect.path]
        if not functions:
            return {}
        file_name = functions[0].__code__.co_filename
        changed = compile(defect.tree(self._sources[defect.path]), file_name, "exec", dont_inherit=True)
        codes = {key_of(code): code for code in _codes(changed)}
        own: dict[FunctionType, CodeType] = {}
        for function in functions:
            code = codes.get(key_of(function.__code__))
            if code is not None and code != function.__code__:
                own[function], function.__code__ = function.__code__, code
        return own


def key_of(code: CodeType) -> tuple[str, int]:
    return code.co_qualname, code.co_firstlineno


def first_line(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Returns the first line as the code object of a function has it: that of the first decorator, if there is one."""
    return min([function.lineno, *(each.lineno for each in function.decorator_list)])


def _codes(code: CodeType) -> Iterator[CodeType]:
    """Yields the code objects of all named functions inside of a code object."""
    for each in code.co_consts:
        if isinstance(each, CodeType):
            if not each.co_name.startswith("<"):
                yield each
            yield from _codes(each)
