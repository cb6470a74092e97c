"""`WaitingReads`: the clients that ask for remote records and get none, for the page.

A client asks again and again, each time for some seconds. So a read counts from the first request without records to
the first one with records. It ends when the client has asked no more for `GONE_AFTER_MS`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Final

from tiers.errors import OffsetBelowLogStartError, OffsetGapError, RemoteLogError, reason_of
from tiers.model.ids import TopicIdPartition
from tiers.reader.remote_log_reader import RemoteRead, RemoteReadRequest
from tiers.reader.remote_reads import RemoteReads

GONE_AFTER_MS: Final = 15_000
SHOWN_AFTER_MS: Final = 2_000
MAX_SHOWN: Final = 100
_MAX_READS: Final = 10_000
_Key = tuple[str, TopicIdPartition]


@dataclass(slots=True)
class WaitingSince:
    """`asked_ms` is the time of the last request. `reads` are those in progress. Times are monotonic."""

    client_id: str
    partition: TopicIdPartition
    offset: int
    since_ms: int
    asked_ms: int
    reason: str = ""
    reads: int = 0


class WaitingReads:
    """The remote reads of the Fetches of one process."""

    def __init__(self, reader: RemoteReads, clock_ms: Callable[[], int]) -> None:
        self._reader = reader
        self._clock_ms = clock_ms
        self._waiting: dict[_Key, WaitingSince] = {}

    async def read(self, request: RemoteReadRequest) -> RemoteRead:
        """Reads as `RemoteReads` does, and notes whether there were records."""
        key = request.client_id, request.partition
        waiting = self.asked(request.client_id, request.partition, request.offset)
        waiting.reads += 1
        try:
            found = await self._reader.read(request)
        except (OffsetBelowLogStartError, OffsetGapError):
            self._waiting.pop(key, None)
            raise
        except asyncio.CancelledError:
            if not waiting.reason:  # the broker had the records, or the client left
                self._waiting.pop(key, None)
            raise
        except RemoteLogError as error:
            waiting.reason = reason_of(getattr(error, "cause", None) or error)
            waiting.asked_ms = self._clock_ms()
            raise
        finally:
            waiting.reads -= 1
        self._waiting.pop(key, None)
        return found

    def asked(self, client_id: str, partition: TopicIdPartition, offset: int, reason: str = "") -> WaitingSince:
        """Notes a request without records so far. `reason` says why, if it is known."""
        key, now_ms = (client_id, partition), self._clock_ms()
        waiting = self._waiting.get(key)
        if waiting is None or self._is_over(waiting, now_ms):
            self._waiting.pop(key, None)  # the last to begin is the last in the order
            if len(self._waiting) >= _MAX_READS:
                del self._waiting[next(iter(self._waiting))]
            waiting = self._waiting[key] = WaitingSince(client_id, partition, offset, now_ms, now_ms)
        waiting.offset, waiting.asked_ms, waiting.reason = offset, now_ms, reason or waiting.reason
        return waiting

    @staticmethod
    def _is_over(waiting: WaitingSince, now_ms: int) -> bool:
        return not waiting.reads and now_ms - waiting.asked_ms > GONE_AFTER_MS

    def now(self) -> Iterator[tuple[WaitingSince, int]]:
        """Yields those that wait now, each with the time for which it has waited, the longest first.

        A client that asked once, and went on with other records, does not wait."""
        now_ms = self._clock_ms()
        self._waiting = {key: each for key, each in self._waiting.items() if not self._is_over(each, now_ms)}
        shown = (
            each
            for each in self._waiting.values()
            if (now_ms if each.reads else each.asked_ms) - each.since_ms >= SHOWN_AFTER_MS
        )
        for each in islice(shown, MAX_SHOWN):
            yield each, now_ms - each.since_ms
