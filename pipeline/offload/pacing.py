"""`Pace`: limits the bytes per second that a task reads."""

from __future__ import annotations

import asyncio
from collections.abc import Callable


class Pace:
    """`bytes_per_second` None means no limit. Time without reads gives no credit for later."""

    def __init__(self, bytes_per_second: int | None, clock_ms: Callable[[], int]) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock_ms = clock_ms
        self._free_at_ms = 0.0

    def moved(self, size_bytes: int) -> None:
        if self._bytes_per_second is not None:
            took_ms = size_bytes * 1000 / self._bytes_per_second
            self._free_at_ms = max(self._free_at_ms, self._clock_ms()) + took_ms

    def pause_ms(self) -> float:
        return max(0.0, self._free_at_ms - self._clock_ms())

    async def wait(self) -> None:
        if pause_ms := self.pause_ms():
            await asyncio.sleep(pause_ms / 1000)
