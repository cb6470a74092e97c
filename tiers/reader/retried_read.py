"""`RetriedRead`: attempts at one read of a segment until its deadline, outside the pools' slots.

* Trouble that may pass is waited out with backoff. A FINISHED segment that the store does not find is such trouble
  (stores may be eventually consistent), unless the metadata says that the segment was deleted meanwhile.
* A checksum mismatch is read again once, then it is an error.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tiers.errors import CorruptSegmentError, RemoteLogError, RemoteReadTimeoutError, RemoteResourceNotFoundError
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.reader.retry import backoff_ms

T = TypeVar("T")

_METADATA_RELOAD_TIMEOUT_MS = 1000


class SegmentDeletedError(RemoteLogError):
    """The metadata moved on under a read: look the offset up again."""


class RetriedRead:
    def __init__(self, rlmm: RemoteLogMetadataReader, clock_ms: Callable[[], int], jitter: Callable[[], float]) -> None:
        self._rlmm = rlmm
        self._clock_ms = clock_ms
        self._jitter = jitter

    async def run(self, segment: RemoteLogSegmentMetadata, attempt: Callable[[], Awaitable[T]], deadline_ms: int) -> T:
        """Raises `SegmentDeletedError`, `RemoteReadTimeoutError`, and any `RemoteLogError` that will not pass."""
        failures = 0
        is_reread = False
        cause: Exception | None = None
        while True:
            remaining_ms = deadline_ms - self._clock_ms()
            if remaining_ms <= 0:
                raise RemoteReadTimeoutError(f"{segment.topic_id_partition} was not read in time", cause) from cause
            try:
                async with asyncio.timeout(remaining_ms / 1000):
                    return await attempt()
            except TimeoutError as error:
                raise RemoteReadTimeoutError(f"{segment.topic_id_partition} was not read in time", cause) from error
            except CorruptSegmentError:
                if is_reread:
                    raise
                is_reread = True
                continue
            except RemoteLogError as error:
                if not error.retriable:
                    raise
                cause = error
            failures += 1
            if isinstance(cause, RemoteResourceNotFoundError):
                await self._raise_if_deleted(segment, deadline_ms)
            pause_ms = backoff_ms(failures, deadline_ms - self._clock_ms(), self._jitter)
            await asyncio.sleep(max(pause_ms, 1) / 1000)

    async def _raise_if_deleted(self, segment: RemoteLogSegmentMetadata, deadline_ms: int) -> None:
        """The metadata decides whether an object that is not found was deleted."""
        timeout_ms = min(_METADATA_RELOAD_TIMEOUT_MS, deadline_ms - self._clock_ms())
        try:
            await self._rlmm.ensure_fresh(segment.topic_id_partition, 0, max(timeout_ms, 1))
        except RemoteLogError:
            return  # not known: waiting is never wrong
        known = self._rlmm.remote_log_segment_metadata_by_id(segment.segment_id)
        if known is None or known.state is not RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            raise SegmentDeletedError(f"segment {segment.segment_id.id} was deleted")
