"""`with_retries` repeats a call of a store while its error is retriable."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tiers.errors import RemoteStorageError

T = TypeVar("T")

_ATTEMPTS = 5
FIRST_PAUSE_MS = 100


async def with_retries(
    call: Callable[[], Awaitable[T]],
    pause_ms: int = FIRST_PAUSE_MS,
    repeated: type[RemoteStorageError] = RemoteStorageError,
) -> T:
    """Repeats a call a few times while its error is retriable and of the class `repeated`. Raises the last error."""
    for attempt in range(_ATTEMPTS):
        try:
            return await call()
        except repeated as error:
            if not error.retriable or attempt == _ATTEMPTS - 1:
                raise
        await asyncio.sleep((pause_ms << attempt) / 1000)
    raise AssertionError("unreachable")
