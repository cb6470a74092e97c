"""A pytest plugin that runs each mutant in a fork of a process that has collected the tests.

First each test runs alone, without a mutant, and the gate notes its time and the functions that it executes. So a
mutant needs only the tests that execute its function. A mutant that no test executes needs no run.
"""

from __future__ import annotations

import json
import os
import resource
import select
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from functools import partial
from pathlib import Path, PurePosixPath
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

from tests.support.mutants.live_functions import Defect, LiveFunctions, key_of
from tests.support.temporary_folder import use_memory

_TIMES_SLOWER = 3
_CLEAN_TIME_S = 300.0
_MEMORY_BYTES = 6 << 30
"""Ends a mutant that allocates without an end."""


class Outcome(Enum):
    KILLED = "killed"
    TIMED_OUT = "timed out"
    SURVIVED = "survived"
    NOT_EXECUTED = "not executed"
    NOT_RUN = "not run"
    """The time was over."""


class Tested(NamedTuple):
    mutant: Defect
    outcome: Outcome
    by: str = ""
    """The test that killed the mutant."""


@dataclass(frozen=True, slots=True)
class _Clean:
    seconds: float
    functions: frozenset[tuple[str, tuple[str, int]]]
    """The paths and keys of the functions that the test executes."""


class Gate:
    """Runs the mutants of all folders, in their order, each folder for its share of the time."""

    def __init__(
        self,
        root: Path,
        folders: Mapping[str, Sequence[Defect]],
        seconds: float,
        more_seconds: float,
        temporary: Path,
        tell: Callable[[str], None],
    ) -> None:
        """A test times out after three times its own time and `more_seconds`.

        `temporary` is a folder for the tests, with pytest's own folder in it. It is empty after each test."""
        self._root = root
        self._folders = folders
        self._seconds = seconds
        self._more_seconds = more_seconds
        self._tell = tell
        self._temporary = temporary
        self._clean: dict[pytest.Item, _Clean] = {}
        self._failed = False
        self.results: dict[str, list[Tested]] = {folder: [] for folder in folders}
        self.broken: list[str] = []
        """The tests that fail without a mutant."""

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        if session.testsfailed:
            self.broken.append("a test file cannot be imported")
            return True
        paths = {one.path for mutants in self._folders.values() for one in mutants}
        functions = LiveFunctions(self._root, paths)
        began_s = time.monotonic()
        self._run_clean([item for item in session.items if not _starts_a_server(item)], paths)
        seconds = sum(clean.seconds for clean in self._clean.values())
        self._tell(
            f"{len(self._clean)} tests ran alone in {time.monotonic() - began_s:.0f} s, {seconds:.0f} s of it in tests"
        )
        if self.broken:
            return True
        deadline_s = time.monotonic() + self._seconds
        for left, (folder, mutants) in zip(range(len(self._folders), 0, -1), self._folders.items(), strict=True):
            now_s = time.monotonic()
            self._run_folder(folder, mutants, functions, now_s + (deadline_s - now_s) / left)
        return True

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed = self._failed or report.failed

    def _run_clean(self, items: Sequence[pytest.Item], paths: set[str]) -> None:
        names = {str(self._root / path): path for path in paths}
        for number, item in enumerate(items, 1):
            if number % 500 == 0:
                self._tell(f"{number}/{len(items)} tests")
            clean = self._clean_run(item, names) or self._clean_run(item, names)  # a busy machine may fail a test once
            if clean is None:
                self.broken.append(item.nodeid)
            else:
                self._clean[item] = clean

    def _clean_run(self, item: pytest.Item, names: Mapping[str, str]) -> _Clean | None:
        """Returns None if the test fails."""
        try:
            answers = list(self._in_fork(partial(self._measure, item, names), _CLEAN_TIME_S))
        except TimeoutError:
            return None
        if not answers or answers[0].get("failed", True):
            return None
        executed = frozenset((path, (name, line)) for path, name, line in answers[0]["functions"])
        return _Clean(answers[0]["seconds"], executed)

    def _measure(self, item: pytest.Item, names: Mapping[str, str], answer: Callable[[Any], None]) -> None:
        began_s = time.monotonic()
        with _noted_calls() as codes:
            self._run(item)
        executed = [(names[code.co_filename], *key_of(code)) for code in codes.values() if code.co_filename in names]
        answer({"failed": self._failed, "seconds": time.monotonic() - began_s, "functions": executed})

    def _run_folder(self, folder: str, mutants: Sequence[Defect], functions: LiveFunctions, deadline_s: float) -> None:
        killers: defaultdict[str, Counter[pytest.Item]] = defaultdict(Counter)
        for number, mutant in enumerate(mutants, 1):
            if time.monotonic() >= deadline_s:
                self.results[folder].append(Tested(mutant, Outcome.NOT_RUN))
                continue
            needed = [item for item, clean in self._clean.items() if (mutant.path, mutant.function) in clean.functions]
            kills = killers[mutant.path]
            needed.sort(key=lambda one: (-kills[one], distance(one.nodeid, mutant.path), self._clean[one].seconds))
            began_s = time.monotonic()
            tested, killer = self._test(mutant, needed, functions)
            if killer is not None:
                kills[killer] += 1
            self.results[folder].append(tested)
            self._tell(
                f"{number}/{len(mutants)} {tested.outcome.value} in {time.monotonic() - began_s:.1f} s: {mutant.name}"
            )

    def _test(
        self, mutant: Defect, items: Sequence[pytest.Item], functions: LiveFunctions
    ) -> tuple[Tested, pytest.Item | None]:
        if not items:
            return Tested(mutant, Outcome.NOT_EXECUTED), None

        def run(answer: Callable[[Any], None]) -> None:
            if not functions.apply(mutant):
                raise ValueError(f"no function of this process has the code of {mutant.name}")
            for number, item in enumerate(items):
                answer({"item": number, "limit": self._more_seconds + _TIMES_SLOWER * self._clean[item].seconds})
                self._run(item)
                if self._failed:
                    return
            answer({"survived": True})

        item, answer = None, {}
        try:
            for answer in self._in_fork(run, _CLEAN_TIME_S):
                if "survived" in answer:
                    return Tested(mutant, Outcome.SURVIVED), None
                if "error" in answer:
                    break
                item = items[answer["item"]]
            outcome = Outcome.KILLED
        except TimeoutError:
            outcome = Outcome.TIMED_OUT
        if item is None:
            raise RuntimeError(f"{mutant.name} cannot be applied: {answer}")
        return Tested(mutant, outcome, item.nodeid), item

    def _run(self, item: pytest.Item) -> None:
        """Runs a test as the only test of a session. So its fixtures of any scope end with it."""
        item.config.hook.pytest_runtest_protocol(item=item, nextitem=None)

    def _in_fork(self, work: Callable[[Callable[[Any], None]], None], limit_s: float) -> Iterator[Any]:
        """Yields the answers of a process that does some work. An answer may have the `limit` (s) until the next one.

        Ends early if the process dies. Raises `TimeoutError` after the limit."""
        reading, writing = os.pipe()
        pid = os.fork()
        if pid == 0:
            self._become_child(work, writing)
        os.close(writing)
        try:
            with os.fdopen(reading, "rb", buffering=0) as pipe:
                yield from _lines(pipe, limit_s)
        finally:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            for leftover in self._temporary.iterdir():
                shutil.rmtree(leftover, ignore_errors=True) if leftover.is_dir() else leftover.unlink()

    def _become_child(self, work: Callable[[Callable[[Any], None]], None], writing: int) -> None:
        code = 1
        try:
            os.setpgid(0, 0)
            resource.setrlimit(resource.RLIMIT_DATA, (_MEMORY_BYTES, _MEMORY_BYTES))
            nowhere = os.open(os.devnull, os.O_RDWR)
            for descriptor in (0, 1, 2):
                os.dup2(nowhere, descriptor)
            os.environ["TMPDIR"] = tempfile.tempdir = str(self._temporary)
            work(lambda answer: _write(writing, answer))
            code = 0
        except BaseException:
            _write(writing, {"error": traceback.format_exc()})
        finally:
            os._exit(code)


