"""A store with segments to merge, and the steps of a test with it."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from pipeline.maintenance.merge import Merge, merge_groups
from pipeline.maintenance.merge_plan import MergeLimits, plan_merges
from pipeline.source.remote_read import read_remote_range
from tests.support.pipeline.inline_runner import InlineRunner
from tests.support.pipeline.job_bench import JobBench
from tests.support.tiers.transactional_log import copied
from tests.support.written_log import WrittenLog
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentState

LIMITS = MergeLimits(below_bytes=10_000, target_bytes=100_000)
STARTED = RemoteLogSegmentState.COPY_SEGMENT_STARTED
DATA = [(1, "data"), (1, "plain"), (1, "elected"), (2, "data"), (1, "abort"), (1, "plain"), (2, "commit")]


@asynccontextmanager
async def bench_of(
    root: Path,
    log: WrittenLog,
    ends: list[int],
    config: str = "",
    named: Sequence[LeaderEpochEntry] | None = None,
) -> AsyncIterator[JobBench]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "copied").mkdir()
        bench = JobBench(root, folder, config)
        await bench.open()
        try:
            for built in copied(folder / "copied", log, ends, named=named):
                await bench.store(built)
            yield bench
        finally:
            await bench.close()


async def merged(bench: JobBench, limits: MergeLimits = LIMITS, runner: InlineRunner | None = None) -> Merge:
    async def no_time(seconds: float) -> None:
        bench.now_ms += int(seconds * 1000)

    groups = plan_merges(bench.state, bench.partition, limits)
    return await merge_groups(bench.services, bench.config, runner or InlineRunner(), groups, no_time)


async def log_bytes(bench: JobBench) -> bytes:
    """All of it, as a reader finds it."""
    offset, end, found = 0, bench.state.remote_end_offset(bench.partition), b""
    assert end is not None
    while offset <= end:
        segment = bench.state.remote_log_segment_metadata(bench.partition, offset)
        assert segment is not None, f"nobody answers for {offset}"
        runs = read_remote_range(bench.storage, segment, bench.key_ring, segment.start_offset, segment.end_offset)
        found += b"".join([bytes(each.data) async for each in runs])
        offset = segment.end_offset + 1
    return found
