"""Alarms before the broker's own retention removes records that are not copied."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.config.topic_policy import TopicPolicy
from tiers.config.total_retention import Retention, TotalRetention
from tiers.errors import BrokerError
from tiers.tasks.copy.uncopied import DUE_SHARE, UncopiedRecords, UncopiedSize
from tiers.tasks.retention.uncopied_watch import AtMost, UncopiedWatch

DAY_MS = 86_400_000
IN_TIME = replace(POLICY, broker_retention=Retention(DAY_MS, -1), recorded_total=TotalRetention(minutes=90 * 1_440))
REASONS = ("broker-retention-50", "broker-retention-80", "broker-retention-passed")


@pytest.fixture
def watch(bench: Workbench) -> UncopiedWatch:
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms) for n in range(10)])
    return UncopiedWatch(bench.services, PARTITION, UncopiedRecords(bench.services, PARTITION))


def raised(bench: Workbench) -> list[float]:
    return [bench.metric("remote_log_alarms_total", topic="orders", reason=reason) for reason in REASONS]


def at_most(size_bytes: int | None) -> AtMost:
    return lambda offset: UncopiedSize(size_bytes or 0, is_bound=size_bytes is not None)


async def looked(
    bench: Workbench, watch: UncopiedWatch, policy: TopicPolicy = IN_TIME, size_bytes: int | None = 0
) -> list[float]:
    for _ in range(2):
        await watch.run(policy, await bench.log.bounds(PARTITION, 1000), at_most(size_bytes))
    return raised(bench)


async def test_each_alarm_comes_once_as_the_oldest_record_gets_old(bench: Workbench, watch: UncopiedWatch) -> None:
    assert await looked(bench, watch) == [0, 0, 0]
    for share, expected in ((0.49, [0, 0, 0]), (0.5, [1, 0, 0]), (0.8, [1, 1, 0]), (1.0, [1, 1, 1])):
        bench.wall_ms = 1_700_000_000_000 + int(share * DAY_MS)
        assert await looked(bench, watch) == expected


async def test_a_copy_ends_the_episode(bench: Workbench, watch: UncopiedWatch) -> None:
    bench.wall_ms += DAY_MS
    assert await looked(bench, watch) == [1, 1, 1]
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms) for n in range(10, 16)])
    await bench.copy_all()
    assert bench.state.remote_end_offset(PARTITION) == 149
    assert await looked(bench, watch) == [1, 1, 1]
    assert [bench.active(reason) for reason in REASONS] == [0, 0, 0]
    bench.wall_ms += DAY_MS
    assert await looked(bench, watch) == [2, 2, 2]
    assert [bench.active(reason) for reason in REASONS] == [1, 1, 1]
    assert await looked(bench, watch, POLICY) == [2, 2, 2]
    assert [bench.active(reason) for reason in REASONS] == [0, 0, 0]


async def test_imported_records_with_an_old_create_time_alarm_at_once(bench: Workbench, watch: UncopiedWatch) -> None:
    bench.log.records = batch_of(0, 10, timestamp=bench.wall_ms - 2 * DAY_MS)
    assert await looked(bench, watch) == [1, 1, 1]


async def test_bytes_that_are_not_copied_alarm_too(bench: Workbench, watch: UncopiedWatch) -> None:
    policy = replace(IN_TIME, broker_retention=Retention(-1, 10_000))
    for size_bytes, expected in ((None, [0, 0, 0]), (4_999, [0, 0, 0]), (8_000, [1, 1, 0]), (10_000, [1, 1, 1])):
        assert await looked(bench, watch, policy, size_bytes) == expected


async def test_records_behind_an_open_transaction_alarm_by_the_time_seen(
    bench: Workbench, watch: UncopiedWatch
) -> None:
    bench.log.last_stable_offset = 0
    assert await looked(bench, watch) == [0, 0, 0]
    bench.now_ms += DAY_MS
    assert await looked(bench, watch) == [1, 1, 1]


@pytest.mark.parametrize(
    ("timestamp_ms", "size_bytes", "retention", "share"),
    [
        (-1, 0, Retention(DAY_MS, -1), DUE_SHARE),
        (-1, 0, Retention(-1, 1_000), 0.0),
        (0, None, Retention(-1, 1_000), DUE_SHARE),
        (0, None, Retention(DAY_MS, -1), 0.0),
    ],
)
async def test_records_of_an_unknown_age_or_size_are_due(
    bench: Workbench, timestamp_ms: int, size_bytes: int | None, retention: Retention, share: float
) -> None:
    timestamp_ms = bench.wall_ms if timestamp_ms == 0 else timestamp_ms
    bench.log.append(batch_of(0, 10, timestamp=timestamp_ms))
    watch = UncopiedWatch(bench.services, PARTITION, UncopiedRecords(bench.services, PARTITION))
    policy = replace(IN_TIME, broker_retention=retention)
    assert await watch.share_from(policy, 0, at_most(size_bytes)) == share


async def test_a_broker_that_does_not_answer_fails_no_round(bench: Workbench, watch: UncopiedWatch) -> None:
    bounds = await bench.log.bounds(PARTITION, 1000)
    bench.log.failure = BrokerError("no answer", retriable=True)
    await watch.run(IN_TIME, bounds, at_most(0))
    assert raised(bench) == [0, 0, 0]


@pytest.mark.parametrize(
    "policy", [POLICY, replace(IN_TIME, recorded_total=TotalRetention()), replace(IN_TIME, broker_retention=None)]
)
async def test_without_a_total_of_its_own_a_topic_needs_no_watch(
    bench: Workbench, watch: UncopiedWatch, policy: TopicPolicy
) -> None:
    bench.wall_ms += 10 * DAY_MS
    assert await looked(bench, watch, policy) == [0, 0, 0]
    assert bench.log.reads == []


async def test_the_first_record_is_read_once_per_offset(bench: Workbench, watch: UncopiedWatch) -> None:
    await looked(bench, watch)
    await looked(bench, watch)
    assert bench.log.reads == [0]
