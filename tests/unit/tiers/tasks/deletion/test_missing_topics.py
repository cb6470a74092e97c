"""Topics that no broker knows: absence proves no deletion, and a request to delete a topic proves none alone."""

from __future__ import annotations

import logging
from dataclasses import replace
from uuid import UUID

import pytest

from tests.support.fakes.in_memory_rlmm import IN_MEMORY_TOPIC_ID
from tests.support.tiers.interposed import refuse
from tests.support.tiers.topic_deletion_bench import Existence, put_segments, round_after, rounds_for
from tests.support.tiers.workbench import PARTITION, Workbench
from tiers.errors import RemoteLogMetadataError
from tiers.model.ids import TopicIdPartition
from tiers.tasks.deletion.topic_deletion import TopicDeletionTask

SECOND_MS, HOUR_MS, DAY_MS = 1_000, 3_600_000, 86_400_000
TOPIC_ID = PARTITION.topic_id
OTHER = TopicIdPartition(UUID(int=2), 0, "payments")


@pytest.fixture
async def missing(bench: Workbench) -> Workbench:
    """Three segments of a topic of which nothing is recorded."""
    await put_segments(bench)
    return bench


def delay_of(bench: Workbench) -> int:
    return bench.services.settings.remote_log.topic_deletion_delay_ms


async def until_recorded(bench: Workbench, task: TopicDeletionTask) -> None:
    """The first answers of the brokers record nothing."""
    before = dict(bench.metadata.missing)
    assert await task.run() == 0
    assert bench.metadata.missing == before
    assert await round_after(bench, task, SECOND_MS) == 0
    assert bench.metadata.missing != before


async def test_absence_deletes_nothing_however_long_it_lasts(
    missing: Workbench, caplog: pytest.LogCaptureFixture
) -> None:
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    with caplog.at_level(logging.ERROR, "tiers.tasks.deletion.topic_deletion"):
        await until_recorded(missing, task)
        assert missing.metadata.missing == {TOPIC_ID: missing.wall_ms}
        assert await rounds_for(missing, task, 30 * DAY_MS, 6 * HOUR_MS) == 0
    assert [each.__dict__["id"] for each in caplog.records] == [str(TOPIC_ID)]
    assert len(await missing.objects()) == 6
    assert missing.metadata.deletions == {}


@pytest.mark.parametrize("end", ["topic returns", "ownership ends", "deletion is confirmed"])
async def test_the_alarm_of_a_missing_topic_ends_with_it(missing: Workbench, end: str) -> None:
    existence = Existence(TOPIC_ID)
    task = TopicDeletionTask(missing.services, existence)
    await until_recorded(missing, task)
    assert missing.active("topics-missing") == 1
    if end == "topic returns":
        existence.deleted.clear()
    elif end == "ownership ends":
        missing.metadata.owned = False
    else:
        await missing.metadata.put_topic_deletion(TOPIC_ID, "orders", is_confirmed=True)
    await round_after(missing, task, SECOND_MS)
    assert missing.active("topics-missing") == 0
    assert missing.metric("remote_log_alarms_total", topic="orders", reason="topics-missing") == 1


@pytest.mark.parametrize("missing_after_ms", [2 * SECOND_MS, HOUR_MS])
async def test_a_request_and_brokers_that_lack_the_topic_are_a_proof(missing: Workbench, missing_after_ms: int) -> None:
    """The answer to the request never came, and the owner of the topic may be a later one."""
    existence, delay_ms = Existence(), delay_of(missing)
    await missing.metadata.put_topic_deletion(TOPIC_ID, "orders", is_confirmed=False)
    await TopicDeletionTask(missing.services, existence).run()
    existence.deleted = {TOPIC_ID}
    task = TopicDeletionTask(missing.services, existence)
    await round_after(missing, task, missing_after_ms - SECOND_MS)
    await round_after(missing, task, SECOND_MS)
    assert (len(missing.metadata.missing), missing.active("topics-missing")) == (1, 0)
    assert await round_after(missing, task, delay_ms - SECOND_MS - 1) == 0
    assert await round_after(missing, task, 1) == 1
    assert await missing.objects() == []


@pytest.mark.parametrize("missing_after_ms", [-SECOND_MS, HOUR_MS + 1, 2 * DAY_MS])
async def test_a_topic_that_is_missing_for_another_reason_stays(missing: Workbench, missing_after_ms: int) -> None:
    """The brokers refused the request, and all proxies ended. The topic was missing before, or is much later."""
    await missing.metadata.put_topic_deletion(TOPIC_ID, "orders", is_confirmed=False)
    missing.wall_ms += missing_after_ms - SECOND_MS
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    await until_recorded(missing, task)
    assert await rounds_for(missing, task, 7 * DAY_MS, DAY_MS) == 0
    assert missing.active("topics-missing") == 1
    assert len(await missing.objects()) == 6


async def test_a_second_request_has_the_whole_delay_again(missing: Workbench) -> None:
    task, delay_ms = TopicDeletionTask(missing.services, Existence()), delay_of(missing)
    await missing.metadata.put_topic_deletion(TOPIC_ID, "orders", is_confirmed=False)
    await task.run()
    await round_after(missing, task, delay_ms - 1)
    await missing.metadata.put_topic_deletion(TOPIC_ID, "orders", is_confirmed=False)
    await round_after(missing, task, 1)
    await round_after(missing, task, delay_ms - 1)
    assert missing.state.topic_deletions().keys() == {TOPIC_ID}
    await round_after(missing, task, 1)
    assert missing.state.topic_deletions() == {}