def run_gate(
    folders: Mapping[str, Sequence[Defect]],
    tests: Sequence[str],
    seconds: float,
    more_seconds: float,
    tell: Callable[[str], None],
) -> Gate:
    """Runs the gate below the current folder, with the tests of some files or folders. See `Gate.broken` first."""
    use_memory()
    with tempfile.TemporaryDirectory() as temporary:
        gate = Gate(Path.cwd(), folders, seconds, more_seconds, Path(temporary), tell)
        arguments = ["-qq", "-s", "-m", "not full", "-p", "no:cacheprovider", "--basetemp", f"{temporary}/pytest"]
        code = pytest.main([*tests, *arguments], plugins=[gate])
    if code != pytest.ExitCode.OK and not gate.broken:
        gate.broken.append(f"pytest ended with {code!r}")
    return gate


def _starts_a_server(item: pytest.Item) -> bool:
    """Tells whether a test needs a server. `tests/conftest.py` groups it by the server then, and else by its file."""
    group = item.get_closest_marker("xdist_group")
    return group is not None and group.args[0] != item.path.name


def distance(nodeid: str, path: str) -> int:
    """Returns how far a test is from a source file: 0 for the file's own tests, 1 for its folder's, and so on."""
    test, source = PurePosixPath(nodeid.partition("::")[0]), PurePosixPath(path)
    mirrored = PurePosixPath("tests/unit") / source.parent
    if test.name == f"test_{source.name}" and source.parent.parts[-1] in test.parts:
        return 0
    if test.parent == mirrored:
        return 1
    return 2 if test.is_relative_to(mirrored.parent) else 3


@contextmanager
def _noted_calls() -> Iterator[dict[int, CodeType]]:
    """Notes the code object of every Python function that this process calls, in all threads that it starts."""
    codes: dict[int, CodeType] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        if event == "call":
            codes[id(frame.f_code)] = frame.f_code

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield codes
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def _write(descriptor: int, answer: Any) -> None:
    data = json.dumps(answer).encode() + b"\n"
    while data:
        data = data[os.write(descriptor, data) :]


def _lines(pipe: Any, limit_s: float) -> Iterator[Any]:
    data = b""
    while select.select([pipe], [], [], limit_s)[0]:
        read = pipe.read(1 << 16)
        if not read:
            return
        *lines, data = (data + read).split(b"\n")
        for line in lines:
            answer = json.loads(line)
            limit_s = answer.get("limit", limit_s)
            yield answer
    raise TimeoutError
