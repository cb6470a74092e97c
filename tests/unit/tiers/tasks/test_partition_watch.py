"""The bounds between the tiers, and the alarms before the broker's own retention removes uncopied records."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.config.topic_policy import TopicPolicy
from tiers.config.total_retention import Retention, TotalRetention
from tiers.errors import BrokerError
from tiers.model.log_source import LocalLogBounds
from tiers.tasks.copy.uncopied import DUE_SHARE
from tiers.tasks.partition_watch import violated_bounds

DAY_MS = 86_400_000
IN_TIME = replace(POLICY, broker_retention=Retention(DAY_MS, -1), recorded_total=TotalRetention(minutes=90 * 1_440))
REASONS = ("broker-retention-50", "broker-retention-80", "broker-retention-passed")


@pytest.mark.parametrize(
    ("start", "lso", "high_watermark", "remote", "violated"),
    [
        (0, 0, 0, (None, None), []),
        (10, 20, 30, (0, 19), []),
        (10, 20, 30, (0, 20), ["Ly>Ry"]),
        (10, 20, 19, (0, 5), ["Lz>=Ly"]),
        (21, 20, 20, (None, None), ["Ly>=Lx"]),
        (10, 20, 30, (7, 6), ["Ry>=Rx"]),
    ],
)
def test_bounds(
    start: int, lso: int, high_watermark: int, remote: tuple[int | None, int | None], violated: list[str]
) -> None:
    assert violated_bounds(LocalLogBounds(start, lso, high_watermark, 0), *remote) == violated


@pytest.fixture
def filled(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Workbench:
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms) for n in range(10)])
    return bench


async def looked(bench: Workbench, policy: TopicPolicy = IN_TIME) -> list[float]:
    """Looks twice. Returns how often each alarm was raised so far."""
    for _ in range(2):
        await bench.watch.look(policy, await bench.log.bounds(PARTITION, 1000))
    return [bench.metric("remote_log_alarms_total", topic="orders", reason=reason) for reason in REASONS]


async def test_each_alarm_is_raised_once_as_the_oldest_record_ages(
    filled: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    for share, expected in ((0.0, [0, 0, 0]), (0.49, [0, 0, 0]), (0.5, [1, 0, 0]), (0.8, [1, 1, 0]), (1.0, [1, 1, 1])):
        filled.wall_ms = 1_700_000_000_000 + int(share * DAY_MS)
        assert await looked(filled) == expected
    assert filled.log.reads == [0], "the first record is read once"
    assert [line.levelname for line in caplog.records] == ["ERROR"] * 3


async def test_a_copy_ends_the_episode(filled: Workbench) -> None:
    filled.wall_ms += DAY_MS
    assert await looked(filled) == [1, 1, 1]
    filled.log.append(*[batch_of(10 * n, 10, value_bytes=15, timestamp=filled.wall_ms) for n in range(10, 16)])
    await filled.copy_all()
    assert filled.state.remote_end_offset(PARTITION) == 149
    assert await looked(filled) == [1, 1, 1]
    assert [filled.active(reason) for reason in REASONS] == [0, 0, 0]
    filled.wall_ms += DAY_MS
    assert await looked(filled) == [2, 2, 2]
    assert await looked(filled, POLICY) == [2, 2, 2]
    assert [filled.active(reason) for reason in REASONS] == [0, 0, 0]


async def test_records_behind_an_open_transaction_age_since_they_are_known(filled: Workbench) -> None:
    filled.log.last_stable_offset = 0
    assert await looked(filled) == [0, 0, 0]
    filled.now_ms += DAY_MS
    assert await looked(filled) == [1, 1, 1]


async def test_a_broker_that_does_not_answer_fails_no_look(filled: Workbench) -> None:
    bounds = await filled.log.bounds(PARTITION, 1000)
    filled.log.failure = BrokerError("no answer", retriable=True)
    await filled.watch.look(IN_TIME, bounds)
    assert filled.watch.retention_share == DUE_SHARE


@pytest.mark.parametrize(
    "policy", [POLICY, replace(IN_TIME, recorded_total=TotalRetention()), replace(IN_TIME, broker_retention=None)]
)
async def test_without_a_total_of_its_own_a_topic_needs_no_watch(filled: Workbench, policy: TopicPolicy) -> None:
    filled.wall_ms += 10 * DAY_MS
    assert await looked(filled, policy) == [0, 0, 0]
    assert filled.log.reads == []


@pytest.mark.parametrize(
    ("has_time", "size_bytes", "retention", "share"),
    [
        (False, 0, Retention(DAY_MS, -1), DUE_SHARE),
        (False, 0, Retention(-1, 1_000), 0.0),
        (True, None, Retention(-1, 1_000), DUE_SHARE),
        (True, None, Retention(DAY_MS, -1), 0.0),
        (True, 499, Retention(-1, 1_000), 0.499),
        (True, 800, Retention(DAY_MS, 1_000), 0.8),
    ],
)
async def test_the_share_of_the_bytes_counts_and_unknown_records_are_due(
    bench: Workbench,
    monkeypatch: pytest.MonkeyPatch,
    has_time: bool,
    size_bytes: int | None,
    retention: Retention,
    share: float,
) -> None:
    monkeypatch.setattr(bench.copy_task.uncopied, "at_most", lambda offset: size_bytes)
    bench.log.append(batch_of(0, 10, timestamp=bench.wall_ms if has_time else -1))
    assert await bench.watch.share_from(replace(IN_TIME, broker_retention=retention), 0) == share


async def test_a_transaction_that_hangs_is_an_alarm_once(filled: Workbench) -> None:
    stuck_ms, filled.log.last_stable_offset = filled.services.settings.stuck_lso_alarm_ms, 40
    for now_ms, is_stuck in ((0, 0), (stuck_ms - 1, 0), (stuck_ms, 1), (2 * stuck_ms, 1)):
        filled.now_ms = 1_000_000 + now_ms
        await looked(filled)
        assert filled.active("stuck-lso") == is_stuck
    filled.log.last_stable_offset = None
    await looked(filled)
    assert filled.active("stuck-lso") == 0
    assert filled.metric("remote_log_alarms_total", topic="orders", reason="stuck-lso") == 1


@pytest.mark.parametrize(
    ("changes", "lag_ms"),
    [
        ({"retention_ms": 40}, 20),
        ({"broker_retention": Retention(40, -1)}, 20),  # while nothing may expire, the broker goes on removing records
        ({"retention_ms": 40, "copy_lag_ms": 30, "copy_lag_bytes": -1, "segment_ms": 10}, 40),
        ({}, DAY_MS),
    ],
)
async def test_copying_that_falls_behind_the_retention_is_an_alarm(
    filled: Workbench, changes: dict[str, Any], lag_ms: int
) -> None:
    policy = replace(POLICY, **changes)
    for behind_ms in (0, lag_ms, lag_ms + 1):
        filled.now_ms = 1_000_000 + behind_ms
        await looked(filled, policy)
        assert filled.active("copy-lag") == (behind_ms > lag_ms and changes != {})
