"""Topics that no broker knows: absence proves no deletion, however many of them are absent."""

from __future__ import annotations

import logging
from dataclasses import replace
from uuid import UUID

import pytest

from tests.support.fakes.in_memory_rlmm import IN_MEMORY_TOPIC_ID
from tests.support.tiers.topic_deletion_bench import Existence, put_segments, round_after, rounds_for
from tests.support.tiers.workbench import PARTITION, Workbench
from tiers.errors import RemoteLogMetadataError
from tiers.model.ids import TopicIdPartition
from tiers.tasks.deletion.missing_topics import SAME_TIME_MS, vanished_together
from tiers.tasks.deletion.topic_deletion import TopicDeletionTask

SECOND_MS, HOUR_MS, DAY_MS = 1_000, 3_600_000, 86_400_000
TOPIC_ID = PARTITION.topic_id
OTHER = TopicIdPartition(UUID(int=2), 0, "payments")


@pytest.fixture
async def missing(bench: Workbench) -> Workbench:
    """Three segments of a topic of which nothing is recorded."""
    await put_segments(bench)
    return bench


def delays(bench: Workbench) -> tuple[int, int]:
    """With proof, and without."""
    settings = bench.services.settings
    return settings.remote_log.topic_deletion_delay_ms, settings.remote_log.topic_deletion_unproved_delay_ms


async def until_recorded(bench: Workbench, task: TopicDeletionTask) -> None:
    """The first sight records nothing: a proxy may just be recording a deletion."""
    before = dict(bench.metadata.missing)
    assert await task.run() == 0
    assert bench.metadata.missing == before
    assert await round_after(bench, task, SECOND_MS) == 0
    assert bench.metadata.missing != before


async def test_an_unproved_deletion_deletes_nothing_before_days(missing: Workbench) -> None:
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    _, unproved_ms = delays(missing)
    assert unproved_ms == 7 * DAY_MS
    await until_recorded(missing, task)
    assert missing.metadata.missing == {TOPIC_ID: missing.wall_ms}
    assert await rounds_for(missing, task, unproved_ms - HOUR_MS, HOUR_MS) == 0
    assert await round_after(missing, task, HOUR_MS - 1) == 0
    assert len(await missing.objects()) == 6
    assert missing.metadata.deletions == {}
    assert await round_after(missing, task, 1) == 1
    assert await missing.objects() == []


async def test_neither_a_restart_nor_another_owner_begins_the_days_anew(missing: Workbench) -> None:
    delay_ms, unproved_ms = delays(missing)
    await until_recorded(missing, TopicDeletionTask(missing.services, Existence(TOPIC_ID)))
    first_of_other = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    assert await round_after(missing, first_of_other, unproved_ms - delay_ms - 1) == 0
    again = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    assert await round_after(missing, again, 1) == 0
    assert await round_after(missing, again, delay_ms - 1) == 0
    assert await round_after(missing, again, 1) == 1
    assert await missing.objects() == []


async def test_a_process_that_starts_looks_for_itself_first(missing: Workbench) -> None:
    """However long the record says that the topic was missing, and whatever the clocks say."""
    delay_ms, unproved_ms = delays(missing)
    await until_recorded(missing, TopicDeletionTask(missing.services, Existence(TOPIC_ID)))
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    assert await round_after(missing, task, 10 * unproved_ms) == 0
    assert await round_after(missing, task, delay_ms - 1) == 0
    assert await round_after(missing, task, 1) == 1


async def test_a_topic_that_comes_back_begins_the_days_anew(missing: Workbench) -> None:
    existence = Existence(TOPIC_ID)
    task = TopicDeletionTask(missing.services, existence)
    _, unproved_ms = delays(missing)
    await until_recorded(missing, task)
    assert await rounds_for(missing, task, unproved_ms - HOUR_MS, HOUR_MS) == 0
    existence.deleted = set()
    assert await round_after(missing, task, SECOND_MS) == 0
    assert missing.metadata.missing == {}
    existence.deleted = {TOPIC_ID}
    await until_recorded(missing, task)
    assert await rounds_for(missing, task, unproved_ms - HOUR_MS, HOUR_MS) == 0
    assert len(await missing.objects()) == 6
    assert await rounds_for(missing, task, HOUR_MS, HOUR_MS) == 1


async def test_a_proved_deletion_waits_only_minutes_also_with_a_late_proof(missing: Workbench) -> None:
    delay_ms, _ = delays(missing)
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    await until_recorded(missing, task)
    assert await rounds_for(missing, task, DAY_MS, HOUR_MS) == 0
    await missing.metadata.put_topic_deletion(TOPIC_ID, "orders")
    restarted = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    assert await restarted.run() == 0
    assert await round_after(missing, restarted, delay_ms - 1) == 0
    assert await round_after(missing, restarted, 1) == 1