async def test_nothing_is_deleted_while_no_broker_knows_the_metadata_topic(missing: Workbench) -> None:
    """Its id changed: the metadata is of other brokers, or of another time. Later, no member owns a partition."""
    await missing.metadata.put_topic_deletion(TOPIC_ID, "orders", is_confirmed=True)
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID, IN_MEMORY_TOPIC_ID))
    written, delay_ms = missing.metadata.written, delay_of(missing)
    for _ in range(3):
        with pytest.raises(RemoteLogMetadataError, match=str(IN_MEMORY_TOPIC_ID)):
            await round_after(missing, task, delay_ms)
    missing.metadata.owned = False
    assert await rounds_for(missing, task, 3 * delay_ms, delay_ms) == 0
    assert missing.metadata.written == written
    assert len(await missing.objects()) == 6


async def test_the_records_of_a_topic_end_when_nothing_of_it_is_left(missing: Workbench) -> None:
    delay_ms = delay_of(missing)
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    await until_recorded(missing, task)
    await missing.metadata.put_topic_deletion(TOPIC_ID, "orders", is_confirmed=True)
    assert await rounds_for(missing, task, delay_ms, delay_ms) == 1
    await round_after(missing, task, SECOND_MS)
    await round_after(missing, task, delay_ms - 1)
    assert missing.metadata.missing.keys() == missing.state.topic_deletions().keys() == {TOPIC_ID}
    # A restart only delays.
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    await task.run()
    await round_after(missing, task, delay_ms)
    assert (missing.metadata.missing, missing.state.topic_deletions()) == ({}, {})
    written = missing.metadata.written
    assert await rounds_for(missing, task, 7 * DAY_MS, DAY_MS) == 0
    assert missing.metadata.written == written


async def test_the_owner_of_partition_0_writes_and_every_owner_acts(
    missing: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    second = replace(PARTITION, partition=1)
    await put_segments(missing, 1, second)
    owned: set[TopicIdPartition] = {second}
    monkeypatch.setattr(missing.metadata.log, "owns", lambda partition: partition in owned)
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    assert await rounds_for(missing, task, 7 * DAY_MS, DAY_MS) == 0
    assert missing.metadata.missing == {}

    owned = {PARTITION}
    existence = Existence(TOPIC_ID)
    await until_recorded(missing, TopicDeletionTask(missing.services, existence))
    assert existence.asked == {TOPIC_ID, IN_MEMORY_TOPIC_ID}
    await missing.metadata.put_topic_deletion(TOPIC_ID, "orders", is_confirmed=True)
    owned = {second}
    assert await round_after(missing, task, SECOND_MS) == 1
    assert [each.partition for each in missing.state.partitions()] == [0]


async def test_partition_0_itself_need_not_be_remote(missing: Workbench) -> None:
    only = TopicIdPartition(OTHER.topic_id, 5, "payments")
    await put_segments(missing, 1, only)
    task = TopicDeletionTask(missing.services, Existence(only.topic_id))
    await until_recorded(missing, task)
    await missing.metadata.put_topic_deletion(only.topic_id, only.topic, is_confirmed=True)
    assert await round_after(missing, task, delay_of(missing)) == 1
    assert missing.state.partitions() == [PARTITION]


async def test_settings_are_forgotten_by_the_same_proof(bench: Workbench) -> None:
    delay_ms = delay_of(bench)
    await bench.metadata.change_topic_tier_config(TOPIC_ID, "orders", {"remote.storage.enable": "true"})
    task = TopicDeletionTask(bench.services, Existence(TOPIC_ID))
    await bench.metadata.put_topic_deletion(TOPIC_ID, "orders", is_confirmed=True)
    await task.run()
    assert bench.state.topic_tier_config(TOPIC_ID)
    await round_after(bench, task, delay_ms)
    assert bench.metadata.tier_configs == {}


async def test_a_sighting_that_cannot_be_recorded_stops_no_proved_deletion(
    missing: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, delay_ms = missing, delay_of(missing)
    await put_segments(bench, 1, OTHER)
    await bench.metadata.put_topic_deletion(OTHER.topic_id, OTHER.topic, is_confirmed=True)
    task = TopicDeletionTask(bench.services, Existence(TOPIC_ID, OTHER.topic_id))
    refuse(monkeypatch, bench.metadata, "put_topic_missing", RemoteLogMetadataError("no"))
    await task.run()
    with pytest.raises(RemoteLogMetadataError):
        await round_after(bench, task, delay_ms)
    assert [each.topic for each in bench.state.partitions()] == ["orders"]


async def test_a_proof_stays_while_metadata_is_unread(missing: Workbench) -> None:
    """Segments of the topic may be in a metadata partition that this process has not read."""
    delay_ms = delay_of(missing)
    task = TopicDeletionTask(missing.services, Existence(TOPIC_ID))
    await missing.metadata.put_topic_deletion(TOPIC_ID, "orders", is_confirmed=True)
    missing.metadata.knows_all_partitions = False
    await rounds_for(missing, task, 4 * delay_ms, delay_ms)
    assert await missing.objects() == []
    assert missing.state.topic_deletions().keys() == {TOPIC_ID}
    missing.metadata.knows_all_partitions = True
    await round_after(missing, task, delay_ms)
    assert missing.state.topic_deletions() == {}
