"""`HedgedReads` sends a second ranged GET (a hedge) when the first one takes longer than almost all others.

* The first success is the result, and the other GET is cancelled. If one GET fails, the other continues. If both fail,
  the call raises the error of the first. If a GET fails before it was hedged, the caller must retry.
* A GET is slow once it takes longer than the 95th percentile of the last ones, within bounds. The upper bound applies
  until there are enough samples.
* A GET has at most one hedge, only a small part of all GETs is hedged, and a hedge only uses an idle slot of the pool.
  So hedging does not add load to a store that is slow for all GETs.
* Both GETs end with the call: a deadline or a cancellation of the call ends both.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.remote_storage_manager import SegmentReads

_SAMPLES = 128
_MIN_SAMPLES = 20
_SLOW_PERCENTILE = 95
_PERCENT = 100
_MAX_CREDIT = 10 * _PERCENT
"""The most credit that can accumulate: ten hedges."""


@dataclass(frozen=True, slots=True)
class HedgeSettings:
    """The settings. At most `max_percent` of all GETs are hedged; 0 turns hedging off."""

    max_percent: int
    min_delay_ms: int = 50
    max_delay_ms: int = 2_000


class IdleSlots(Protocol):
    """The methods of `FetcherPool` that a hedge needs."""

    def take_idle_slot(self, size_bytes: int) -> bool: ...

    def give_back_slot(self, size_bytes: int) -> None: ...


async def sleep_ms(delay_ms: int) -> None:
    await asyncio.sleep(delay_ms / 1000)


class HedgedReads:
    """Reads ranges of segments, and hedges slow GETs. `clock_ms` is monotonic; `pause_ms` sleeps."""

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
        """Each GET adds `max_percent` to the credit; a hedge takes 100 from it."""
        self.hedged_requests = 0
        self.hedge_wins = 0
        self.downloaded_bytes = 0
        """The bytes of all GETs that succeeded, also of those whose result is not needed."""

    @property
    def delay_ms(self) -> int:
        """The time after which a GET is hedged."""
        settings = self._settings
        if len(self._latencies_ms) < _MIN_SAMPLES:
            return settings.max_delay_ms
        slow_ms = sorted(self._latencies_ms)[len(self._latencies_ms) * _SLOW_PERCENTILE // _PERCENT]
        return min(max(slow_ms, settings.min_delay_ms), settings.max_delay_ms)

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        if not self._settings.max_percent:
            return await self._get(metadata, start_position, end_position)

        async def attempt() -> memoryview | Exception:
            # The attempt returns its error. If it raised, the task group would cancel the other attempt.
            try:
                return await self._get(metadata, start_position, end_position)
            except Exception as error:
                return error

        next_position = metadata.segment_size_bytes if end_position is None else end_position + 1
        size_bytes = max(0, next_position - start_position)
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

    async def _get(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None
    ) -> memoryview:
        found = await self._inner.fetch_log_segment(metadata, start_position, end_position)
        self.downloaded_bytes += len(found)
        return found

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
    """Returns the first attempt that succeeds; `attempts[0]` when all of them fail."""
    pending = set(attempts)
    while pending:
        _, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
        for one in attempts:
            if one.done() and not isinstance(one.result(), Exception):
                return one
    return attempts[0]
