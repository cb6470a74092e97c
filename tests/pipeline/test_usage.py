"""The sums of `usage` agree: by metadata, by listing and by `du`."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest
from pyspark.sql import SparkSession

from pipeline import cli
from pipeline.maintenance.store_listing import ExpectedPartition, ExpectedSegment, listing_plan
from pipeline.maintenance.usage import Prices, UsageReport, day_text, usage_of_tier
from pipeline.maintenance.usage_line import DAY_MS, UsageBy
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import PARTITION
from tests.support.pipeline.scrub_bench import ScrubBench, scrub_bench
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentState
from tiers.storage.object_key import facts_key, partition_prefix

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


async def counted(bench: ScrubBench, by: UsageBy, is_verified: bool, topics: str | None = None) -> UsageReport:
    return await usage_of_tier(bench.tier(), bench.config, bench.runner if is_verified else None, by, topics)


def du(bench: ScrubBench, suffix: str = "") -> int:
    return sum(path.stat().st_size for path in bench.files() if path.name.endswith(suffix))


@pytest.mark.parametrize("is_verified", [False, True])
@pytest.mark.parametrize("by", UsageBy)
async def test_it_is_what_the_files_take(bench: ScrubBench, by: UsageBy, is_verified: bool) -> None:
    await two_days(bench)
    report = await counted(bench, by, is_verified)
    # The metadata knows neither the tags of encryption nor the other objects.
    tags, total = (16, du(bench)) if is_verified else (0, du(bench, ".log") - 16)
    assert sum(each.total_bytes for each in report.lines) == total
    assert sum(each.log_bytes for each in report.lines) == du(bench, ".log") - 16 + tags
    assert sum(each.index_bytes for each in report.lines) == is_verified * du(bench, ".indexes")
    if by is UsageBy.DAY:
        days = [(day_text(each.day), each.segments) for each in report.lines if each.segments]
        assert days == [("2024-08-25", 1), ("2024-10-04", 2)]
    else:
        [line] = report.lines
        assert (line.segments, line.overhead_bytes) == (3, tags)
        assert line.partition == (PARTITION.partition if by is UsageBy.PARTITION else None)


async def test_ages_are_of_the_latest_record(bench: ScrubBench) -> None:
    await two_days(bench)
    report = await counted(bench, UsageBy.TOPIC, True)
    ages = report.ages(TODAY)
    assert [name for name, size in ages.items() if size] == ["under 1 d", "under 90 d"]
    assert sum(ages.values()) == du(bench) - du(bench, ".facts")
    assert report.ages(TODAY + 1000)["365 d and more"] == sum(ages.values())


async def test_a_listing_counts_orphans_and_copies_in_progress(bench: ScrubBench) -> None:
    await two_days(bench)
    before = du(bench)
    await bench.stored(100)
    orphans = du(bench) - before
    under_way = await bench.stored(200)
    await bench.rlmm.add_remote_log_segment_metadata(under_way)
    deleting = await bench.tiered(300)
    await bench.move(deleting, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
    other = TopicIdPartition(UUID(int=7), 9)
    await bench.storage.put_object(facts_key("cluster", other, 0, 5, UUID(int=1)), b"{}")
    await bench.storage.put_object(facts_key("another", other, 0, 5, UUID(int=1)), b"not ours")
    lines = (await counted(bench, UsageBy.PARTITION, True)).lines
    assert [(each.topic, each.partition, each.orphan_bytes) for each in lines] == [
        (str(other.topic_id), 9, 2),
        ("orders", 3, orphans),
    ]
    assert sum(each.total_bytes for each in lines) == du(bench) - len(b"not ours")
    assert lines[1].unfinished_bytes == du(bench) - before - orphans - len(b"{}not ours")
    [line] = (await counted(bench, UsageBy.PARTITION, False)).lines
    assert (line.unfinished_bytes, line.orphan_bytes, line.segments) == (None, None, 3)


async def test_only_the_topics_that_were_asked_for(bench: ScrubBench) -> None:
    await two_days(bench)
    await bench.storage.put_object(facts_key("cluster", TopicIdPartition(UUID(int=7), 9), 0, 5, UUID(int=1)), b"{}")
    assert len((await counted(bench, UsageBy.TOPIC, True)).lines) == 2
    [line] = (await counted(bench, UsageBy.TOPIC, True, "orders")).lines
    assert line.total_bytes == du(bench) - 2


async def test_a_cluster_without_tiers_is_reported_before_spark_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def too_late(*_: object) -> SparkSession:
        raise AssertionError("Spark is started")

    monkeypatch.setattr("pipeline.commands.usage.job_session", too_late)
    config = tmp_path / "tidegate.toml"
    async with ScriptedBroker() as broker:
        config.write_text(f'[upstream]\nbootstrap.servers = "127.0.0.1:{broker.port}"\n')
        assert await asyncio.to_thread(cli.run, ["usage", "--config", str(config)]) == 3
    (said,) = capsys.readouterr().err.splitlines()
    assert "the cluster has no topic __remote_log_metadata: either nothing was tiered yet, or" in said


def test_costs_are_of_bytes_and_of_requests() -> None:
    prices = Prices(0.02, 0.005)
    assert (prices.of_month(50 << 30), prices.of_requests(4000)) == (1.0, 0.02)
    assert (Prices().of_month(1), Prices().of_requests(1)) == (None, None)


@pytest.mark.parametrize(("segments", "listings"), [(1, 1), (200, 16), (10_000, 256)])
def test_a_large_tier_is_listed_in_parts_that_together_are_all(segments: int, listings: int) -> None:
    partitions = [TopicIdPartition(UUID(int=7), number, "orders") for number in range(60)]
    some = tuple(ExpectedSegment(number.to_bytes(16, "big"), True, 1, 1) for number in range(segments))
    expected = [ExpectedPartition.of(each, some) for each in partitions]
    plan = listing_plan(expected, "c", True)
    assert len({prefix for task in plan for prefix in task.prefixes}) == listings
    place = {one.partition: task.prefixes[0] for task in plan for one in task.expected}
    assert place.keys() == set(partitions)
    assert all(partition_prefix("c", each).startswith(prefix) for each, prefix in place.items())


def test_chosen_partitions_are_listed_alone() -> None:
    partitions = [TopicIdPartition(UUID(int=7), number, "orders") for number in range(12_000)]
    plan = listing_plan([ExpectedPartition.of(each, ()) for each in partitions], "c", False)
    assert [len(task.prefixes) for task in plan] == [5000, 5000, 2000]
    assert [prefix for task in plan for prefix in task.prefixes] == [partition_prefix("c", each) for each in partitions]
