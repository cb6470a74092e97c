"""What copies cost in bytes read from a broker, and how large the segments are. Time is virtual.

The sizes are a sixteenth of the defaults, and a broker answers reads at a sixteenth of its rate. So a copy takes as
long as that of a default segment. The rates of producers and the sizes of their batches are as they are."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Final

import pytest

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import POLICY, Workbench, workbench
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogRead

SEGMENT_BYTES: Final = 16 << 20
SEGMENT_MS: Final = 3_600_000 // 16
READ_BYTES_PER_MS: Final = 100_000 // 16
FETCH_BYTES: Final = 1 << 20
BATCH_BYTES: Final = 16_384
ROUND_MS, RESTART_MS = 30_000, 15_000
POLICY_BYTES: Final = replace(POLICY, segment_bytes=SEGMENT_BYTES, segment_ms=SEGMENT_MS)


class RestartedError(Exception):
    """The process of the owner has ended."""


class SteadyLog(InMemoryLog):
    """A log to which a producer writes at a steady rate. A batch has one offset, and is made when it is read."""

    def __init__(self, bench: Workbench, bytes_per_s: int) -> None:
        super().__init__()
        self._bench = bench
        self._rate = bytes_per_s
        self._began_ms = bench.wall_ms
        self._batch = batch_of(0, 1, value_bytes=BATCH_BYTES, timestamp=bench.wall_ms)
        self.read_bytes = 0
        self.ends_at_ms = 1 << 62

    @property
    def end_offset(self) -> int:
        return (self._bench.wall_ms - self._began_ms) * self._rate // 1000 // len(self._batch)

    async def size_bytes(self, partition: TopicIdPartition, timeout_ms: int) -> int | None:
        return self.end_offset * len(self._batch) if self.has_size_right else None

    async def read(self, partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        size_bytes = len(self._batch)
        end = min(self.end_offset, offset + max(1, max_bytes // size_bytes))
        sent_bytes = max(min(max_bytes, (self.end_offset - offset) * size_bytes), (end - offset) * size_bytes)
        self.read_bytes += sent_bytes
        self._bench.now_ms += sent_bytes // READ_BYTES_PER_MS
        self._bench.wall_ms += sent_bytes // READ_BYTES_PER_MS
        if self._bench.now_ms >= self.ends_at_ms:
            raise RestartedError
        return LogRead(b"".join(self._batches(offset, end)), 0, self.end_offset, self.end_offset, 0, ())

    def _batches(self, offset: int, end: int) -> Iterator[bytes]:
        for each in range(offset, end):
            timestamp_ms = self._began_ms + each * len(self._batch) * 1000 // self._rate
            yield batch_of(each, 1, value_bytes=BATCH_BYTES, timestamp=timestamp_ms)


def advance(bench: Workbench, by_ms: int) -> None:
    bench.now_ms += by_ms
    bench.wall_ms += by_ms


def replaced_log(bench: Workbench, bytes_per_s: int) -> SteadyLog:
    log = bench.log = SteadyLog(bench, bytes_per_s)
    settings = replace(bench.services.settings, fetch_bytes=FETCH_BYTES, verify_bytes=FETCH_BYTES)
    bench.services = replace(bench.services, source=log, settings=settings)
    bench.restart()
    return log


def copied_bytes(bench: Workbench) -> int:
    return sum(one.segment_size_bytes for one in bench.segments)


@pytest.mark.parametrize("has_size_right", [True, False])
@pytest.mark.parametrize("bytes_per_s", [10_000, 70_000, 400_000])
async def test_segments_are_large_and_reads_are_few(tmp_path: Path, bytes_per_s: int, has_size_right: bool) -> None:
    async with workbench(tmp_path) as bench:
        log = replaced_log(bench, bytes_per_s)
        log.has_size_right = has_size_right
        while len(bench.segments) < 6:
            while await bench.copy(POLICY_BYTES):
                pass
            advance(bench, ROUND_MS)
        mean_bytes = copied_bytes(bench) / len(bench.segments)
        assert mean_bytes >= 0.5 * min(SEGMENT_BYTES, bytes_per_s * SEGMENT_MS // 1000)
        assert log.read_bytes <= 1.2 * copied_bytes(bench)


async def test_an_owner_that_restarts_reads_little_again(tmp_path: Path) -> None:
    """20 MB/s over 500 partitions. A round begins at any time between two restarts, which end what is in progress."""
    random = Random(1)
    async with workbench(tmp_path) as bench:
        log = replaced_log(bench, 20_000_000 // 500)
        ended = 0
        while len(bench.segments) < 8:
            log.ends_at_ms = bench.now_ms + RESTART_MS
            advance(bench, random.randrange(RESTART_MS))
            try:
                while await bench.copy(POLICY_BYTES):
                    pass
            except RestartedError:
                ended += 1
            advance(bench, max(0, log.ends_at_ms - bench.now_ms))
            bench.restart()
        assert ended > 0
        assert log.read_bytes <= 1.5 * copied_bytes(bench)
