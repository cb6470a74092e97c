"""What the owner tells the store about a partition, how often, and that nothing waits for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from tests.fakes.record_batches import batch_of
from tests.tiers.manager.workbench import PARTITION, Workbench, with_retention, workbench
from tiers.errors import MetadataLostError, OwnershipLostError, RetriableRemoteStorageError
from tiers.manager.partition_manifest import PartitionManifestTask
from tiers.manager.task_services import TaskServices
from tiers.metadata.partition_manifest import PartitionManifest, decode_partition_manifest
from tiers.metadata.remote_log_metadata_manager import MetadataPosition
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import RemoteLogClampUpdate
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.object_key import partition_manifest_key

KEY = partition_manifest_key("cluster", PARTITION)


async def copied(bench: Workbench) -> None:
    """Offsets 0 to 89 in three segments; ten more are only local."""
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10)))
    await bench.copy_all()


class CountingStorage(LocalRemoteStorageManager):
    """`asked` is every request for a small object, in order."""

    def __init__(self, root: Path) -> None:
        super().__init__({"path": str(root), "cluster.id": "cluster"})
        self.asked: list[str] = []
        self.fails = False

    async def put_object(self, key: str, data: bytes) -> None:
        self.asked.append(f"put {key}")
        if self.fails:
            raise RetriableRemoteStorageError("503")
        await super().put_object(key, data)

    async def get_object(self, key: str) -> bytes:
        self.asked.append(f"get {key}")
        return await super().get_object(key)


class Manifests:
    def __init__(self, bench: Workbench, storage: CountingStorage) -> None:
        self.bench, self.storage = bench, storage
        self.services: TaskServices = replace(bench.services, storage=storage)
        self.task = self.new_owner()

    def new_owner(self) -> PartitionManifestTask:
        self.task = PartitionManifestTask(self.services, PARTITION)
        return self.task

    async def round(self) -> list[str]:
        """What the end of a round asks the store."""
        before = len(self.storage.asked)
        await self.task.check(self.bench.log.log_start_offset)
        await self.task.run()
        return [one.split()[0] for one in self.storage.asked[before:]]

    async def stored(self) -> PartitionManifest:
        return decode_partition_manifest(await self.storage.get_object(KEY))


@pytest.fixture
async def manifests(tmp_path: Path) -> AsyncIterator[Manifests]:
    async with workbench(tmp_path) as bench:
        storage = CountingStorage(tmp_path / "remote")
        await storage.open()
        yield Manifests(bench, storage)
        await storage.close()


async def test_it_is_written_when_it_changes_and_only_then(manifests: Manifests) -> None:
    bench = manifests.bench
    assert await manifests.round() == ["get", "put"]
    await copied(bench)
    assert await manifests.round() == ["put"]
    assert await manifests.round() == []
    stored = await manifests.stored()
    assert stored.topic_id_partition.topic == "orders"
    assert [each.id for each in stored.segments] == [each.segment_id.id for each in bench.segments]
    assert (stored.log_start, stored.gaps, stored.dead) == (None, (), ())
    assert stored.position == bench.metadata.position(PARTITION)

    bench.metadata.tier_configs[PARTITION] = {"local.retention.ms": "7"}
    assert await manifests.round() == ["put"]
    assert (await manifests.stored()).tier_config == {"local.retention.ms": "7"}
    await bench.metadata.put_local_log_start(PARTITION, OffsetAndEpoch(1, 0))
    assert await manifests.round() == ["put"]
    await bench.metadata.put_log_gap(PARTITION, LogGap(90, 120), 0)
    assert await manifests.round() == ["put"]
    assert (await manifests.stored()).gaps == (LogGap(90, 120),)
    await bench.expire(with_retention(retention_bytes=0))
    assert await manifests.round() == ["put"]
    assert (await manifests.stored()).log_start == LogStart(90, 0, LogStartReason.RETENTION)


async def test_a_new_owner_reads_what_is_there_and_writes_nothing_that_is_said(manifests: Manifests) -> None:
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
    assert await manifests.round() == ["put"]


async def test_dead_segments_and_clamps_are_in_it(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    first, *others = bench.segments
    await bench.metadata.put_remote_log_clamp(RemoteLogClampUpdate(PARTITION, "", 0, 0, 9))
    failed = replace(
        first,
        segment_id=RemoteLogSegmentId(PARTITION, UUID(int=9)),
        state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
    )
    await bench.metadata.add_remote_log_segment_metadata(failed)
    await manifests.round()
    stored = await manifests.stored()
    assert [each.clamped_to for each in stored.segments] == [9] * (1 + len(others))
    assert stored.dead == (UUID(int=9),)


async def test_a_store_that_fails_is_one_alarm_and_is_asked_again(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    manifests.storage.fails = True
    assert (await manifests.round(), manifests.task.is_written) == (["get", "put"], False)
    assert await manifests.round() == ["put"]
    assert bench.metric("remote_log_alarms_total", topic="orders", reason="manifest") == 1
    manifests.storage.fails = False
    assert (await manifests.round(), manifests.task.is_written) == (["put"], True)
    assert await manifests.round() == []


def lose_metadata(bench: Workbench) -> None:
    bench.metadata.segments.clear()
    bench.metadata.recorded_log_starts.clear()


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
    with pytest.raises(MetadataLostError, match="lost some of them"):
        await manifests.round()


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
    assert await manifests.round() == ["get", "put"]
    assert (await manifests.stored()).position == rebuilt


async def test_an_operator_accepts_that_metadata_was_lost(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    await manifests.round()
    lose_metadata(bench)
    await bench.record_log_start(0)
    await bench.metadata.accept(PARTITION)
    manifests.new_owner()
    assert await manifests.round() == ["get", "put"]
    assert (await manifests.stored()).segments == ()


async def test_an_unfinished_copy_of_removed_records_waits_for_a_manifest(manifests: Manifests) -> None:
    """The manifest is gone. The copy may have been finished, and its last record lost."""
    bench = manifests.bench
    await copied(bench)
    newest = bench.segments[-1]
    bench.metadata.segments[newest.segment_id] = replace(newest, state=RemoteLogSegmentState.COPY_SEGMENT_STARTED)
    bench.log.log_start_offset = newest.end_offset + 1
    with pytest.raises(MetadataLostError, match="did not end"):
        await manifests.round()


async def test_a_manifest_that_cannot_be_read_is_replaced(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    await manifests.storage.put_object(KEY, b"torn")
    assert await manifests.round() == ["get", "put"]
    assert len((await manifests.stored()).segments) == 3


async def test_a_manifest_that_cannot_be_read_may_know_more_than_no_metadata(manifests: Manifests) -> None:
    await manifests.storage.put_object(KEY, b"torn")
    with pytest.raises(MetadataLostError, match="has no metadata"):
        await manifests.round()


async def test_what_was_deleted_as_it_should_be_may_be_forgotten(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    await manifests.round()
    for segment in bench.segments:
        await manifests.storage.delete_log_segment_data(segment)
    lose_metadata(bench)
    manifests.new_owner()
    assert await manifests.round() == ["get", "put"]
    bench.copy_task.start_over()
    await bench.copy_all()
    assert await manifests.round() == ["put"]


async def test_an_ownership_costs_one_look_at_the_manifest(manifests: Manifests) -> None:
    await copied(manifests.bench)
    for _ in range(2):
        await manifests.task.check(0)
    assert len(manifests.storage.asked) == 1


async def test_a_manifest_is_there_before_the_first_record(manifests: Manifests) -> None:
    """So metadata without a manifest is metadata whose manifest was lost."""
    assert await manifests.round() == ["get", "put"]
    assert (await manifests.stored()).segments == ()
    assert manifests.bench.metadata.partitions() == []
