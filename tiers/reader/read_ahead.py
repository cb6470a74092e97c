"""`ReadAhead` decides how far to read ahead of each stream, within one global byte budget.

A stream is one connection that reads one partition. Its window is the number of bytes to read ahead; it doubles with
each sequential read. The windows of all streams together never exceed the budget, so that the streams do not evict each
other's chunks before they are read. If the budget is exhausted, the stream that was idle longest loses its window.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

from tiers.model.ids import TopicIdPartition

StreamKey = tuple[int, TopicIdPartition]


@dataclass(slots=True)
class _Stream:
    next_offset: int
    window_bytes: int = 0


class ReadAhead:
    def __init__(
        self, *, budget_bytes: int, first_window_bytes: int, max_window_bytes: int, max_streams: int = 4096
    ) -> None:
        self._budget_bytes = budget_bytes
        self._first_window_bytes = first_window_bytes
        self._max_window_bytes = max_window_bytes
        self._max_streams = max_streams
        self._streams: OrderedDict[StreamKey, _Stream] = OrderedDict()
        self.reserved_bytes = 0

    def window_bytes(self, key: StreamKey, offset: int, next_offset: int) -> int:
        """Returns the number of bytes to read ahead after a read of `[offset, next_offset)`.

        A read is sequential if `offset` is at most the end of the read before it and `next_offset` at least that end.
        A client may use only a part of an answer and then ask for the rest.
        """
        stream = self._streams.get(key)
        if stream is None:
            self._streams[key] = _Stream(next_offset)
            while len(self._streams) > self._max_streams:
                self._drop_oldest()
            return 0
        self._streams.move_to_end(key)
        is_sequential = offset <= stream.next_offset <= next_offset
        wanted = (
            min(max(2 * stream.window_bytes, self._first_window_bytes), self._max_window_bytes) if is_sequential else 0
        )
        stream.next_offset = next_offset
        self.reserved_bytes -= stream.window_bytes
        stream.window_bytes = 0
        while self.reserved_bytes + wanted > self._budget_bytes and next(iter(self._streams)) != key:
            self._drop_oldest()
        stream.window_bytes = max(0, min(wanted, self._budget_bytes - self.reserved_bytes))
        self.reserved_bytes += stream.window_bytes
        return stream.window_bytes

    def _drop_oldest(self) -> None:
        _, stream = self._streams.popitem(last=False)
        self.reserved_bytes -= stream.window_bytes
