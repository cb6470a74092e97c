"""A log to which a producer writes at a steady rate. A batch has one offset, and is made when it is read."""

from __future__ import annotations

from collections.abc import Callable

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogRead


class SteadyLog(InMemoryLog):
    def __init__(self, wall_ms: Callable[[], int], bytes_per_s: float, value_bytes: int) -> None:
        super().__init__()
        self._wall_ms = wall_ms
        self._bytes_per_s = bytes_per_s
        self._value_bytes = value_bytes
        self._began_ms = wall_ms()
        self._batch_bytes = len(self._batch(0))
        self.read_bytes = 0
        """What the broker has sent. The last batch of an answer may be incomplete."""

    def _batch(self, offset: int) -> bytes:
        timestamp_ms = self._began_ms
        if offset:
            timestamp_ms += int(offset * self._batch_bytes * 1000 / self._bytes_per_s)
        return batch_of(offset, 1, value_bytes=self._value_bytes, timestamp=timestamp_ms)

    @property
    def end_offset(self) -> int:
        return int((self._wall_ms() - self._began_ms) * self._bytes_per_s / 1000 / self._batch_bytes)

    async def size_bytes(self, partition: TopicIdPartition, timeout_ms: int) -> int | None:
        return self.end_offset * self._batch_bytes if self.has_size_right else None

    async def read(self, partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        end = min(self.end_offset, offset + max(1, max_bytes // self._batch_bytes))
        records = b"".join(map(self._batch, range(offset, end)))
        self.read_bytes += max(min(max_bytes, (self.end_offset - offset) * self._batch_bytes), len(records))
        return LogRead(records, 0, self.end_offset, self.end_offset, 0, ())
