from __future__ import annotations

import logging
from dataclasses import replace

import pytest

from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.interposed import before
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.errors import OwnershipLostError
from tiers.tasks.retention.expiration_task import RLMExpirationTask

HOUR_MS = 3_600_000


@pytest.fixture
async def copied(bench: Workbench) -> Workbench:
    """Segments 0-29, 30-59 and 60-89, an hour of records each; 90-99 is only local."""
    for n in range(10):
        bench.log.append(batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms + n // 3 * HOUR_MS))
    bench.wall_ms += 3 * HOUR_MS
    await bench.copy_all()
    bench.steps.clear()
    return bench


async def test_the_log_start_moves_before_segments_expire_by_their_newest_record(
    copied: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    assert await copied.expire(POLICY) == 0
    with caplog.at_level(logging.INFO):
        assert await copied.expire(replace(POLICY, retention_ms=2 * HOUR_MS)) == 1
    [said] = [vars(each) for each in caplog.records if each.message == "records expired by the total retention"]
    assert (said["partition"], said["before"], said["log_start_offset"]) == (str(PARTITION), 0, 30)
    assert copied.finished == [(30, 59), (60, 89)]
    assert copied.state.log_start_offset(PARTITION) == 30
    assert len(await copied.objects()) == 4
    assert copied.steps == [
        "log-start-raised",
        "log-start-applied",
        "delete-started-written",
        "objects-deleted",
        "delete-finished-written",
    ]


async def test_records_that_became_due_after_the_brokers_were_asked_stay(copied: Workbench) -> None:
    """The user may have raised the retention since."""
    policy, asked_at_ms = replace(POLICY, retention_ms=2 * HOUR_MS), copied.wall_ms - 2 * HOUR_MS
    copied.expiration_task = RLMExpirationTask(copied.services, PARTITION, policy_as_of_ms=lambda: asked_at_ms)
    assert await copied.expire(policy) == 0
    asked_at_ms = copied.wall_ms
    assert await copied.expire(policy) == 1


async def test_no_log_start_above_the_last_stable_offset_is_applied(copied: Workbench) -> None:
    """Another leader has an open transaction below a recorded log start."""
    await copied.metadata.put_log_start(PARTITION, user_log_start(30, leader_epoch=0))
    copied.log.last_stable_offset = 20
    await copied.expire(POLICY)
    assert copied.log.log_start_offset == 0
    copied.log.last_stable_offset = 30
    await copied.expire(POLICY)
    assert copied.log.log_start_offset == 30


async def test_the_total_size_counts_both_tiers(copied: Workbench) -> None:
    size_bytes = copied.segments[0].segment_size_bytes
    total_bytes = 3 * size_bytes + copied.copy_task.uncopied.at_least()
    assert await copied.expire(replace(POLICY, retention_bytes=total_bytes - size_bytes + 1)) == 0
    assert await copied.expire(replace(POLICY, retention_bytes=total_bytes - size_bytes)) == 1
    assert copied.finished[0] == (30, 59)


async def test_segments_below_the_log_start_go_and_one_that_straddles_it_stays(copied: Workbench) -> None:
    await copied.record_log_start(45)
    assert await copied.expire(POLICY) == 1
    assert copied.finished == [(30, 59), (60, 89)]


async def test_one_run_deletes_no_more_bytes_than_it_may(copied: Workbench) -> None:
    settings = replace(copied.services.settings, expire_max_bytes_per_run=copied.segments[0].segment_size_bytes)
    copied.services = replace(copied.services, settings=settings)
    copied.restart()
    everything = replace(POLICY, retention_ms=0)
    copied.wall_ms += HOUR_MS
    assert [await copied.expire(everything) for _ in range(4)] == [1, 1, 1, 0]
    assert copied.finished == []


@pytest.mark.parametrize(("our_clock_ms", "measured_ms"), [(-61_000, 0), (0, 61_000), (0, -61_000)])
async def test_nothing_expires_while_the_clocks_differ(copied: Workbench, our_clock_ms: int, measured_ms: int) -> None:
    copied.wall_ms += our_clock_ms
    copied.metadata.skew_ms = measured_ms
    assert await copied.expire(replace(POLICY, retention_ms=0)) == 0
    assert len(copied.finished) == 3
    assert copied.metric("remote_log_alarms_total", topic="orders", reason="clock-skew") == 1
    assert copied.active("clock-skew") == 1
    copied.wall_ms -= our_clock_ms
    copied.metadata.skew_ms = 0
    await copied.expire(replace(POLICY, retention_ms=0))
    assert copied.active("clock-skew") == 0


async def test_the_alarm_about_the_clocks_ends_also_if_nothing_is_due_any_more(copied: Workbench) -> None:
    """A clock that was ahead made the records look too old."""
    keeps = replace(POLICY, retention_ms=10 * HOUR_MS)
    copied.wall_ms += 10 * HOUR_MS
    copied.metadata.skew_ms = -10 * HOUR_MS
    assert await copied.expire(keeps) == 0
    assert copied.active("clock-skew") == 1
    copied.wall_ms -= 10 * HOUR_MS
    copied.metadata.skew_ms = 0
    assert await copied.expire(keeps) == 0
    assert copied.active("clock-skew") == 0


async def test_a_clock_that_is_set_during_the_check_expires_nothing(
    copied: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The records were judged by the wrong clock, and the clocks were compared when it was right again."""
    right_ms = copied.wall_ms
    before(monkeypatch, copied.metadata, "clock_skew_ms", lambda _: setattr(copied, "wall_ms", right_ms))
    copied.wall_ms += 10 * HOUR_MS
    assert await copied.expire(replace(POLICY, retention_ms=10 * HOUR_MS)) == 0
    assert len(copied.finished) == 3


async def test_a_skew_that_a_new_measurement_does_not_find_stops_nothing(copied: Workbench) -> None:
    copied.metadata.skew_ms, copied.metadata.true_skew_ms = 61_000, 0
    assert await copied.expire(replace(POLICY, retention_ms=2 * HOUR_MS)) == 1
    assert copied.metric("remote_log_alarms_total", topic="orders", reason="clock-skew") == 0


async def test_a_record_dated_in_the_future_holds_the_expiry_with_an_alarm(
    bench: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    for n in range(10):
        bench.log.append(batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms + (n == 1) * 10**14))
    await bench.copy_all()
    one_hour = replace(POLICY, retention_ms=HOUR_MS)
    bench.wall_ms += HOUR_MS
    assert (await bench.expire(one_hour), bench.active("future-timestamp")) == (0, 0)
    bench.wall_ms += 1
    for _ in range(2):
        assert (await bench.expire(one_hour), bench.active("future-timestamp")) == (0, 1)
    assert [line.getMessage() for line in caplog.records if line.levelname == "ERROR"] == [
        "a timestamp in the future keeps records from expiring"
    ]
    assert (await bench.expire(POLICY), bench.active("future-timestamp")) == (0, 0)
    assert (await bench.expire(one_hour), bench.active("future-timestamp")) == (0, 1)
    assert (await bench.expire(replace(one_hour, retention_bytes=0)), bench.active("future-timestamp")) == (3, 0)


async def test_the_remote_start_deletes_no_earlier_record_of_the_broker(copied: Workbench) -> None:
    del copied.metadata.segments[copied.segments[0].segment_id]
    assert copied.state.log_start_offset(PARTITION) == 30
    await copied.expire(POLICY)
    assert copied.log.trims == []


async def test_only_the_owner_expires(copied: Workbench) -> None:
    copied.metadata.owned = False
    with pytest.raises(OwnershipLostError):
        await copied.expire(replace(POLICY, retention_ms=0))
    assert len(copied.finished) == 3
    assert copied.state.log_start_offset(PARTITION) == 0


async def test_segments_that_another_owner_cut_are_not_deleted(
    copied: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cut = copied.metadata.put_cut
    before(monkeypatch, copied.store, "delete_log_segment_data", lambda _: cut(PARTITION, 1, 35))
    assert await copied.expire(replace(POLICY, retention_ms=HOUR_MS // 2)) == 1
    assert copied.finished == [(30, 59), (60, 89)]
    assert len(await copied.objects()) == 4
