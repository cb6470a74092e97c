"""A total retention of a topic's own: no file shortens it, and no stale policy expires anything by it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.running_manager import Running
from tests.support.tiers.waiting import until
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.config.topic_policy import TopicConfig, TopicPolicy, policy_of
from tiers.config.total_retention import (
    NO_TOTAL,
    RETENTION_BYTES,
    RETENTION_MINUTES,
    Retention,
    TotalRetention,
    longest_total,
    recorded_total,
)
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.tasks.retention.total_retention import TotalRetentionTask

HOUR_MS = 3_600_000
DAY_MINUTES = 1_440
BROKER = {"cleanup.policy": "delete", "retention.ms": str(24 * HOUR_MS), "retention.bytes": "5000"}
KEEPS = Retention(24 * HOUR_MS, 5000)
NEVER = (-1, -1)


def policy(
    minutes: int | None = None,
    size_bytes: int | None = None,
    recorded: TotalRetention = NO_TOTAL,
) -> TopicPolicy:
    """The policy of a file with these keys, over a broker that keeps a day and 5000 bytes."""
    rule = TopicConfig(pattern="orders", total_retention_minutes=minutes, total_retention_bytes=size_bytes)
    made = policy_of("orders", PARTITION.topic_id, 1, rule, BROKER, recorded.config())
    assert isinstance(made, TopicPolicy)
    return made


def total(made: TopicPolicy) -> tuple[int, int]:
    return made.retention_ms, made.retention_bytes


def alarms(bench: Workbench) -> float:
    return bench.metric("remote_log_alarms_total", topic="orders", reason="retention-differs")


async def recorded(bench: Workbench, **values: int) -> TotalRetention:
    """Records a total, as a request of kafka-configs does."""
    wanted = TotalRetention(**values)
    await bench.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", wanted.config())
    return wanted


def of_metadata(bench: Workbench) -> TotalRetention:
    return recorded_total(bench.state.topic_tier_config(PARTITION.topic_id))


@pytest.fixture
async def copied(bench: Workbench) -> Workbench:
    """Segments 0-29, 30-59 and 60-89 are remote, an hour of records each."""
    for n in range(10):
        bench.log.append(batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms + n // 3 * HOUR_MS))
    bench.wall_ms += 3 * HOUR_MS
    await bench.copy_all()
    return bench


KNOWN = TotalRetention(90 * DAY_MINUTES, 1 << 40)
LONG_MS = 90 * 24 * HOUR_MS


@pytest.mark.parametrize(
    ("minutes", "size_bytes", "known", "expected"),
    [
        (None, None, NO_TOTAL, (24 * HOUR_MS, 5000)),
        (None, None, TotalRetention(minutes=90 * DAY_MINUTES), (LONG_MS, -1)),
        (None, None, TotalRetention(size_bytes=7), (-1, 7)),
        (None, None, TotalRetention(-1, 7), (-1, 7)),
        (None, None, KNOWN, (LONG_MS, 1 << 40)),
        (90 * DAY_MINUTES, None, KNOWN, (LONG_MS, 1 << 40)),
    ],
)
def test_the_total_is_the_recorded_one_or_the_retention_of_the_broker(
    minutes: int | None, size_bytes: int | None, known: TotalRetention, expected: tuple[int, int]
) -> None:
    """A missing key of a file never shortens. With a total, the broker's retention bounds the local tier alone."""
    made = policy(minutes, size_bytes, known)
    assert (total(made), made.total_to_record, made.total_conflict) == (expected, None, "")
    assert (made.local_retention_ms, made.local_retention_bytes, made.broker_retention) == (None, None, KEEPS)


@pytest.mark.parametrize(
    ("minutes", "size_bytes", "known"),
    [
        *((days * DAY_MINUTES, None, TotalRetention(minutes=90 * DAY_MINUTES)) for days in (30, 120)),
        (-1, None, TotalRetention(minutes=90 * DAY_MINUTES)),
        *((*first, NO_TOTAL) for first in ((DAY_MINUTES - 1, None), (None, 4999), (-1, 0), (60, -1))),
    ],
)
def test_while_a_file_differs_or_is_too_short_nothing_expires(
    minutes: int | None, size_bytes: int | None, known: TotalRetention
) -> None:
    made = policy(minutes, size_bytes, known)
    assert (total(made), made.total_to_record) == (NEVER, None)
    assert made.total_conflict


@pytest.mark.parametrize(
    ("minutes", "size_bytes"), [(DAY_MINUTES, None), (None, 5000), (-1, -1), (2 * DAY_MINUTES, 1 << 40)]
)
def test_a_first_total_is_recorded_and_expires_nothing_before(minutes: int | None, size_bytes: int | None) -> None:
    made = policy(minutes, size_bytes)
    assert (total(made), made.total_conflict) == (NEVER, "")
    assert made.total_to_record == TotalRetention(minutes, size_bytes)


