"""A `RemoteStorageManager` that wraps another one, and fails or delays its reads as a test sets."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable

from tiers.errors import RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.locations import LocatedRemoteStorageManager
from tiers.storage.remote_storage_manager import RemoteStorageManager


class FaultyStorage(LocatedRemoteStorageManager):
    """The next reads of a log raise `failures`, one each. Counts the calls that reached the store."""

    def __init__(self, inner: RemoteStorageManager) -> None:
        super().__init__(inner)
        self.inner = inner
        self.failures: deque[Exception] = deque()
        self.index_failures: deque[Exception] = deque()
        self.is_down = False
        self.refusals = asyncio.Semaphore(0)
        """Released once for every read that found the store down."""
        self.gate: asyncio.Event | None = None
        """The event that reads of a log wait for. None: they do not wait."""
        self.damage: Callable[[bytes], bytes] | None = None
        """A change to the bytes that reads of a log return. It stays until a test resets it."""
        self.asked = asyncio.Event()
        """The first read of a log sets it."""
        self.gets: list[tuple[int, int]] = []
        self.index_gets = 0
        self.running = 0
        self.max_running = 0

    def fail(self, times: int) -> None:
        self.failures.extend(RetriableRemoteStorageError("slow down") for _ in range(times))

    def _refuse_when_down(self) -> None:
        if self.is_down:
            self.refusals.release()
            raise RetriableRemoteStorageError("the store is down")

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        end = metadata.segment_size_bytes - 1 if end_position is None else end_position
        self.gets.append((start_position, end))
        self.asked.set()
        self.running += 1
        self.max_running = max(self.max_running, self.running)
        try:
            if self.gate is not None:
                await self.gate.wait()
            self._refuse_when_down()
            if self.failures:
                raise self.failures.popleft()
            data = await self.inner.fetch_log_segment(metadata, start_position, end_position)
            return data if self.damage is None else memoryview(self.damage(bytes(data)))
        finally:
            self.running -= 1

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        self.index_gets += 1
        self._refuse_when_down()
        if self.index_failures:
            raise self.index_failures.popleft()
        return await self.inner.fetch_indexes(metadata)
