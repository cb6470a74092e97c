"""Waits in an event loop for conditions that no event announces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


async def until(holds: Callable[[], bool], timeout_s: float = 300) -> None:
    """Checks the condition repeatedly. Fails if it does not hold in time."""
    async with asyncio.timeout(timeout_s):
        while not holds():  # noqa: ASYNC110 - nothing that is waited for sets an event
            await asyncio.sleep(0.005)
