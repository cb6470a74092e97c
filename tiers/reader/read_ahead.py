"""`ReadAhead` decides how far to read ahead of each stream, within one global byte budget.

A stream is one connection that reads one partition. Its window is the number of bytes to read ahead. A window doubles
with each sequential read for which the stream had to wait. So it grows to what the stream reads in the time of a
download, whatever the latency and the rate of the store are, and a slow client keeps a small window.

The windows of all streams together never exceed the budget, so that the streams do not evict each other's chunks before
they are read. If the budget is exhausted, a stream takes the windows of idle streams, and then half of the largest
window, as long as that leaves the other stream more than it has itself.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from tiers.model.ids import TopicIdPartition

IDLE_MS = 10_000

StreamKey = tuple[int, TopicIdPartition]


@dataclass(slots=True)
class _Stream:
    next_offset: int
    used_at_ms: int
    window_bytes: int = 0


class ReadAhead:
    """`clock_ms` is monotonic."""

    def __init__(
        self,
        clock_ms: Callable[[], int],
        *,
        budget_bytes: int,
        first_window_bytes: int,
        max_window_bytes: int,
        max_streams: int = 4096,
    ) -> None:
        self._clock_ms = clock_ms
        self._budget_bytes = budget_bytes
        self._first_window_bytes = first_window_bytes
        self._max_window_bytes = max_window_bytes
        self._max_streams = max_streams
        self._streams: OrderedDict[StreamKey, _Stream] = OrderedDict()
        """The stream that read last is the last one."""
        self._holders: dict[StreamKey, _Stream] = {}
        """The streams that have a window."""
        self.reserved_bytes = 0

    def window_bytes(self, key: StreamKey, offset: int, next_offset: int, *, had_to_wait: bool) -> int:
        """Returns the number of bytes to read ahead after a read of `[offset, next_offset)`.

        `had_to_wait`: a download was not complete when the stream needed it. A read is sequential if `offset` is at
        most the end of the read before it and `next_offset` at least that end. A client may use only a part of an
        answer and then ask for the rest.
        """
        stream = self._streams.get(key)
        if stream is None:
            self._streams[key] = _Stream(next_offset, self._clock_ms())
            while len(self._streams) > self._max_streams:
                self._drop_oldest()
            return 0
        self._streams.move_to_end(key)
        stream.used_at_ms = self._clock_ms()
        is_sequential = offset <= stream.next_offset <= next_offset
        stream.next_offset = next_offset
        self.reserved_bytes -= stream.window_bytes
        self._holders.pop(key, None)
        wanted = stream.window_bytes * 2 if had_to_wait else stream.window_bytes
        wanted = min(max(wanted, self._first_window_bytes), self._max_window_bytes) if is_sequential else 0
        stream.window_bytes = min(wanted, self._made_free(wanted, stream))
        self.reserved_bytes += stream.window_bytes
        if stream.window_bytes:
            self._holders[key] = stream
        return stream.window_bytes

    def _made_free(self, wanted: int, stream: _Stream) -> int:
        """Makes room for a window of `stream`, which has reserved nothing now. Returns what is free of the budget."""
        while self.reserved_bytes + wanted > self._budget_bytes:
            oldest = next(iter(self._streams.values()))
            if stream.used_at_ms - oldest.used_at_ms > IDLE_MS:
                self._drop_oldest()
                continue
            largest = max(self._holders.values(), key=_window_bytes, default=stream)
            half = largest.window_bytes // 2
            if half < max(stream.window_bytes, self._first_window_bytes):
                break
            largest.window_bytes -= half
            self.reserved_bytes -= half
        return self._budget_bytes - self.reserved_bytes

    def _drop_oldest(self) -> None:
        key, stream = self._streams.popitem(last=False)
        self._holders.pop(key, None)
        self.reserved_bytes -= stream.window_bytes


def _window_bytes(stream: _Stream) -> int:
    return stream.window_bytes