async def test_a_broker_that_knows_the_topic_stops_a_proved_deletion(missing: Workbench) -> None:
    """A proxy recorded the deletion under a name that another topic has now."""
    await missing.metadata.put_topic_deletion(TOPIC_ID, "orders")
    task = TopicDeletionTask(missing.services, Existence())
    delay_ms, unproved_ms = delays(missing)
    assert await rounds_for(missing, task, 2 * unproved_ms, delay_ms) == 0
    assert len(await missing.objects()) == 6


async def test_the_proof_of_a_topic_that_is_there_ends_but_not_at_once(missing: Workbench) -> None:
    """Brokers hear of a deletion one after the other."""
    await missing.metadata.put_topic_deletion(TOPIC_ID, "orders")
    task = TopicDeletionTask(missing.services, Existence())
    delay_ms, _ = delays(missing)
    await task.run()
    await round_after(missing, task, delay_ms - 1)
    assert missing.metadata.is_topic_deleted(TOPIC_ID)
    await round_after(missing, task, 1)
    assert not missing.metadata.is_topic_deleted(TOPIC_ID)


@pytest.fixture
async def two_missing(missing: Workbench) -> Workbench:
    await put_segments(missing, 1, OTHER)
    return missing


async def test_topics_that_vanish_together_need_an_operator(
    two_missing: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    bench, (delay_ms, unproved_ms) = two_missing, delays(two_missing)
    task = TopicDeletionTask(bench.services, Existence(TOPIC_ID, OTHER.topic_id))
    with caplog.at_level(logging.ERROR, "tiers.tasks.deletion.missing_topics"):
        await until_recorded(bench, task)
        assert await rounds_for(bench, task, 4 * unproved_ms, HOUR_MS) == 0
    (told,) = caplog.records
    named = " ".join(told.__dict__["topics"])
    assert all(said in named for said in ("orders", str(TOPIC_ID), "payments", str(OTHER.topic_id)))
    for topic in ("orders", "payments"):
        assert bench.metric("remote_log_alarms_total", topic=topic, reason="topics-missing") == 1
        assert bench.active("topics-missing", topic) == 1
    assert len(await bench.objects()) == 8

    # One that an operator calls deleted goes, and does not leave the other one alone with its days.
    await bench.metadata.put_topic_deletion(OTHER.topic_id, OTHER.topic)
    assert await task.run() == 1
    assert await rounds_for(bench, task, 4 * unproved_ms, HOUR_MS) == 0
    assert len(await bench.objects()) == 6
    await bench.metadata.put_topic_deletion(TOPIC_ID, "orders")
    assert await task.run() == 1
    assert await bench.objects() == []
    await rounds_for(bench, task, 3 * delay_ms, delay_ms)
    assert [bench.active("topics-missing", topic) for topic in ("orders", "payments")] == [0, 0]
    assert (bench.metadata.missing, bench.metadata.deleted_topics) == ({}, set())


async def test_topics_that_vanish_one_by_one_need_no_operator(two_missing: Workbench) -> None:
    bench, (_, unproved_ms) = two_missing, delays(two_missing)
    existence = Existence(OTHER.topic_id)
    task = TopicDeletionTask(bench.services, existence)
    await until_recorded(bench, task)
    await round_after(bench, task, SAME_TIME_MS)
    existence.deleted.add(TOPIC_ID)
    await until_recorded(bench, task)
    assert await rounds_for(bench, task, unproved_ms + HOUR_MS, HOUR_MS) == 2
    assert await bench.objects() == []
    assert bench.metric("remote_log_alarms_total", topic="orders", reason="topics-missing") == 0


def test_the_same_time_is_an_hour_from_one_topic_to_the_next() -> None:
    first, second, third, alone = (UUID(int=number) for number in range(4))
    missing = {third: 2 * SAME_TIME_MS - 2, first: 0, alone: 3 * SAME_TIME_MS - 2, second: SAME_TIME_MS - 1}
    assert vanished_together(missing) == {first, second, third}
    assert vanished_together({first: 5}) == vanished_together({}) == set()


async def test_a_deletion_that_a_proxy_relayed_counts_for_no_other(two_missing: Workbench) -> None:
    bench, (_, unproved_ms) = two_missing, delays(two_missing)
    await bench.metadata.put_topic_deletion(OTHER.topic_id, OTHER.topic)
    task = TopicDeletionTask(bench.services, Existence(TOPIC_ID, OTHER.topic_id))
    await until_recorded(bench, task)
    assert bench.metadata.missing.keys() == {TOPIC_ID}
    assert await rounds_for(bench, task, unproved_ms, HOUR_MS) == 2


async def test_nothing_is_deleted_while_no_broker_knows_the_metadata_topic(missing: Workbench) -> None:
    """Its id changed: the metadata is of other brokers, or of another time."""
    await missing.metadata.put_topic_deletion(TOPIC_ID, "orders")
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID, IN_MEMORY_TOPIC_ID))
    written, (delay_ms, _) = missing.metadata.written, delays(missing)
    for _ in range(3):
        with pytest.raises(RemoteLogMetadataError, match=str(IN_MEMORY_TOPIC_ID)):
            await round_after(missing, task, delay_ms)
    assert missing.metadata.written == written
    assert len(await missing.objects()) == 6


