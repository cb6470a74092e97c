"""`tidegate` with an alteration for tests: `python -m tests.support.servers.altered_tidegate ALTERATION serve ...`.

The alterations exist only here, in this process. `early-alarms`: alarms come after seconds. The others are steps at
which the process stops itself (SIGSTOP), once. A test sends SIGCONT, and the process goes on as after a long pause:

* `objects-written`: the objects of a segment are in the store, and the owner has not read them back.
* `copy-verified`: the owner has read them back. COPY_SEGMENT_FINISHED is next.
* `delete-records`: the owner has checked everything, and DeleteRecords is next.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Awaitable, Callable, Sequence
from functools import partial, wraps
from typing import Any

from kafka.protocol.admin import DeleteRecordsRequest

from proxy.cli import run
from proxy.process import remote_log
from tests.support.rigs.waiting import until
from tests.support.servers.tidegate import TidegateProcess, process_state
from tiers.broker.connection import BrokerConnection
from tiers.tasks.copy import copy_attempts

_ALARM_MS = 2000
EARLY_ALARMS = (__name__, "early-alarms")


def stopping_at(step: str) -> Sequence[str]:
    """Returns the `command` of a `TidegateProcess` that stops itself at the step."""
    assert step in ALTERATIONS
    return (__name__, step)


def until_stopped(proxy: TidegateProcess) -> None:
    until(lambda: process_state(proxy.pid) == "T")


def resume(proxy: TidegateProcess) -> None:
    os.killpg(proxy.pid, signal.SIGCONT)


class _Stop:
    """Stops all processes of the proxy at its first call."""

    def __init__(self) -> None:
        self._is_over = False

    def __call__(self) -> None:
        if not self._is_over:
            self._is_over = True
            os.killpg(0, signal.SIGSTOP)


def _stop_after(name: str) -> None:
    module: Any = copy_attempts
    work: Callable[..., Awaitable[Any]] = getattr(module, name)
    stop = _Stop()

    @wraps(work)
    async def then_stop(*args: Any) -> Any:
        result = await work(*args)
        stop()
        return result

    setattr(module, name, then_stop)


def _stop_before_delete_records() -> None:
    connection: Any = BrokerConnection
    send, stop = connection._send, _Stop()

    async def stop_first(self: BrokerConnection, message: Any, *args: Any) -> Any:
        if isinstance(message, DeleteRecordsRequest):
            stop()
        return await send(self, message, *args)

    connection._send = stop_first


def _alarm_early() -> None:
    module: Any = remote_log
    module.RemoteLogManagerSettings = partial(module.RemoteLogManagerSettings, stage_alarm_ms=_ALARM_MS)


ALTERATIONS: dict[str, Callable[[], None]] = {
    "early-alarms": _alarm_early,
    "objects-written": partial(_stop_after, "store"),
    "copy-verified": partial(_stop_after, "read_attempt"),
    "delete-records": _stop_before_delete_records,
}


if __name__ == "__main__":
    ALTERATIONS[sys.argv[1]]()
    sys.exit(run(sys.argv[2:]))
