"""What copies cost in bytes read from a broker, and how large the segments are. Time is virtual.

The sizes are a sixteenth of the defaults, and a broker answers reads at a sixteenth of its rate. So a copy takes as
long as that of a default segment. The rates of producers and the sizes of their batches are as they are."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from random import Random

import pytest

from tests.support.fakes.steady_log import SteadyLog
from tests.support.tiers.workbench import POLICY, Workbench, workbench
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogRead

SEGMENT_BYTES, SEGMENT_MS = 16 << 20, 3_600_000 // 16
READ_BYTES_PER_MS, FETCH_BYTES, BATCH_BYTES = 100_000 // 16, 1 << 20, 16_384
ROUND_MS, RESTART_MS = 30_000, 15_000
POLICY_BYTES = replace(POLICY, segment_bytes=SEGMENT_BYTES, segment_ms=SEGMENT_MS)


class RestartedError(Exception):
    """The process of the owner has ended."""


class TimedLog(SteadyLog):
    """Its reads take time. They end at `ends_at_ms`, with the process of the owner."""

    def __init__(self, bench: Workbench, bytes_per_s: int) -> None:
        super().__init__(lambda: bench.wall_ms, bytes_per_s, BATCH_BYTES)
        self._bench = bench
        self.ends_at_ms = 1 << 62

    async def read(self, partition: TopicIdPartition, offset: int, max_bytes: int, timeout_ms: int) -> LogRead:
        before = self.read_bytes
        read = await super().read(partition, offset, max_bytes, timeout_ms)
        advance(self._bench, (self.read_bytes - before) // READ_BYTES_PER_MS)
        if self._bench.now_ms >= self.ends_at_ms:
            raise RestartedError
        return read


def advance(bench: Workbench, by_ms: int) -> None:
    bench.now_ms += by_ms
    bench.wall_ms += by_ms


def replaced_log(bench: Workbench, bytes_per_s: int) -> TimedLog:
    log = bench.log = TimedLog(bench, bytes_per_s)
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
