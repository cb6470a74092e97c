"""A `RemoteStorageManager` that wraps another one, can be set to fail, and notes deletions and listings."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from tiers.errors import RemoteResourceNotFoundError, RetriableRemoteStorageError
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.remote_storage_manager import (
    LogSegmentData,
    RemoteStorageManager,
    StoredObject,
    StoreFeatures,
)

_STALL_S = 0.05
"""How long a call waits for a store that does not answer."""


class Lie(Enum):
    REFUSES = "answers 503"
    STALLS = "stalls"
    """The store does what the call asks, but no answer comes back."""
    TRUNCATES = "truncates"
    """The store writes or reads only half of an object, and does not confirm a deletion."""
    FORGETS = "does not show the objects that it has"


class Deletion(NamedTuple):
    segment_id: RemoteLogSegmentId
    was_named: bool


class LyingStore:
    def __init__(self, inner: RemoteStorageManager) -> None:
        self._inner = inner
        self.lie: Lie | None = None
        self.is_named: Callable[[RemoteLogSegmentId], bool] = lambda segment_id: False
        """Whether a segment has a DELETE record. The test sets it."""
        self.deletions: list[Deletion] = []
        self.listings = 0
        self.lies_told = 0

    async def _before(self) -> None:
        if self.lie is not None:
            self.lies_told += 1
        if self.lie is Lie.REFUSES:
            raise RetriableRemoteStorageError("503 Slow Down")

    async def _after(self) -> None:
        if self.lie is Lie.STALLS:
            await asyncio.sleep(_STALL_S)
            raise RetriableRemoteStorageError(f"no answer in {_STALL_S} s")

    async def _before_a_read(self) -> None:
        await self._before()
        if self.lie is Lie.FORGETS:
            raise RemoteResourceNotFoundError("no such object")

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        await self._before()
        if self.lie is Lie.TRUNCATES:
            with tempfile.TemporaryDirectory() as folder:
                half = Path(folder) / "half"
                half.write_bytes(data.log_segment.read_bytes()[: metadata.segment_size_bytes // 2])
                return await self._inner.copy_log_segment_data(metadata, LogSegmentData(half, data.indexes))
        custom_metadata = await self._inner.copy_log_segment_data(metadata, data)
        await self._after()
        return custom_metadata

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        await self._before_a_read()
        view = await self._inner.fetch_log_segment(metadata, start_position, end_position)
        await self._after()
        return view[: len(view) // 2] if self.lie is Lie.TRUNCATES else view

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        await self._before_a_read()
        data = await self._inner.fetch_indexes(metadata)
        await self._after()
        return data[: len(data) // 2] if self.lie is Lie.TRUNCATES else data

    async def delete_log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> bool:
        self.deletions.append(Deletion(metadata.segment_id, self.is_named(metadata.segment_id)))
        await self._before()
        if self.lie is Lie.TRUNCATES:
            return False
        done = await self._inner.delete_log_segment_data(metadata)
        await self._after()
        return done

    async def probe(self) -> Sequence[StoreFeatures]:
        await self._before()
        return await self._inner.probe()

    async def put_object(self, key: str, data: bytes) -> None:
        await self._before()
        await self._inner.put_object(key, data[: len(data) // 2] if self.lie is Lie.TRUNCATES else data)
        await self._after()

    async def get_object(self, key: str) -> bytes:
        await self._before_a_read()
        data = await self._inner.get_object(key)
        await self._after()
        return data[: len(data) // 2] if self.lie is Lie.TRUNCATES else data

    async def delete_object(self, key: str) -> None:
        await self._before()
        await self._inner.delete_object(key)
        await self._after()

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        """Yields a listing that is stale in both ways: every other object is missing, and a deleted one is listed."""
        self.listings += 1
        yield StoredObject(f"{prefix}gone", 1)
        number = 0
        async for stored in self._inner.list_objects(prefix):
            number += 1
            if number % 2:
                yield stored

    async def open(self) -> None:
        await self._inner.open()

    async def check(self) -> None:
        await self._inner.check()

    async def close(self) -> None:
        await self._inner.close()
