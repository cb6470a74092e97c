"""`LateOpening` opens a store that was down at the start of the process, at the first call that needs it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from tiers.errors import RemoteStorageError
from tiers.storage.remote_storage_manager import RemoteStorageManager

RETRY_MS = 1_000


class LateOpening:
    """One store. While it is closed, calls fail by the error of the last attempt, at most one attempt per second."""

    def __init__(self, storage: RemoteStorageManager, clock_ms: Callable[[], int]) -> None:
        self.storage = storage
        self._clock_ms = clock_ms
        self._is_open = False
        self._opening = asyncio.Lock()
        self._error: RemoteStorageError | None = None
        self._again_at_ms = 0

    async def open(self) -> None:
        """Opens the store. Raises its error."""
        await self.storage.open()
        self._is_open = True

    async def opened(self) -> RemoteStorageManager:
        """Returns the open store. Raises its error while it cannot be opened."""
        if self._is_open:
            return self.storage
        async with self._opening:
            if self._error is not None and self._clock_ms() < self._again_at_ms:
                raise self._error
            if not self._is_open:
                try:
                    await self.open()
                except RemoteStorageError as error:
                    self._error, self._again_at_ms = error, self._clock_ms() + RETRY_MS
                    raise
        return self.storage
