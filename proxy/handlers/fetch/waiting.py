"""`WaitingReads`: who asks for remote records in vain, for the page.

A client asks again and again, each time for some seconds. So a read counts from the first request without records to
the first one with records, and is forgotten when the client has asked no more for `GONE_AFTER_MS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from tiers.errors import OffsetBelowLogStartError, OffsetGapError, RemoteLogError, reason_of
from tiers.model.ids import TopicIdPartition
from tiers.reader.remote_log_reader import RemoteRead, RemoteReadRequest
from tiers.reader.remote_reads import RemoteReads

GONE_AFTER_MS: Final = 30_000
SHOWN_AFTER_MS: Final = 2_000
MAX_SHOWN: Final = 100
_MAX_READS: Final = 10_000


@dataclass(slots=True)
class WaitingSince:
    """`asked_ms` is the time of the last request, or of its end. Times are monotonic."""

    client_id: str
    partition: TopicIdPartition
    offset: int
    since_ms: int
    asked_ms: int
    reason: str = ""


class WaitingReads:
    """The remote reads of the Fetches of one process."""

    def __init__(self, reader: RemoteReads, clock_ms: Callable[[], int]) -> None:
        self._reader = reader
        self._clock_ms = clock_ms
        self._reads: dict[tuple[str, TopicIdPartition], WaitingSince] = {}

    async def read(self, request: RemoteReadRequest) -> RemoteRead:
        """Reads as `RemoteReads` does, and notes whether there were records."""
        asked = request.client_id, request.partition, request.offset
        self.asked(*asked, "")
        try:
            found = await self._reader.read(request)
        except (OffsetBelowLogStartError, OffsetGapError):
            self._reads.pop(asked[:2], None)
            raise
        except asyncio.CancelledError:
            known = self._reads.get(asked[:2])
            if known is not None and not known.reason:  # the broker had the records, or the client left
                del self._reads[asked[:2]]
            raise
        except RemoteLogError as error:
            self.asked(*asked, reason_of(getattr(error, "cause", None) or error))
            raise
        self._reads.pop(asked[:2], None)
        return found

    def asked(self, client_id: str, partition: TopicIdPartition, offset: int, reason: str) -> None:
        """Notes a request without records so far. `reason` says why; empty: it is not known yet."""
        now_ms = self._clock_ms()
        known = self._reads.get((client_id, partition))
        if known is None or now_ms - known.asked_ms > GONE_AFTER_MS:
            self._reads.pop((client_id, partition), None)  # the last to begin is the last in the order
            if len(self._reads) >= _MAX_READS:
                del self._reads[next(iter(self._reads))]
            known = self._reads[client_id, partition] = WaitingSince(client_id, partition, offset, now_ms, now_ms)
        known.offset, known.asked_ms = offset, now_ms
        known.reason = reason or known.reason

    def now(self) -> Iterator[tuple[WaitingSince, int]]:
        """Yields those that wait now, each with the time for which it has waited, the longest first."""
        now_ms = self._clock_ms()
        self._reads = {key: each for key, each in self._reads.items() if now_ms - each.asked_ms <= GONE_AFTER_MS}
        for each in list(self._reads.values())[:MAX_SHOWN]:
            if now_ms - each.since_ms >= SHOWN_AFTER_MS:
                yield each, now_ms - each.since_ms
