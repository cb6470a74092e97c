"""Retries of remote reads: backoff with full jitter, a circuit breaker per store, and `RetriedRead`."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from types import TracebackType
from typing import TypeVar

from tiers.errors import (
    CircuitOpenError,
    CorruptSegmentError,
    RemoteLogError,
    RemoteReadTimeoutError,
    RemoteResourceNotFoundError,
    RetriableRemoteStorageError,
)
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataReader
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


class CircuitBreaker:
    """A circuit breaker that opens after `threshold` failures in a row. Each call of the store runs `with` it.

    While it is open, one call may probe the store every `open_ms`. `open_ms` is below a second, so that a store that
    recovers can still serve the waiting fetches.
    """

    def __init__(self, clock_ms: Callable[[], int], *, threshold: int = 8, open_ms: int = 500) -> None:
        self._clock_ms = clock_ms
        self._threshold = threshold
        self._open_ms = open_ms
        self._failures = 0
        self._probe_at_ms = 0

    @property
    def is_open(self) -> bool:
        return self._failures >= self._threshold

    def __enter__(self) -> None:
        """Raises `CircuitOpenError` while the circuit is open."""
        if not self.is_open:
            return
        now_ms = self._clock_ms()
        if now_ms < self._probe_at_ms:
            raise CircuitOpenError(f"the circuit breaker is open: the store failed {self._failures} times in a row")
        self._probe_at_ms = now_ms + self._open_ms

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Records the outcome. A refusal is neither a success nor a failure: it says nothing about the next call."""
        if error is None or isinstance(error, RemoteResourceNotFoundError):
            self._failures = 0
        elif isinstance(error, RetriableRemoteStorageError | asyncio.CancelledError):
            # The pool cancels a download that hangs.
            self._failures += 1
            self._probe_at_ms = self._clock_ms() + self._open_ms


T = TypeVar("T")

_METADATA_RELOAD_TIMEOUT_MS = 1000


class SegmentDeletedError(RemoteLogError):
    """The metadata says that the segment was deleted during the read. The caller must look up the offset again."""


class RetriedRead:
    """Retries one read of a segment until its deadline. It occupies no slot of a pool between the attempts.

    * It retries retriable errors with backoff. If the store does not find a FINISHED segment, it retries as well,
      because stores may be eventually consistent, unless the metadata says that the segment was deleted meanwhile.
    * After a checksum mismatch it reads once more. A second mismatch is an error."""

    def __init__(self, rlmm: RemoteLogMetadataReader, clock_ms: Callable[[], int], jitter: Callable[[], float]) -> None:
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
        known = self._rlmm.remote_log_segment_metadata_by_id(segment.segment_id)
        if known is None or known.state is not RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            raise SegmentDeletedError(f"segment {segment.segment_id.id} was deleted")
