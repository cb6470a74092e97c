"""`LocalLogBoundsCache`: the bounds of a tiered partition's log on the broker: Lx, LSO, HW and the leader epoch.

The cache has two kinds of bounds. *Verified* bounds come from the leader, in its current leader epoch, at a known time.
Only they decide whether an offset lies below the local log. *Seen* bounds come from Fetch answers that passed through
the proxy. They are younger and cost nothing, and serve for predictions and to fill in answers.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import NamedTuple

from cachetools import LRUCache

from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds, LogSource

_MAX_PARTITIONS = 100_000


class VerifiedBounds(NamedTuple):
    bounds: LocalLogBounds
    asked_at_ms: int
    """The time just before the request was sent. The bounds held at some time after it."""


class Watermarks(NamedTuple):
    high_watermark: int
    last_stable_offset: int


class LocalLogBoundsCache:
    def __init__(
        self, log_source: LogSource, clock_ms: Callable[[], int], max_partitions: int = _MAX_PARTITIONS
    ) -> None:
        self._log_source = log_source
        self._clock_ms = clock_ms
        self._verified: LRUCache[TopicIdPartition, VerifiedBounds] = LRUCache(max_partitions)
        self._seen: LRUCache[TopicIdPartition, tuple[int, Watermarks]] = LRUCache(max_partitions)
        self._locks: dict[TopicIdPartition, asyncio.Lock] = {}

    def see(self, partition: TopicIdPartition, log_start_offset: int, watermarks: Watermarks) -> None:
        """Notes the bounds of a Fetch answer without an error. In old versions, `log_start_offset` is -1: unknown."""
        if log_start_offset < 0:
            log_start_offset, _ = self._seen.get(partition, (0, watermarks))
        self._seen[partition] = log_start_offset, watermarks

    def expected_log_start(self, partition: TopicIdPartition) -> int | None:
        """Returns the highest known local log start, for predictions. None if the cache knows none."""
        seen = self._seen.get(partition)
        verified = self._verified.get(partition)
        if seen is None:
            return None if verified is None else verified.bounds.log_start_offset
        return seen[0] if verified is None else max(seen[0], verified.bounds.log_start_offset)

    def watermarks(self, partition: TopicIdPartition) -> Watermarks | None:
        """Returns the highest known watermarks. Both only grow, except after an unclean election."""
        seen = self._seen.get(partition)
        verified = self._verified.get(partition)
        if verified is None:
            return None if seen is None else seen[1]
        asked = Watermarks(verified.bounds.high_watermark, verified.bounds.last_stable_offset)
        return asked if seen is None else Watermarks(*map(max, seen[1], asked))

    def watermarks_above(self, partition: TopicIdPartition, remote_end_offset: int | None) -> Watermarks:
        """Returns the watermarks for an answer with remote data.

        The known watermarks may be old. All remote records lie below the LSO, so the remote end is a lower bound."""
        floor = -1 if remote_end_offset is None else remote_end_offset + 1
        known = self.watermarks(partition)
        return Watermarks(floor, floor) if known is None else Watermarks(*(max(one, floor) for one in known))

    def verified(self, partition: TopicIdPartition) -> VerifiedBounds | None:
        return self._verified.get(partition)

    async def ask(self, partition: TopicIdPartition, not_before_ms: int, timeout_ms: int) -> VerifiedBounds:
        """Returns bounds that the leader was asked for at `not_before_ms` or later. Callers share one request.

        Raises `BrokerError`."""
        lock = self._locks.setdefault(partition, asyncio.Lock())
        try:
            async with asyncio.timeout(timeout_ms / 1000), lock:
                known = self._verified.get(partition)
                if known is not None and known.asked_at_ms >= not_before_ms:
                    return known
                asked_at_ms = self._clock_ms()
                bounds = await self._log_source.bounds(partition, timeout_ms)
                answer = VerifiedBounds(bounds, asked_at_ms)
                self._verified[partition] = answer
                return answer
        except TimeoutError as error:
            raise BrokerError(
                f"the leader of {partition} did not give its log bounds in time", retriable=True
            ) from error
        finally:
            if not lock.locked():
                self._locks.pop(partition, None)
