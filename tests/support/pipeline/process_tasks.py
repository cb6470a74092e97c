"""Tasks for the processes of a `ProcessRunner`, which import them by name."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path

from pipeline.spark.scratch import scratch_folder
from pipeline.worker import worker
from tests.support.rigs.waiting import until


async def squared(number: int) -> tuple[int, int]:
    return number * number, os.getpid()


async def refused(number: int) -> int:
    raise PermissionError(f"no right to read segment {number}")


async def killed(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


async def endless(began: str) -> None:
    await asyncio.to_thread(Path(began).write_text, str(os.getpid()))
    time.sleep(1200)  # noqa: ASYNC251  # a task that no message reaches


async def ended(code: int) -> None:
    os._exit(code)


class KillsItsSender:
    """A value that kills the process that sends it, as soon as it has arrived."""

    def __reduce__(self) -> tuple[Callable[[int, int], None], tuple[int, int]]:
        return os.kill, (os.getpid(), signal.SIGKILL)


async def killed_while_sending(size_bytes: int) -> tuple[KillsItsSender, bytes]:
    return KillsItsSender(), bytes(size_bytes)


class Unreadable:
    def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
        return import_module, ("no_such_module",)


async def unreadable(number: int) -> Unreadable:
    return Unreadable()


async def refused_beside_scratch(row: tuple[str, bool]) -> None:
    """One of two tasks: it keeps a file in a scratch folder, or raises while the other one does."""
    began = Path(row[0])
    if row[1]:
        await asyncio.to_thread(until, began.exists)
        raise PermissionError("no right to write")
    with scratch_folder("test") as folder:
        (folder / "segment").write_bytes(b"records")
        await endless(row[0])


def one_more(number: int) -> int:
    return worker().run(asyncio.sleep(0, number + 1))
