"""`HedgedReads`: a ranged GET that takes longer than almost all others gets a second one beside it.

* The first success is the answer, and the other is cancelled. The error of one leaves the other running; when both
  fail, the error is the first one's. A GET that fails before it was hedged is the caller's to repeat.
* A GET is slow after the 95th percentile of the last ones, within bounds. Until there are enough to say, the upper
  bound counts.
* One hedge per GET, no more than a small part of all GETs, and only in a slot of the pool that nobody waits for: a
  store that is slow altogether is not asked more.
* Both end with the caller: a deadline or a cancellation around the call is that of both.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.reader.segment_reads import SegmentReads

_SAMPLES = 128
_MIN_SAMPLES = 20
_SLOW_PERCENTILE = 95
_PERCENT = 100
_MAX_CREDIT = 10 * _PERCENT
"""What calm times save up: ten hedges."""


@dataclass(frozen=True, slots=True)
class HedgeSettings:
    """`max_percent` of all GETs may be hedged; 0: none is."""

    max_percent: int = 5
    min_delay_ms: int = 50
    max_delay_ms: int = 2_000


class IdleSlots(Protocol):
    """`FetcherPool`, as far as a hedge needs it."""

    def take_idle_slot(self, size_bytes: int) -> bool: ...

    def give_back_slot(self, size_bytes: int) -> None: ...


async def sleep_ms(delay_ms: int) -> None:
    await asyncio.sleep(delay_ms / 1000)


class HedgedReads:
    """`clock_ms` is monotonic; `pause_ms` sleeps."""

    def __init__(
        self,
        inner: SegmentReads,
        slots: IdleSlots,
        settings: HedgeSettings,
        clock_ms: Callable[[], int],
        pause_ms: Callable[[int], Awaitable[None]] = sleep_ms,
    ) -> None:
        self._inner = inner
        self._slots = slots
        self._settings = settings
        self._clock_ms = clock_ms
        self._pause_ms = pause_ms
        self._latencies_ms: deque[int] = deque(maxlen=_SAMPLES)
        self._credit = 0
        """Each GET adds its percents, a hedge takes a hundred."""
        self.hedged_requests = 0
        self.hedge_wins = 0

    @property
    def delay_ms(self) -> int:
        """After which a GET is hedged."""
        settings = self._settings
        if len(self._latencies_ms) < _MIN_SAMPLES:
            return settings.max_delay_ms
        slow_ms = sorted(self._latencies_ms)[len(self._latencies_ms) * _SLOW_PERCENTILE // _PERCENT]
        return min(max(slow_ms, settings.min_delay_ms), settings.max_delay_ms)

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        return await self._inner.fetch_indexes(metadata)

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int
    ) -> memoryview:
        if not self._settings.max_percent:
            return await self._inner.fetch_log_segment(metadata, start_position, end_position)

        async def attempt() -> memoryview | Exception:
            # An error is a value here: raised, it would end the task group and the other attempt with it.
            try:
                return await self._inner.fetch_log_segment(metadata, start_position, end_position)
            except Exception as error:
                return error

        size_bytes = end_position + 1 - start_position
        began_ms = self._clock_ms()
        self._credit = min(self._credit + self._settings.max_percent, _MAX_CREDIT)
        async with asyncio.TaskGroup() as group:
            first = group.create_task(attempt())
            delay = group.create_task(self._delay())
            await asyncio.wait((first, delay), return_when=asyncio.FIRST_COMPLETED)
            delay.cancel()
            attempts = [first]
            if not first.done() and self._may_hedge(size_bytes):
                second = group.create_task(attempt())
                second.add_done_callback(lambda _: self._slots.give_back_slot(size_bytes))
                attempts.append(second)
            winner = await _first_success(attempts)
            for one in attempts:
                one.cancel()
        outcome = winner.result()
        if isinstance(outcome, Exception):
            raise outcome
        self.hedge_wins += winner is not first
        self._latencies_ms.append(self._clock_ms() - began_ms)
        return outcome

    async def _delay(self) -> None:
        await self._pause_ms(self.delay_ms)

    def _may_hedge(self, size_bytes: int) -> bool:
        if self._credit < _PERCENT or not self._slots.take_idle_slot(size_bytes):
            return False
        self._credit -= _PERCENT
        self.hedged_requests += 1
        return True


Attempt = asyncio.Task[memoryview | Exception]


async def _first_success(attempts: list[Attempt]) -> Attempt:
    """Or the first attempt, when none succeeds."""
    pending = set(attempts)
    while pending:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for one in attempts:
            if one.done() and not isinstance(one.result(), Exception):
                return one
    return attempts[0]
