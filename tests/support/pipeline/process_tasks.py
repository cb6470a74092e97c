"""Tasks for the processes of a `ProcessRunner`, which import them by name."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

from pipeline.worker import worker


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


def one_more(number: int) -> int:
    return worker().run(asyncio.sleep(0, number + 1))
