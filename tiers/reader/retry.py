"""Retries of remote reads: backoff with full jitter, and `RetriedRead`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from tiers.errors import (
    CorruptSegmentError,
    RemoteLogError,
    RemoteReadTimeoutError,
    RemoteResourceNotFoundError,
)
from tiers.metadata.metadata_log import FreshMetadata
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState

BACKOFF_BASE_MS = 50
BACKOFF_CAP_MS = 1000


def backoff_ms(failures: int, remaining_ms: int, jitter: Callable[[], float]) -> float:
    """Returns the pause after the `failures`-th failure in a row, with factor 2 and full jitter.

    The pause is at most half of `remaining_ms`. `jitter` returns a number in [0, 1).
    """
    ceiling = min(BACKOFF_CAP_MS, BACKOFF_BASE_MS << min(max(failures - 1, 0), 10))
    return min(ceiling * jitter(), remaining_ms / 2)


T = TypeVar("T")

_METADATA_RELOAD_TIMEOUT_MS = 1000


class SegmentDeletedError(RemoteLogError):
    """The metadata says that the segment was deleted during the read. The caller must look up the offset again."""


class RetriedRead:
    """Retries one read of a segment until its deadline. It occupies no slot of a pool between the attempts.

    * It retries retriable errors with backoff. If the store does not find a FINISHED segment, it retries as well,
      because stores may be eventually consistent, unless the metadata says that the segment was deleted meanwhile.
    * After a checksum mismatch it reads once more. A second mismatch is an error."""

    def __init__(self, rlmm: FreshMetadata, clock_ms: Callable[[], int], jitter: Callable[[], float]) -> None:
        self._rlmm = rlmm
        self._clock_ms = clock_ms
        self._jitter = jitter

    async def run(self, segment: RemoteLogSegmentMetadata, attempt: Callable[[], Awaitable[T]], deadline_ms: int) -> T:
        """Returns the result of the first attempt that succeeds. `deadline_ms` is a time of the injected clock.

        Raises `SegmentDeletedError`, `RemoteReadTimeoutError` at the deadline, and any `RemoteLogError` that is not
        retriable.
        """
        failures = 0
        is_reread = False
        cause: Exception | None = None
        while True:
            remaining_ms = deadline_ms - self._clock_ms()
            if remaining_ms <= 0:
                raise RemoteReadTimeoutError(
                    f"the deadline of a read of {segment.topic_id_partition} passed", cause
                ) from cause
            try:
                async with asyncio.timeout(remaining_ms / 1000):
                    return await attempt()
            except TimeoutError as error:
                raise RemoteReadTimeoutError(
                    f"the deadline of a read of {segment.topic_id_partition} passed", cause
                ) from error
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
        """Raises `SegmentDeletedError` when fresh metadata says that the segment is no longer readable."""
        timeout_ms = min(_METADATA_RELOAD_TIMEOUT_MS, deadline_ms - self._clock_ms())
        try:
            await self._rlmm.ensure_fresh(segment.topic_id_partition, 0, max(timeout_ms, 1))
        except RemoteLogError:
            return  # without fresh metadata a retry is always safe
        known = self._rlmm.state.remote_log_segment_metadata_by_id(segment.segment_id)
        if known is None or known.state is not RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            raise SegmentDeletedError(f"segment {segment.segment_id.id} was deleted")
