"""What every `RemoteLogMetadataManager` promises.

The implementations are the topic-based one on a real Kafka, the SQLite one of `docs/examples`, and the two of the unit
tests."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from uuid import UUID, uuid4

import pytest

from tests.support.rigs.metadata_managers import TIMEOUT_MS
from tests.support.tiers.segment_metadata import copied, segment, to
from tests.support.tiers.waiting import until
from tiers.errors import InvalidTransitionError, RemoteLogMetadataNotReadyError
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import Cut, RemotePartitionDeleteMetadata
from tiers.model.segment_metadata import RemoteLogSegmentState as State
from tiers.model.segment_metadata import RemotePartitionDeleteState as DeleteState


async def test_nothing_is_known_of_a_partition_without_metadata(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    await manager.log.ensure_fresh(partition, 1000, 60_000)
    assert manager.log.is_fresh(partition, 60_000)
    assert manager.state.remote_log_segment_metadata(partition, 0) is None
    assert manager.state.next_segment(partition, 0) is None
    assert list(manager.state.list_remote_log_segments(partition)) == []
    assert manager.state.earliest_offset(partition) is None
    assert manager.state.remote_end_offset(partition) is None
    assert manager.state.log_start_offset(partition) is None
    assert manager.state.remote_partition_delete_state(partition) is None
    assert not manager.state.is_tiered(partition.topic_id)
    assert partition not in manager.state.partitions()


async def test_a_write_is_read_as_soon_as_it_returns(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    before_ms = time.time_ns() // 1_000_000
    first = segment(partition, 0, 99, epoch=2)
    await manager.add_remote_log_segment_metadata(first)
    assert manager.state.remote_log_segment_metadata(partition, 5) is None
    assert manager.state.seen_at_ms(first.segment_id) is None
    [listed] = manager.state.list_remote_log_segments(partition)
    assert listed == replace(first, event_timestamp_ms=listed.event_timestamp_ms)
    assert listed.event_timestamp_ms >= before_ms
    assert listed.topic_id_partition.topic == "orders"

    await manager.update_remote_log_segment_metadata(
        replace(to(first, State.COPY_SEGMENT_FINISHED), custom_metadata=b"where")
    )
    found = manager.state.remote_log_segment_metadata(partition, 99)
    assert found is not None
    assert found.custom_metadata == b"where"
    assert manager.state.remote_log_segment_metadata_by_id(first.segment_id) == found
    assert manager.state.seen_at_ms(first.segment_id) is not None
    assert (manager.state.earliest_offset(partition), manager.state.remote_end_offset(partition)) == (0, 99)
    assert manager.state.is_tiered(partition.topic_id)
    assert partition in manager.state.partitions()


async def test_a_segment_lives_through_its_states(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    first = await copied(manager, segment(partition, 0, 99))
    second = await copied(manager, segment(partition, 100, 199))
    await manager.update_remote_log_segment_metadata(to(first, State.DELETE_SEGMENT_STARTED))
    assert manager.state.remote_log_segment_metadata(partition, 50) is None
    assert manager.state.next_segment(partition, 50) == manager.state.remote_log_segment_metadata(partition, 100)
    assert manager.state.earliest_offset(partition) == 100
    assert len(list(manager.state.list_remote_log_segments(partition))) == 2

    await manager.update_remote_log_segment_metadata(to(first, State.DELETE_SEGMENT_FINISHED))
    assert manager.state.remote_log_segment_metadata_by_id(first.segment_id) is None
    listed = [each.segment_id for each in manager.state.list_remote_log_segments(partition)]
    assert listed == [second.segment_id]


async def test_segments_are_listed_by_start_offset(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    for start in (200, 0, 100):
        await manager.add_remote_log_segment_metadata(segment(partition, start, start + 99))
    starts = [each.start_offset for each in manager.state.list_remote_log_segments(partition)]
    assert starts == [0, 100, 200]
    assert [each.start_offset for each in manager.state.list_remote_log_segments(partition, 199)] == [100, 200]
    assert [each.start_offset for each in manager.state.list_remote_log_segments(partition, 200)] == [200]


async def test_writing_a_state_again_is_allowed(manager: RemoteLogMetadataManager, partition: TopicIdPartition) -> None:
    first = segment(partition, 0, 99)
    await manager.add_remote_log_segment_metadata(first)
    await manager.add_remote_log_segment_metadata(first)
    for _ in range(2):
        await manager.update_remote_log_segment_metadata(to(first, State.COPY_SEGMENT_FINISHED))
    assert manager.state.remote_end_offset(partition) == 99


async def test_impossible_moves_are_refused_and_not_written(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    first = segment(partition, 0, 99)
    with pytest.raises(InvalidTransitionError):
        await manager.update_remote_log_segment_metadata(to(first, State.COPY_SEGMENT_FINISHED))
    with pytest.raises(InvalidTransitionError):
        await manager.add_remote_log_segment_metadata(replace(first, state=State.COPY_SEGMENT_FINISHED))
    await copied(manager, first)
    for state in (State.COPY_SEGMENT_STARTED, State.DELETE_SEGMENT_FINISHED):
        with pytest.raises(InvalidTransitionError):
            await manager.update_remote_log_segment_metadata(to(first, state))
    with pytest.raises(InvalidTransitionError):
        await manager.add_remote_log_segment_metadata(first)
    assert manager.log.owns(partition)
    assert manager.state.remote_end_offset(partition) == 99


async def test_the_highest_log_start_counts_and_a_seen_one_deletes_nothing(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    await copied(manager, segment(partition, 10, 99))
    await manager.put_log_start(partition, LogStart(30, 0, LogStartReason.SEEN))
    assert (manager.state.log_start_offset(partition), manager.state.log_starts(partition)) == (10, [])
    raised = [LogStart(offset, 0, LogStartReason.USER) for offset in (50, 20, 50, 70)]
    for start, expected in zip(raised, (50, 50, 50, 70), strict=True):
        await manager.put_log_start(partition, start)
        assert manager.state.log_start_offset(partition) == expected
        assert manager.state.log_starts(partition)[0].offset == expected
    await manager.put_log_start(partition, LogStart(90, 0, LogStartReason.SEEN))
    assert manager.state.log_start_offset(partition) == 70


async def test_a_lower_log_start_counts_when_the_higher_one_ends(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    """The earlier one may be of another history."""
    old, new = LogStart(500, 2, LogStartReason.USER), LogStart(50, 3, LogStartReason.RETENTION)
    for start in (old, LogStart(40, 2, LogStartReason.USER), new, LogStart(45, 3, LogStartReason.USER)):
        await manager.put_log_start(partition, start)
        assert manager.state.log_start_offset(partition) == 500
    assert manager.state.log_starts(partition) == [old, new]
    await manager.end_log_start(partition, old)
    assert (manager.state.recorded_log_starts(partition), manager.state.log_start_offset(partition)) == ([new], 50)


async def test_a_log_start_that_its_check_refuses_is_not_recorded(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    def refuse() -> None:
        raise RemoteLogMetadataNotReadyError("changed")

    with pytest.raises(RemoteLogMetadataNotReadyError, match="changed"):
        await manager.put_log_start(partition, LogStart(50, 0, LogStartReason.RETENTION), check=refuse)
    assert manager.state.log_starts(partition) == []
    await manager.put_log_start(partition, LogStart(40, 0, LogStartReason.RETENTION), check=lambda: None)
    assert [start.offset for start in manager.state.log_starts(partition)] == [40]


async def test_a_users_highest_log_start_of_each_leader_epoch_stays(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    positions = (10, 1), (20, 1), (30, 2)
    first, second, third = (LogStart(*position, LogStartReason.USER) for position in positions)
    for start in (first, second, third):
        await manager.put_log_start(partition, start)
    assert manager.state.log_starts(partition) == [third, second]
    for offset, epoch in ((40, 3), (50, 4)):
        await manager.put_log_start(partition, LogStart(offset, epoch, LogStartReason.RETENTION))
    assert manager.state.log_starts(partition) == [LogStart(50, 4, LogStartReason.RETENTION), third, second]


async def test_a_segment_of_a_later_epoch_contradicts_a_log_start_above_it(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    start = LogStart(150, 2, LogStartReason.USER)
    await manager.put_log_start(partition, start)
    await copied(manager, segment(partition, 0, 99, epoch=2))
    assert manager.state.log_starts(partition) == [start]
    await copied(manager, segment(partition, 100, 199, epoch=3))
    assert manager.state.log_starts(partition) == []
    assert manager.state.log_start_offset(partition) == 0
    later = LogStart(120, 3, LogStartReason.USER)
    await manager.put_log_start(partition, later)
    assert manager.state.log_starts(partition) == [later]


async def test_gaps_are_kept_until_they_end(manager: RemoteLogMetadataManager, partition: TopicIdPartition) -> None:
    await copied(manager, segment(partition, 0, 99))
    first, second = LogGap(100, 150), LogGap(300, 400)
    await manager.put_log_gap(partition, LogGap(300, 350), 4)
    for gap in (second, first):
        await manager.put_log_gap(partition, gap, 4)
    assert manager.state.gaps(partition) == [first, second]
    assert [manager.state.gap_at(partition, offset) for offset in (99, 100, 149, 150)] == [None, first, first, None]
    assert (manager.state.log_start_offset(partition), manager.state.remote_end_offset(partition)) == (0, 99)
    await manager.end_log_gap(partition, first)
    assert manager.state.gaps(partition) == [second]
    await manager.end_log_gap(partition, second)
    assert manager.state.gaps(partition) == []
    assert manager.state.is_known(partition)


async def test_one_marker_of_a_location_is_announced_and_confirmed(manager: RemoteLogMetadataManager) -> None:
    assert manager.state.tier_marker("") is None
    for marker_id, is_confirmed in ((UUID(int=3), False), (UUID(int=4), True), (UUID(int=3), True)):
        await manager.put_tier_marker("", marker_id, is_confirmed=is_confirmed)
        known = manager.state.tier_marker("")
        assert known is not None
        assert known.marker_id == UUID(int=3)
        assert known.is_confirmed == (is_confirmed and marker_id == known.marker_id)
    assert manager.state.partitions() == []


async def test_what_was_lost_is_restored_and_what_is_known_stays(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    known, lost = segment(partition, 0, 9), segment(partition, 30, 39)
    await copied(manager, known)
    started = replace(known, state=State.COPY_SEGMENT_STARTED)
    start, trim = LogStart(5, 0, LogStartReason.USER), OffsetAndEpoch(7, 0)
    for _ in range(2):
        await manager.restore(
            partition,
            segments=[started, lost],
            cuts=[Cut(1, 35, 0)],
            gaps=[LogGap(10, 30)],
            log_starts=[start],
            local_log_start=trim,
        )
        states = {each.segment_id: each.state for each in manager.state.list_remote_log_segments(partition)}
        assert states == {
            known.segment_id: State.COPY_SEGMENT_FINISHED,
            lost.segment_id: State.COPY_SEGMENT_STARTED,
        }
        assert [(cut.leader_epoch, cut.offset) for cut in manager.state.cuts(partition)] == [(1, 35)]
        assert (manager.state.gaps(partition), manager.state.local_log_start(partition)) == ([LogGap(10, 30)], trim)
        assert manager.state.log_starts(partition) == [start]


async def test_a_read_position_is_confirmed_while_the_topic_has_it(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    before = manager.log.position(partition)
    await copied(manager, segment(partition, 0, 99))
    position = manager.log.position(partition)
    assert position.next_offset > before.next_offset
    assert position.topic_id == before.topic_id
    assert manager.log.topic_id in (None, position.topic_id)
    assert position.leader_epoch >= 0
    assert await manager.log.confirms(partition, position, TIMEOUT_MS)


async def test_a_partition_is_deleted_in_order_and_forgotten(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    def deletion(state: DeleteState) -> RemotePartitionDeleteMetadata:
        return RemotePartitionDeleteMetadata(partition, 1, 0, state)

    await copied(manager, segment(partition, 0, 99))
    await manager.put_log_start(partition, LogStart(5, 0, LogStartReason.USER))
    await manager.put_local_log_start(partition, OffsetAndEpoch(70, 0))
    await manager.put_log_gap(partition, LogGap(100, 110), 0)
    with pytest.raises(InvalidTransitionError):
        await manager.put_remote_partition_delete_metadata(deletion(DeleteState.DELETE_PARTITION_STARTED))
    for state in DeleteState:
        await manager.put_remote_partition_delete_metadata(deletion(state))
        assert manager.state.remote_partition_delete_state(partition) is state
    assert not manager.state.is_tiered(partition.topic_id)
    assert list(manager.state.list_remote_log_segments(partition)) == []
    assert (manager.state.log_start_offset(partition), manager.state.log_starts(partition)) == (None, [])
    assert (manager.state.local_log_start(partition), manager.state.gaps(partition)) == (None, [])
    assert not manager.state.is_known(partition)
    assert partition not in manager.state.partitions()


async def test_tier_settings_of_a_topic_are_changed_key_by_key_and_forgotten(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    topic_id = partition.topic_id
    assert manager.state.topic_tier_config(topic_id) == {}
    await manager.change_topic_tier_config(topic_id, "orders", {"remote.storage.enable": "true"})
    await manager.change_topic_tier_config(topic_id, "orders", {"local.retention.ms": "1000"})
    await manager.change_topic_tier_config(topic_id, "orders", {"local.retention.bytes": None})
    expected = {"remote.storage.enable": "true", "local.retention.ms": "1000"}
    assert manager.state.topic_tier_config(topic_id) == expected
    assert manager.state.topics_with_tier_config() == [TopicIdPartition(topic_id, 0, "orders")]
    assert manager.state.partitions() == []
    assert not manager.state.is_tiered(topic_id)
    await manager.change_topic_tier_config(topic_id, "orders", dict.fromkeys(expected))
    assert manager.state.topic_tier_config(topic_id) == {}
    assert manager.state.topics_with_tier_config() == []


async def test_a_missing_or_deleted_topic_is_recorded_and_ended(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    topic_id = partition.topic_id
    await until(lambda: manager.log.owns(replace(partition, partition=0)))
    assert (dict(manager.state.missing_topics()), manager.state.topic_deletions()) == ({}, {})
    await manager.put_topic_missing(topic_id, "orders", is_missing=True)
    since = dict(manager.state.missing_topics())
    assert since.keys() == {topic_id}
    assert abs(since[topic_id] - time.time_ns() // 1_000_000) < TIMEOUT_MS
    await manager.put_topic_missing(topic_id, "orders", is_missing=True)
    assert manager.state.missing_topics() == since
    for is_confirmed in (False, True):
        await manager.put_topic_deletion(topic_id, "orders", is_confirmed=is_confirmed)
        [(deleted, deletion)] = manager.state.topic_deletions().items()
        assert (deleted, deletion.is_confirmed) == (topic_id, is_confirmed)
        assert since[topic_id] <= deletion.event_timestamp_ms < since[topic_id] + TIMEOUT_MS
    assert manager.state.partitions() == []
    await manager.put_topic_missing(topic_id, "orders", is_missing=False)
    await manager.end_topic_deletion(topic_id)
    assert (dict(manager.state.missing_topics()), manager.state.topic_deletions()) == ({}, {})
    assert not manager.state.is_tiered(topic_id)


async def test_a_change_of_tier_settings_is_judged_by_what_is_there(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    topic_id = partition.topic_id
    seen: list[Mapping[str, str]] = []

    def refuse(before: Mapping[str, str]) -> None:
        raise ValueError(dict(before))

    await manager.change_topic_tier_config(topic_id, "orders", {"local.retention.ms": "1"}, seen.append)
    with pytest.raises(ValueError, match=r"local\.retention\.ms"):
        await manager.change_topic_tier_config(topic_id, "orders", {"local.retention.ms": "2"}, refuse)
    await manager.change_topic_tier_config(topic_id, "orders", {"local.retention.bytes": "3"}, seen.append)
    assert seen == [{}, {"local.retention.ms": "1"}]
    assert manager.state.topic_tier_config(topic_id) == {"local.retention.ms": "1", "local.retention.bytes": "3"}


async def test_a_copy_plan_announces_all_attempts_and_ends_when_none_is_left(
    manager: RemoteLogMetadataManager, partition: TopicIdPartition
) -> None:
    plan = CopyPlan(partition, "", 0, uuid4(), 2, 3, 3, (0, 50, 80))
    await manager.put_copy_plan(plan)
    assert [each.plan_id for each in manager.state.copy_plans(partition)] == [plan.plan_id]
    first, lost, second, never_begun = plan.announced()
    announced = list(manager.state.list_remote_log_segments(partition))
    assert {each.segment_id for each in announced} == {*plan.segment_ids()}
    assert {(each.start_offset, each.end_offset, each.state) for each in announced} == {
        (0, 49, State.COPY_SEGMENT_STARTED),
        (50, 79, State.COPY_SEGMENT_STARTED),
    }
    for each in (first, second):
        await copied(manager, replace(each, segment_size_bytes=1_000))
    await manager.update_remote_log_segment_metadata(to(lost, State.DELETE_SEGMENT_STARTED))
    with pytest.raises(InvalidTransitionError):
        await manager.end_copy_plan(plan)
    await manager.update_remote_log_segment_metadata(to(lost, State.DELETE_SEGMENT_FINISHED))
    assert manager.state.remote_log_segment_metadata_by_id(never_begun.segment_id) is not None
    await manager.end_copy_plan(plan)
    await manager.end_copy_plan(plan)
    assert manager.state.copy_plans(partition) == []
    listed = [each.segment_id for each in manager.state.list_remote_log_segments(partition)]
    assert listed == [first.segment_id, second.segment_id]
