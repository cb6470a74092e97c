"""`SegmentReads`: the reads that the read path needs from a store, implemented by a store or by a wrapper of one."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Protocol, TypeVar

from tiers.errors import RemoteResourceNotFoundError, RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.reader.retry import CircuitBreaker

T = TypeVar("T")


class SegmentReads(Protocol):
    """Two methods of `RemoteStorageManager`, with the same contract."""

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int
    ) -> memoryview: ...

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes: ...


class GuardedReads:
    """A `SegmentReads` behind the store's circuit breaker. Raises `CircuitOpenError` while the circuit is open."""

    def __init__(self, inner: SegmentReads, breaker: CircuitBreaker) -> None:
        self._inner = inner
        self._breaker = breaker

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int
    ) -> memoryview:
        self._breaker.before_call()
        return await self._recorded(self._inner.fetch_log_segment(metadata, start_position, end_position))

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        self._breaker.before_call()
        return await self._recorded(self._inner.fetch_indexes(metadata))

    async def _recorded(self, call: Awaitable[T]) -> T:
        try:
            result = await call
        except RemoteResourceNotFoundError:
            self._breaker.record_success()
            raise
        except (RetriableRemoteStorageError, asyncio.CancelledError):  # the pool cancels a download that hangs
            self._breaker.record_failure()
            raise
        self._breaker.record_success()
        return result
