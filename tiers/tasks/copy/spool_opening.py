"""Opens the spool of a process, however long its disk is full.

The process is a member of the group already when its manager starts. If the manager gave up, the process would own
partitions that nobody copies.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from tiers.lasting_trouble import LastingTrouble
from tiers.tasks.copy.spool import SpoolError
from tiers.tasks.task_services import TaskServices


async def open_spool(
    services: TaskServices, failing: LastingTrouble, wake: asyncio.Event, is_stopped: Callable[[], bool]
) -> None:
    """Opens the spool, and repeats that after an error of the disk. Returns without an open spool when `is_stopped`.

    `wake` ends a pause early."""
    while not is_stopped():
        wake.clear()
        try:
            await services.spool.open()
        except SpoolError as error:
            failing.found(error=str(error))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(services.settings.remote_log.task_retry_backoff_ms / 1000):
                    await wake.wait()
        else:
            failing.ended()
            return