def test_a_file_whose_local_retention_exceeds_its_total_is_invalid() -> None:
    with pytest.raises(ValueError, match=r"local.retention.ms is longer than remote.log.retention.minutes"):
        TopicConfig(pattern="orders", local_retention_ms=60_001, total_retention_minutes=1)
    with pytest.raises(ValueError, match=r"local.retention.bytes is more than remote.log.retention.bytes"):
        TopicConfig(pattern="orders", local_retention_bytes=8, total_retention_bytes=7)
    TopicConfig(pattern="orders", local_retention_ms=60_000, total_retention_minutes=1, total_retention_bytes=-1)


@pytest.mark.parametrize("runs", [1, 2])
async def test_the_owner_records_the_total_of_its_file_or_else_another_member(bench: Workbench, runs: int) -> None:
    """A write that fails is tried again, and what was recorded meanwhile stays."""
    bench.metadata.owned, task = runs == 1, TotalRetentionTask(bench.services)
    for _ in range(runs):
        bench.metadata.fail_writes = RemoteLogMetadataNotReadyError("no answer") if bench.metadata.owned else None
        if bench.metadata.owned:
            await task.run([policy(2 * DAY_MINUTES)])
        bench.metadata.fail_writes = None
        assert of_metadata(bench) == NO_TOTAL
        await task.run([policy(2 * DAY_MINUTES)])
    assert (of_metadata(bench), alarms(bench)) == (TotalRetention(minutes=2 * DAY_MINUTES), 0)
    await TotalRetentionTask(bench.services).run([policy(-1)])
    assert of_metadata(bench) == TotalRetention(minutes=2 * DAY_MINUTES)


@pytest.mark.parametrize(
    "make",
    [
        lambda: policy(30 * DAY_MINUTES, recorded=TotalRetention(minutes=90 * DAY_MINUTES)),
        lambda: policy(120 * DAY_MINUTES, recorded=TotalRetention(minutes=90 * DAY_MINUTES)),
        lambda: policy(60),
    ],
)
async def test_a_file_that_differs_raises_one_alarm_and_changes_nothing(
    bench: Workbench, make: Callable[[], TopicPolicy], caplog: pytest.LogCaptureFixture
) -> None:
    task, differing = TotalRetentionTask(bench.services), make()
    if differing.recorded_total.is_set:
        await recorded(bench, minutes=90 * DAY_MINUTES)
    with caplog.at_level(logging.ERROR):
        for _ in range(3):
            await task.run([differing])
    assert alarms(bench) == len(caplog.records) == 1
    assert bench.active("retention-differs") == 1
    assert of_metadata(bench) == differing.recorded_total
    await task.run([policy()])
    assert bench.active("retention-differs") == 0
    await task.run([differing])
    assert alarms(bench) == 2
    assert bench.active("retention-differs") == 1


async def test_segments_expire_by_the_recorded_total(copied: Workbench) -> None:
    known = await recorded(copied, minutes=60)
    assert await copied.expire(policy(recorded=known)) == 2
    assert copied.finished == [(60, 89)]


async def test_a_total_that_was_lengthened_since_the_policy_expires_nothing(copied: Workbench) -> None:
    before = policy(recorded=await recorded(copied, minutes=60))
    after = await recorded(copied, minutes=600)
    assert await copied.expire(before) == 0
    assert await copied.expire(policy(recorded=after)) == 0
    assert copied.state.log_start_offset(PARTITION) == 0


@pytest.mark.parametrize("stored", ["soon", "-7"])
async def test_a_recorded_total_that_cannot_be_read_expires_nothing(copied: Workbench, stored: str) -> None:
    copied.metadata.fresh = False
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await copied.expire(replace(POLICY, retention_ms=HOUR_MS))
    copied.metadata.fresh = True
    await copied.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", {RETENTION_MINUTES: stored})
    assert await copied.expire(replace(POLICY, retention_ms=HOUR_MS)) == 0
    assert len(copied.finished) == 3


async def test_a_running_manager_records_the_total_of_the_file(bench: Workbench) -> None:
    running = Running(bench, policy(2 * DAY_MINUTES))
    async with running.run():
        await until(lambda: of_metadata(bench).is_set)
    assert of_metadata(bench) == TotalRetention(minutes=2 * DAY_MINUTES)


def test_the_longest_of_several_totals_is_not_shorter_than_any() -> None:
    short, long = TotalRetention(5, 100), TotalRetention(7, 90)
    assert longest_total([short, short]) == short
    assert longest_total([short, long]) == TotalRetention(7, 100)
    assert longest_total([short, TotalRetention(minutes=9)]) == TotalRetention(9, -1)
    assert longest_total([short, NO_TOTAL]) == TotalRetention(-1, -1)
    assert longest_total([NO_TOTAL, NO_TOTAL]) == NO_TOTAL
    assert short.config() == {RETENTION_MINUTES: "5", RETENTION_BYTES: "100"}
