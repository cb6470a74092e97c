"""`IoCalls` counts a process's calls to other processes and to its disk. At one of these calls an event happens.

A process that has ended does nothing more: every later call raises `ProcessEnded`, also during its clean-up.
"""

from __future__ import annotations

import asyncio
import errno
import inspect
import os
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from enum import Enum
from io import IOBase
from pathlib import Path
from typing import Any, TypeVar
from unittest.mock import patch

T = TypeVar("T")

_FILE_CALLS = ("unlink", "replace", "mkdir")


class ProcessEnded(Exception):
    """The process ended at this call, or before it."""


class Event(Enum):
    """An event at a call: before the call, or after the call and before its answer is known."""

    KILLED_BEFORE = "killed before"
    KILLED_AFTER = "killed after"
    FAILED_BEFORE = "failed before"
    FAILED_AFTER = "failed after"
    CANCELLED_AFTER = "cancelled after"

    @property
    def is_before(self) -> bool:
        return self.value.endswith("before")


class IoCalls:
    def __init__(self) -> None:
        self.names: list[str] = []
        self.is_gone = False
        self._at = -1
        self._event = Event.KILLED_BEFORE

    def arm(self, at: int, event: Event) -> None:
        """Sets the event for call number `at`, counted from 0 from now on."""
        self.names.clear()
        self._at, self._event = at, event

    def disarm(self) -> None:
        self._at = -1

    def of(self, inner: T, name: str, failure: Callable[[], Exception]) -> T:
        """Wraps `inner`, whose coroutines become counted calls. `failure` makes the exception of a failed call."""
        return _Counted(self, inner, name, failure)  # type: ignore[return-value]  # it has all attributes of `inner`

    @contextmanager
    def with_files_below(self, folder: Path) -> Iterator[None]:
        """Counts changes of files below `folder` as calls too, from any thread."""

        def counted(name: str, change: Callable[..., Any]) -> Callable[..., Any]:
            def method(path: Path, *arguments: Any, **options: Any) -> Any:
                if folder not in path.parents:
                    return change(path, *arguments, **options)
                return self.blocking(name, lambda: change(path, *arguments, **options))

            return method

        def opened(path: Path, mode: str = "r", *arguments: Any, **options: Any) -> Any:
            if folder not in path.parents or "r" in mode:
                return open_path(path, mode, *arguments, **options)
            return self.blocking("open", lambda: open_path(path, mode, *arguments, **options))

        def synced(descriptor: int) -> None:
            self.blocking("fsync", lambda: fsync(descriptor))

        open_path, fsync = Path.open, os.fsync
        with patch.object(Path, "open", opened), patch.object(os, "fsync", synced):
            patches = [patch.object(Path, name, counted(name, getattr(Path, name))) for name in _FILE_CALLS]
            for one in patches:
                one.start()
            try:
                yield
            finally:
                for one in patches:
                    one.stop()

    async def awaited(self, name: str, call: Callable[[], Awaitable[T]], failure: Callable[[], Exception]) -> T:
        is_due = self._count(name)
        if is_due and self._event.is_before:
            self._happen(failure)
        answer = await call()
        if is_due and not self._event.is_before:
            self._happen(failure)
        if self.is_gone:
            raise ProcessEnded(name)
        return answer

    def _happen(self, failure: Callable[[], Exception]) -> None:
        if self._event is Event.CANCELLED_AFTER:
            raise asyncio.CancelledError
        self._end(failure)

    def blocking(self, name: str, call: Callable[[], T]) -> T:
        """Counts a call in a thread. A thread cannot be cancelled."""
        is_due = self._count(name)
        ends = self._event.value.startswith(("killed", "failed"))
        if is_due and ends and self._event.is_before:
            self._end(_disk_failure)
        answer = call()
        if is_due and ends and not self._event.is_before:
            if isinstance(answer, IOBase):
                answer.close()
            self._end(_disk_failure)
        return answer

    def _end(self, failure: Callable[[], Exception]) -> None:
        if self._event in (Event.FAILED_BEFORE, Event.FAILED_AFTER):
            raise failure()
        self.is_gone = True
        raise ProcessEnded(self.names[-1])

    def _count(self, name: str) -> bool:
        if self.is_gone:
            raise ProcessEnded(name)
        self.names.append(name)
        return len(self.names) - 1 == self._at


def _disk_failure() -> Exception:
    return OSError(errno.EIO, os.strerror(errno.EIO))


class _Counted:
    def __init__(self, calls: IoCalls, inner: object, name: str, failure: Callable[[], Exception]) -> None:
        self._calls, self._inner, self._name, self._failure = calls, inner, name, failure

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        if not inspect.iscoroutinefunction(value):
            return value

        async def call(*arguments: Any, **options: Any) -> Any:
            return await self._calls.awaited(
                f"{self._name}.{name}", lambda: value(*arguments, **options), self._failure
            )

        return call
