"""`PartWindow` bounds the parts of all uploads of one store that are in flight. Time-outs lower the bound.

A slow store gets fewer parts at a time, so each of them moves faster. The bound halves when a part passes its deadline,
and grows by one after as many successes as it has places (additive increase, multiplicative decrease).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from tiers.errors import StoreOverloadedError


class PartWindow:
    """It belongs to one event loop. Waiters are served in order."""

    def __init__(self, max_parts: int) -> None:
        self._max = max_parts
        self._limit = float(max_parts)
        self._in_flight = 0
        self._waiters: deque[asyncio.Future[None]] = deque()
        self._decreases = 0

    @property
    def limit(self) -> int:
        """The number of parts that may be in flight now; at least 1."""
        return int(self._limit)

    @asynccontextmanager
    async def part(self) -> AsyncIterator[None]:
        """Takes a place for one part. The wait for the place has no deadline: every part in flight has one.

        `StoreOverloadedError` halves the limit, once for all parts that were in flight together. It passes on."""
        await self._enter()
        decreases = self._decreases
        try:
            yield
        except StoreOverloadedError:
            # The other parts in flight will fail as well, and say the same thing again.
            if decreases == self._decreases:
                self._decreases += 1
                self._limit = max(1.0, self._limit / 2)
            raise
        else:
            self._limit = min(float(self._max), self._limit + 1 / self._limit)
        finally:
            self._in_flight -= 1
            self._admit()

    async def _enter(self) -> None:
        if self._in_flight < self.limit and not self._waiters:
            self._in_flight += 1
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiters.append(turn)
        try:
            await turn
        except BaseException:
            if not turn.cancelled():  # the place was given before the waiter was cancelled
                self._in_flight -= 1
                self._admit()
            raise

    def _admit(self) -> None:
        while self._waiters and self._in_flight < self.limit:
            turn = self._waiters.popleft()
            if not turn.cancelled():
                self._in_flight += 1
                turn.set_result(None)
