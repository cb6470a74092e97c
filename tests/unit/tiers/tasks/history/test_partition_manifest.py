"""The content of a partition's manifest, the times of its PUTs, and that nothing waits for them."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.manifests import KEEP_NOTHING, KEY, Manifests, copied, trimmed
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench, with_retention
from tiers.config.paused_work import TierWork
from tiers.config.total_retention import RETENTION_MINUTES
from tiers.errors import (
    MetadataLostError,
    OwnershipLostError,
    RetriableRemoteStorageError,
)
from tiers.metadata.partition_manifest import (
    encode_partition_manifest,
)
from tiers.metadata.remote_log_metadata_manager import MetadataPosition
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.storage.remote_storage_manager import LogSegmentData
from tiers.storage.retries import with_retries
from tiers.tasks.deletion.segment_deletion import write_state
from tiers.tasks.history.partition_manifest import PartitionManifestTask
from tiers.tasks.history.stored_manifest import bury_manifest, manifest_of
from tiers.upkeep.bucket_scan import BucketScan
from tiers.upkeep.rebuild import judge_scan


async def test_it_is_written_when_it_changes_and_only_then(manifests: Manifests) -> None:
    bench = manifests.bench
    assert await manifests.round() == ["get", "get", "put"]
    await copied(bench)
    assert await manifests.round() == ["get", "put"]
    assert await manifests.round() == []
    stored = await manifests.stored()
    assert stored.topic_id_partition.topic == "orders"
    assert [each.id for each in stored.segments] == [each.segment_id.id for each in bench.segments]
    assert (stored.log_start, stored.gaps, stored.dead) == (None, (), ())
    assert stored.position == bench.metadata.position(PARTITION)

    bench.metadata.tier_configs[PARTITION] = {"local.retention.ms": "7"}
    assert await manifests.round() == ["get", "put"]
    assert (await manifests.stored()).tier_config == {"local.retention.ms": "7"}
    await bench.metadata.put_local_log_start(PARTITION, OffsetAndEpoch(1, 0))
    assert await manifests.round() == ["get", "put"]
    await bench.metadata.put_log_gap(PARTITION, LogGap(90, 120), 0)
    assert await manifests.round() == ["get", "put"]
    assert (await manifests.stored()).gaps == (LogGap(90, 120),)
    await bench.expire(with_retention(retention_bytes=0))
    assert await manifests.round() == ["get", "put"]
    assert (await manifests.stored()).log_start == LogStart(90, 0, LogStartReason.RETENTION, 0)


async def test_a_new_owner_reads_the_manifest_and_writes_only_changes(manifests: Manifests) -> None:
    await copied(manifests.bench)
    await manifests.round()
    manifests.new_owner()
    manifests.bench.metadata.written += 1  # of another partition
    assert await manifests.round() == ["get"]
    assert await manifests.round() == []
    await manifests.bench.record_log_start(1)
    manifests.bench.metadata.owned = False
    with pytest.raises(OwnershipLostError):
        await manifests.round()
    manifests.bench.metadata.owned = True
    assert await manifests.round() == ["get", "put"]


async def test_dead_segments_and_cuts_are_in_it(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    first, *others = bench.segments
    await bench.metadata.put_cut(PARTITION, 1, 10)
    unfinished = replace(
        first,
        segment_id=RemoteLogSegmentId(PARTITION, UUID(int=9)),
        state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
    )
    await bench.metadata.add_remote_log_segment_metadata(unfinished)
    await manifests.round()
    stored = await manifests.stored()
    assert [*stored.accepted().values()] == [10] * (1 + len(others))
    assert stored.dead == ()
    await write_state(bench.services, unfinished, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
    await manifests.round()
    assert (await manifests.stored()).dead == (UUID(int=9),)


async def test_a_copy_that_ends_after_the_manifest_is_rebuilt(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trim of a round writes the manifest while the copy of an earlier round is in progress."""
    bench = manifests.bench
    await copied(bench)
    await manifests.round()
    accepted, store = bench.finished, bench.services.storage
    copy = store.copy_log_segment_data

    async def beside_a_manifest(metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        custom_metadata = await copy(metadata, data)
        await bench.metadata.put_local_log_start(PARTITION, OffsetAndEpoch(1, 0))
        assert await manifests.round() == ["get", "put"]
        return custom_metadata

    monkeypatch.setattr(store, "copy_log_segment_data", beside_a_manifest)
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10, 14)))
    await bench.copy()
    assert bench.finished[:-1] == accepted
    scan = BucketScan("cluster")
    await scan.list(store)
    await scan.read(store, with_retries, 1)
    (plan,) = judge_scan(scan).plans
    assert ([(one.start_offset, one.end_offset) for one in plan.segments], plan.refused) == (bench.finished, [])


