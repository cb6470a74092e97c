"""`sampled` takes a sample for the history at equal intervals."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

from proxy.admin.counts import INTERVAL_MS

logger = logging.getLogger(__name__)

Sleep = Callable[[float], Awaitable[None]]


@asynccontextmanager
async def sampled(
    sample: Callable[[], Awaitable[None]], interval_ms: int = INTERVAL_MS, sleep: Sleep = asyncio.sleep
) -> AsyncIterator[None]:
    """Calls `sample` at once and every `interval_ms`, until the context exits."""

    async def keep() -> None:
        while True:
            try:
                await sample()
            except Exception:  # the history is for people alone, and must end nothing
                logger.exception("the history of the page has a hole")
            await sleep(interval_ms / 1000)

    async with asyncio.TaskGroup() as tasks:
        keeper = tasks.create_task(keep(), name="page-history")
        try:
            yield
        finally:
            keeper.cancel()
