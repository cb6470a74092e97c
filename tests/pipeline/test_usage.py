"""`usage` adds up what the metadata knows, and asks the store nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.maintenance.usage import DAY_MS, UsageBy, UsageLine, usage_of
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import PARTITION
from tests.support.pipeline.scrub_bench import ScrubBench, scrub_bench
from tiers.model.segment_metadata import RemoteLogSegmentState

TODAY = 20_000


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[ScrubBench]:
    async with scrub_bench(tmp_path) as made:
        yield made


async def two_days(bench: ScrubBench) -> None:
    """Three segments, the last one encrypted, of today, today and 40 days ago."""
    for start, age in ((0, 0), (10, 0), (20, 40)):
        if start == 20:
            bench.seal_from_now_on()
        await bench.finished(start, [batch_of(start, 10, timestamp=(TODAY - age) * DAY_MS)])
    await bench.put_facts()


def counted(bench: ScrubBench, by: UsageBy) -> list[UsageLine]:
    return usage_of(bench.tier().state, by, "ord.*")


def log_bytes(bench: ScrubBench, encrypted: int = 1) -> int:
    """The metadata does not know the tags of the encrypted logs."""
    return sum(path.stat().st_size for path in bench.files() if path.name.endswith(".log")) - 16 * encrypted


@pytest.mark.parametrize("by", UsageBy)
async def test_it_is_what_the_logs_take(bench: ScrubBench, by: UsageBy) -> None:
    await two_days(bench)
    lines = counted(bench, by)
    assert sum(each.log_bytes for each in lines) == log_bytes(bench)
    if by is UsageBy.DAY:
        assert [(each.day, each.segments) for each in lines] == [("2024-08-25", 1), ("2024-10-04", 2)]
    else:
        [line] = lines
        assert line.segments == 3
        assert line.partition == (PARTITION.partition if by is UsageBy.PARTITION else None)


async def test_copies_and_deletions_in_progress_are_counted_apart(bench: ScrubBench) -> None:
    await two_days(bench)
    under_way = await bench.stored(200)
    await bench.rlmm.add_remote_log_segment_metadata(under_way)
    deleting = await bench.tiered(300)
    await bench.move(deleting, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
    unfinished = under_way.segment_size_bytes + deleting.segment_size_bytes
    [line] = counted(bench, UsageBy.PARTITION)
    assert (line.segments, line.unfinished_bytes) == (3, unfinished)
    assert line.log_bytes + unfinished == log_bytes(bench, encrypted=3)


async def test_a_cluster_without_tiers_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "tidegate.toml"
    async with ScriptedBroker() as broker:
        config.write_text(f'[upstream]\nbootstrap.servers = "127.0.0.1:{broker.port}"\n')
        assert await asyncio.to_thread(cli.run, ["usage", "--config", str(config)]) == 3
    (said,) = capsys.readouterr().err.splitlines()
    assert "the cluster has no topic __remote_log_metadata: either nothing was tiered yet, or" in said