async def test_nothing_is_deleted_or_recorded_while_the_metadata_is_suspended(missing: Workbench) -> None:
    """The metadata topic was deleted and created again, so no member owns a partition."""
    await missing.metadata.put_topic_deletion(TOPIC_ID, "orders")
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    written, (delay_ms, _) = missing.metadata.written, delays(missing)
    missing.metadata.owned = False
    assert await rounds_for(missing, task, 3 * delay_ms, delay_ms) == 0
    assert missing.metadata.written == written
    assert len(await missing.objects()) == 6


async def test_the_days_are_the_brokers(missing: Workbench) -> None:
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    _, unproved_ms = delays(missing)
    await until_recorded(missing, task)
    missing.metadata.missing[TOPIC_ID] += 30_000
    missing.metadata.skew_ms = 30_000
    assert await rounds_for(missing, task, unproved_ms - HOUR_MS, HOUR_MS) == 0
    assert await round_after(missing, task, HOUR_MS - 1) == 0
    assert await round_after(missing, task, 1) == 1


async def test_clocks_that_differ_record_and_delete_nothing(missing: Workbench) -> None:
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    _, unproved_ms = delays(missing)
    missing.metadata.skew_ms = -8 * DAY_MS
    await task.run()
    await round_after(missing, task, SECOND_MS)
    assert missing.metadata.missing == {}
    assert missing.metric("remote_log_alarms_total", topic="orders", reason="clock-skew") == 1
    assert missing.active("clock-skew") == 1
    missing.metadata.skew_ms = 0
    await round_after(missing, task, SECOND_MS)
    assert missing.metadata.missing == {TOPIC_ID: missing.wall_ms}
    assert missing.active("clock-skew") == 0
    # Our own clock is set ahead.
    missing.wall_ms += unproved_ms
    missing.metadata.skew_ms = -unproved_ms
    assert await rounds_for(missing, task, DAY_MS, HOUR_MS) == 0
    assert missing.active("clock-skew") == 1
    missing.wall_ms -= unproved_ms
    missing.metadata.skew_ms = 0
    assert await round_after(missing, task, HOUR_MS) == 0
    assert missing.active("clock-skew") == 0, "no topic is due any more, and the clocks are asked all the same"
    # The brokers' is, and was not measured since.
    missing.metadata.skew_ms, missing.metadata.true_skew_ms = 0, unproved_ms
    missing.metadata.missing[TOPIC_ID] -= unproved_ms
    assert await rounds_for(missing, task, DAY_MS, HOUR_MS) == 0
    assert len(await missing.objects()) == 6


@pytest.mark.parametrize("end", ["topic returns", "ownership ends"])
async def test_the_alarms_of_a_missing_topic_end_with_it(missing: Workbench, end: str) -> None:
    await put_segments(missing, partition=OTHER)
    existence = Existence(TOPIC_ID, OTHER.topic_id)
    task = TopicDeletionTask(missing.services, existence)
    await until_recorded(missing, task)
    assert missing.active("topics-missing") == 1
    missing.metadata.missing.clear()
    missing.metadata.skew_ms = -8 * DAY_MS
    await round_after(missing, task, SECOND_MS)
    assert missing.active("clock-skew") == 1
    missing.metadata.missing = {TOPIC_ID: missing.wall_ms, OTHER.topic_id: missing.wall_ms}
    await round_after(missing, task, SECOND_MS)
    assert [missing.active(reason) for reason in ("topics-missing", "clock-skew")] == [1, 1]
    if end == "topic returns":
        existence.deleted.clear()
    else:
        missing.metadata.owned = False
    await round_after(missing, task, SECOND_MS)
    assert [missing.active(reason) for reason in ("topics-missing", "clock-skew")] == [0, 0]


async def test_the_records_of_a_topic_end_when_nothing_of_it_is_left(missing: Workbench) -> None:
    delay_ms, unproved_ms = delays(missing)
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    await until_recorded(missing, task)
    await missing.metadata.put_topic_deletion(TOPIC_ID, "orders")
    assert await rounds_for(missing, task, delay_ms, delay_ms) == 1
    await round_after(missing, task, SECOND_MS)
    await round_after(missing, task, delay_ms - 1)
    assert set(missing.metadata.missing) == missing.metadata.deleted_topics == {TOPIC_ID}
    # A restart only delays.
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    await task.run()
    await round_after(missing, task, delay_ms)
    assert (missing.metadata.missing, missing.metadata.deleted_topics) == ({}, set())
    written = missing.metadata.written
    assert await rounds_for(missing, task, unproved_ms, DAY_MS) == 0
    assert missing.metadata.written == written


