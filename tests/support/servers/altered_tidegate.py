"""`tidegate` that stops itself in the middle of a copy: `python -m tests.support.servers.altered_tidegate serve ...`.

The alteration exists only here, in this process. The process stops itself (SIGSTOP) once, when it has read the objects
of a segment back. COPY_SEGMENT_FINISHED is next. A test sends SIGCONT, and the process goes on as after a long pause.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable
from functools import wraps
from typing import Any

from proxy.cli import run
from tests.support.rigs.waiting import until
from tests.support.servers.tidegate import TidegateProcess, process_state
from tiers.tasks.copy import copy_attempts

STOPS_ITSELF = (__name__,)
"""The `command` of a `TidegateProcess` that stops itself."""


def until_stopped(proxy: TidegateProcess) -> None:
    until(lambda: process_state(proxy.pid) == "T")


def resume(proxy: TidegateProcess) -> None:
    os.killpg(proxy.pid, signal.SIGCONT)


def _stop_once_after_a_read_back() -> None:
    module: Any = copy_attempts
    read_attempt: Callable[..., Awaitable[Any]] = module.read_attempt

    @wraps(read_attempt)
    async def then_stop(*args: Any) -> Any:
        result = await read_attempt(*args)
        module.read_attempt = read_attempt
        os.killpg(0, signal.SIGSTOP)
        return result

    module.read_attempt = then_stop


if __name__ == "__main__":
    _stop_once_after_a_read_back()
    sys.exit(run(sys.argv[1:]))