async def test_a_store_that_fails_is_one_alarm_and_is_asked_again(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    manifests.storage.fails = True
    assert (await manifests.round(), manifests.task.is_written) == (["get", "get", "put"], False)
    assert await manifests.round() == ["get", "put"]
    assert bench.metric("remote_log_alarms_total", topic="orders", reason="manifest") == 1
    assert bench.active("manifest") == 1
    manifests.storage.fails = False
    assert (await manifests.round(), manifests.task.is_written) == (["get", "put"], True)
    assert bench.active("manifest") == 0
    assert await manifests.round() == []


async def test_the_first_manifest_precedes_the_first_copy_after_a_failed_put(manifests: Manifests) -> None:
    """A proxy records a user's log start meanwhile."""
    bench = manifests.bench
    manifests.storage.fails = True
    with pytest.raises(RetriableRemoteStorageError):
        await manifests.round()
    await bench.record_log_start(0)
    manifests.storage.fails = False
    assert await manifests.round() == ["get", "get", "put"]
    assert (await manifests.stored()).log_start == LogStart(0, 0, LogStartReason.USER)


def lose_metadata(bench: Workbench) -> None:
    bench.metadata.segments.clear()
    bench.metadata.all_log_starts.clear()


async def test_lost_metadata_is_not_begun_anew_beside_the_segments(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    await manifests.round()
    known = await manifests.stored()
    lose_metadata(bench)
    manifests.new_owner()
    for _ in range(2):
        with pytest.raises(MetadataLostError, match=r"3 accepted segments .* rebuild"):
            await manifests.round()
    assert await manifests.stored() == known


async def test_one_missing_object_explains_no_other_lost_segment(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    await manifests.round()
    await manifests.storage.delete_log_segment_data(bench.segments[-1])
    lose_metadata(bench)
    manifests.new_owner()
    with pytest.raises(MetadataLostError, match="accepted segments"):
        await manifests.round()


async def test_a_finished_copy_whose_last_record_was_lost_is_no_leftover(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    await manifests.round()
    newest = bench.segments[-1]
    bench.metadata.segments[newest.segment_id] = replace(newest, state=RemoteLogSegmentState.COPY_SEGMENT_STARTED)
    manifests.new_owner()
    with pytest.raises(MetadataLostError, match="1 accepted segments"):
        await manifests.round()


async def test_a_metadata_topic_that_lost_records_stops_the_partition(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    await manifests.round()
    bench.metadata.is_position_confirmed = False
    manifests.new_owner()
    with pytest.raises(MetadataLostError, match="lost records since"):
        await manifests.round()


async def test_tier_settings_that_lost_records_stop_the_partition(manifests: Manifests) -> None:
    """The settings may be in another metadata partition than the segments, which lost nothing."""
    third, metadata = TopicIdPartition(PARTITION.topic_id, 3, "orders"), manifests.bench.metadata
    await metadata.change_topic_tier_config(PARTITION.topic_id, "orders", {RETENTION_MINUTES: "9"})
    await PartitionManifestTask(manifests.services, third).check(is_judging=False)
    metadata.unconfirmed.add(PARTITION)
    with pytest.raises(MetadataLostError, match="the metadata of orders-0 reached"):
        await PartitionManifestTask(manifests.services, third).check(is_judging=False)


async def test_the_position_in_another_metadata_topic_says_nothing(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = manifests.bench
    await copied(bench)
    await manifests.round()
    rebuilt = MetadataPosition(UUID(int=10), 0, 7)
    monkeypatch.setattr(bench.metadata, "position", lambda partition: rebuilt)
    bench.metadata.is_position_confirmed = False
    manifests.new_owner()
    assert await manifests.round() == ["get", "get", "put"]
    assert (await manifests.stored()).position == rebuilt


@pytest.mark.parametrize("restored", [{}, {RETENTION_MINUTES: "9"}])
async def test_another_metadata_topic_must_have_the_total_retention(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch, restored: dict[str, str]
) -> None:
    """`rebuild` restores it. An import of a flat file has only the segments."""
    bench = manifests.bench
    await bench.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", {RETENTION_MINUTES: "9"})
    await copied(bench)
    await manifests.round()
    bench.metadata.tier_configs = {PARTITION: restored}
    monkeypatch.setattr(bench.metadata, "position", lambda partition: MetadataPosition(UUID(int=10), 0, 7))
    manifests.new_owner()
    if restored:
        await manifests.round()
    else:
        with pytest.raises(MetadataLostError, match="lacks the total retention or a pause of orders"):
            await manifests.round()


@pytest.mark.parametrize("recorded", ["true", "false"])
async def test_another_metadata_topic_must_have_the_pauses(
    manifests: Manifests, monkeypatch: pytest.MonkeyPatch, recorded: str
) -> None:
    """Otherwise the expiry that an operator paused goes on after an import."""
    bench, key = manifests.bench, TierWork.EXPIRING.key
    await bench.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", {key: recorded})
    await copied(bench)
    await manifests.round()
    bench.metadata.tier_configs = {}
    monkeypatch.setattr(bench.metadata, "position", lambda partition: MetadataPosition(UUID(int=10), 0, 7))
    manifests.new_owner()
    if recorded == "true":
        with pytest.raises(MetadataLostError, match="lacks the total retention or a pause of orders"):
            await manifests.round()
        await bench.metadata.change_topic_tier_config(PARTITION.topic_id, "orders", {key: "true"})
    await manifests.round()


async def test_an_operator_accepts_that_metadata_was_lost(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    await manifests.round()
    lose_metadata(bench)
    await bench.record_log_start(0)
    await bench.accept()
    accepted = await bench.witness()
    manifests.new_owner()
    assert await manifests.round() == ["get", "get", "get", "put"]
    assert (await manifests.stored()).segments == ()
    assert bench.metadata.acceptance(PARTITION) == accepted
    await manifests.task.end_acceptance()
    assert bench.metadata.acceptance(PARTITION) is None
    assert await manifests.round() == []


async def test_an_acceptance_ends_after_another_manifest_is_written(manifests: Manifests) -> None:
    """Also if the manifest says the same: so the acceptance has no effect if the topic loses the record of its end."""
    bench = manifests.bench
    await copied(bench)
    await manifests.round()
    await bench.accept()
    accepted = await bench.witness()
    assert await manifests.round() == ["get"]
    manifests.storage.fails = True
    with pytest.raises(RetriableRemoteStorageError):
        await manifests.task.end_acceptance()
    assert bench.metadata.acceptance(PARTITION) == accepted
    manifests.storage.fails = False
    await manifests.task.end_acceptance()
    assert await bench.witness() != accepted

    await bench.metadata.accept(PARTITION, accepted)
    lose_metadata(bench)
    manifests.new_owner()
    with pytest.raises(MetadataLostError, match="accepted segments"):
        await manifests.round()
    assert bench.metadata.acceptance(PARTITION) is None


async def test_a_missing_manifest_can_be_accepted_once(manifests: Manifests) -> None:
    """A copy without a known end would stop the partition; the owner writes a manifest before the acceptance ends."""
    bench = manifests.bench
    await copied(bench)
    newest = bench.segments[-1]
    bench.metadata.segments[newest.segment_id] = replace(newest, state=RemoteLogSegmentState.COPY_SEGMENT_STARTED)
    bench.log.log_start_offset = newest.end_offset + 1
    await bench.accept()
    assert bench.metadata.acceptance(PARTITION) == "none"
    assert await manifests.round() == ["get", "get", "get", "put"]
    await manifests.task.end_acceptance()
    assert bench.metadata.acceptance(PARTITION) is None
    await bench.metadata.accept(PARTITION, "none")
    await manifests.round()
    assert not manifests.task.is_accepted


async def test_an_unreadable_manifest_can_be_accepted(manifests: Manifests) -> None:
    await manifests.storage.put_object(KEY, b"torn")
    await manifests.bench.accept()
    await manifests.storage.put_object(KEY, b"torn otherwise")
    with pytest.raises(MetadataLostError, match="has no metadata"):
        await manifests.round()
    await manifests.bench.accept()
    await manifests.round()
    await manifests.task.end_acceptance()
    assert (await manifests.stored()).segments == ()


async def test_a_trim_reads_the_manifest_back_and_no_other_round_does(trimmable: Manifests) -> None:
    assert await trimmed(trimmable, POLICY) == ([], None)
    assert await trimmed(trimmable, KEEP_NOTHING) == (["get"], 60)
    assert await trimmed(trimmable, KEEP_NOTHING) == ([], None)


@pytest.mark.parametrize("is_there", [True, False])
async def test_a_manifest_that_was_replaced_is_written_again_before_a_trim(
    trimmable: Manifests, is_there: bool
) -> None:
    """A former owner was stopped in the middle of a PUT."""
    bench, storage = trimmable.bench, trimmable.storage
    await storage.put_object(KEY, encode_partition_manifest(manifest_of(bench.metadata, "cluster", PARTITION)))
    old = await storage.get_object(KEY)
    trimmable.new_owner()
    bench.log.append(*(batch_of(100 + 10 * number, 10, value_bytes=15) for number in range(3)))
    await bench.copy_all()
    bench.now_ms += 60_000
    await trimmable.round()
    known = await storage.get_object(KEY)
    assert known != old
    await (storage.put_object(KEY, old) if is_there else storage.delete_object(KEY))
    assert await trimmed(trimmable, KEEP_NOTHING) == (["get", "get", "put"], 90)
    assert await storage.get_object(KEY) == known


async def test_nothing_is_trimmed_while_the_manifest_cannot_be_read_back(
    trimmable: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench, get_object = trimmable.bench, trimmable.storage.get_object
    await trimmable.round()

    async def fail(key: str) -> bytes:
        raise RetriableRemoteStorageError("503")

    monkeypatch.setattr(trimmable.storage, "get_object", fail)
    for _ in range(2):
        assert (await trimmed(trimmable, KEEP_NOTHING))[1] is None
    assert bench.log.trims == []
    assert bench.metadata.local_log_start(PARTITION) is None
    assert bench.metric("remote_log_alarms_total", topic="orders", reason="manifest") == 1
    assert bench.active("manifest") == 1
    monkeypatch.setattr(trimmable.storage, "get_object", get_object)
    await trimmable.round()
    assert bench.active("manifest") == 0, "also if nothing has to be trimmed any more"
    assert await trimmed(trimmable, KEEP_NOTHING) == (["get"], 60)


async def test_a_trim_does_not_hide_a_manifest_that_knows_more(trimmable: Manifests) -> None:
    bench = trimmable.bench
    await trimmable.round()
    more = await trimmable.storage.get_object(KEY)
    del bench.metadata.segments[bench.segments[-1].segment_id]
    await trimmable.storage.delete_object(KEY)
    trimmable.new_owner()
    await trimmable.round()
    await trimmable.storage.put_object(KEY, more)
    with pytest.raises(MetadataLostError, match="1 accepted segments"):
        await trimmed(trimmable, KEEP_NOTHING)
    assert bench.log.trims == []
    assert await trimmable.storage.get_object(KEY) == more


async def test_only_the_owner_buries_a_manifest(manifests: Manifests) -> None:
    """A member that lost its ownership meanwhile does not overwrite the new owner's manifest."""
    await copied(manifests.bench)
    await manifests.round()
    before = await manifests.stored()
    manifests.bench.metadata.owned = False
    with pytest.raises(OwnershipLostError):
        await bury_manifest(manifests.services, PARTITION)
    assert await manifests.stored() == before
    manifests.bench.metadata.owned = True
    await bury_manifest(manifests.services, PARTITION)
    assert (await manifests.stored()).segments == ()


async def test_it_has_the_highest_log_start(manifests: Manifests) -> None:
    bench = manifests.bench
    higher, later = LogStart(500, 2, LogStartReason.USER), LogStart(50, 3, LogStartReason.USER)
    await copied(bench)
    await bench.metadata.put_log_start(PARTITION, higher)
    await bench.metadata.put_log_start(PARTITION, later)
    await manifests.round()
    assert (await manifests.stored()).log_start == higher


async def test_a_log_start_of_an_earlier_epoch_explains_no_lost_segment(manifests: Manifests) -> None:
    """The segment was copied of another history than the one that the user's log start is of."""
    bench = manifests.bench
    bench.log.leader_epoch = 3
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15, leader_epoch=3) for number in range(10)))
    await bench.copy_all()
    await manifests.round()
    lose_metadata(bench)
    bench.metadata.epoch_bounds.clear()
    await bench.record_log_start(500, leader_epoch=2)
    manifests.new_owner()
    with pytest.raises(MetadataLostError, match="accepted segments"):
        await manifests.round()
    await bench.record_log_start(501, leader_epoch=3)
    await manifests.round()


async def test_a_manifest_that_cannot_be_read_is_replaced(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    await manifests.storage.put_object(KEY, b"torn")
    assert await manifests.round() == ["get", "get", "put"]
    assert len((await manifests.stored()).segments) == 3


async def test_a_manifest_that_cannot_be_read_may_know_more_than_no_metadata(manifests: Manifests) -> None:
    """Also when copying has gone on."""
    await manifests.storage.put_object(KEY, b"torn")
    with pytest.raises(MetadataLostError, match="has no metadata"):
        await manifests.round()
    await copied(manifests.bench)
    with pytest.raises(MetadataLostError, match="has no metadata"):
        await manifests.round()


async def test_deleted_segments_may_be_forgotten(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    await manifests.round()
    for segment in bench.segments:
        await manifests.storage.delete_log_segment_data(segment)
    lose_metadata(bench)
    manifests.new_owner()
    assert await manifests.round() == ["get", "get", "put"]
    bench.copy_task.start_over()
    await bench.copy_all()
    assert await manifests.round() == ["get", "put"]


async def test_an_ownership_costs_one_look_at_the_manifest(manifests: Manifests) -> None:
    await copied(manifests.bench)
    for _ in range(2):
        await manifests.task.check()
    assert len(manifests.storage.asked) == 1


async def test_a_manifest_is_there_before_the_first_record(manifests: Manifests) -> None:
    """So metadata without a manifest is metadata whose manifest was lost."""
    assert await manifests.round() == ["get", "get", "put"]
    assert (await manifests.stored()).segments == ()
    assert manifests.bench.metadata.partitions() == []