async def test_the_owner_of_partition_0_writes_and_every_owner_acts(
    missing: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = replace(PARTITION, partition=1)
    await put_segments(missing, 1, second)
    owned: set[TopicIdPartition] = {second}
    monkeypatch.setattr(missing.metadata, "owns", lambda partition: partition in owned)
    _, unproved_ms = delays(missing)
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    assert await rounds_for(missing, task, 2 * unproved_ms, DAY_MS) == 0
    assert missing.metadata.missing == {}

    owned = {PARTITION}
    existence = Existence(TOPIC_ID)
    await until_recorded(missing, TopicDeletionTask(missing.services, existence))
    assert existence.asked == {TOPIC_ID, IN_MEMORY_TOPIC_ID}
    owned = {second}
    assert await rounds_for(missing, task, unproved_ms, HOUR_MS) == 1
    assert [each.partition for each in missing.metadata.partitions()] == [0]


async def test_partition_0_itself_need_not_be_remote(missing: Workbench) -> None:
    only = TopicIdPartition(OTHER.topic_id, 5, "payments")
    await put_segments(missing, 1, only)
    task = TopicDeletionTask(missing.services, Existence(only.topic_id))
    _, unproved_ms = delays(missing)
    await until_recorded(missing, task)
    assert await rounds_for(missing, task, unproved_ms, HOUR_MS) == 1
    assert missing.metadata.partitions() == [PARTITION]


async def test_settings_are_forgotten_by_the_same_proof(bench: Workbench) -> None:
    delay_ms, unproved_ms = delays(bench)
    for topic in (PARTITION, OTHER):
        await bench.metadata.change_topic_tier_config(topic.topic_id, topic.topic, {"remote.storage.enable": "true"})
    existence = Existence(TOPIC_ID)
    task = TopicDeletionTask(bench.services, existence)
    await until_recorded(bench, task)
    await rounds_for(bench, task, unproved_ms - HOUR_MS, HOUR_MS)
    assert bench.metadata.topic_tier_config(TOPIC_ID)
    await round_after(bench, task, HOUR_MS)
    assert not bench.metadata.topic_tier_config(TOPIC_ID)

    await bench.metadata.put_topic_deletion(OTHER.topic_id, OTHER.topic)
    existence.deleted.add(OTHER.topic_id)
    await task.run()
    assert bench.metadata.topic_tier_config(OTHER.topic_id)
    await round_after(bench, task, delay_ms)
    assert bench.metadata.tier_configs == {}


async def test_a_sighting_that_cannot_be_recorded_stops_no_proved_deletion(two_missing: Workbench) -> None:
    bench, (delay_ms, _) = two_missing, delays(two_missing)
    await bench.metadata.put_topic_deletion(OTHER.topic_id, OTHER.topic)
    task = TopicDeletionTask(bench.services, Existence(TOPIC_ID, OTHER.topic_id))

    async def refuse(*args: object, **options: object) -> None:
        raise RemoteLogMetadataError("no")

    bench.metadata.put_topic_missing = refuse  # type: ignore[method-assign]  # a fault
    await task.run()
    with pytest.raises(RemoteLogMetadataError):
        await round_after(bench, task, delay_ms)
    assert [each.topic for each in bench.metadata.partitions()] == ["orders"]


async def test_an_unread_record_may_be_that_of_a_topic_that_vanished_too(missing: Workbench) -> None:
    """Its metadata partition is read again from the start, or its leader does not answer since this process began."""
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    await until_recorded(missing, task)
    missing.metadata.knows_all_partitions = False
    _, unproved_ms = delays(missing)
    assert await rounds_for(missing, task, 2 * unproved_ms, HOUR_MS) == 0
    assert len(await missing.objects()) == 6
    missing.metadata.knows_all_partitions = True
    assert await round_after(missing, task, SECOND_MS) == 1


async def test_an_unread_record_may_still_need_a_confirmed_topic(missing: Workbench) -> None:
    """The record of the confirmed topic shows that another one did not go missing alone."""
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    await until_recorded(missing, task)
    await missing.metadata.put_topic_deletion(TOPIC_ID, "orders")
    delay_ms, _ = delays(missing)
    missing.metadata.knows_all_partitions = False
    await rounds_for(missing, task, 4 * delay_ms, delay_ms)
    assert await missing.objects() == []
    assert missing.metadata.missing.keys() == {TOPIC_ID}
    missing.metadata.knows_all_partitions = True
    await round_after(missing, task, delay_ms)
    assert missing.metadata.missing == {}
