"""What the owner tells the store about a partition, how often, and that nothing waits for it."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from tests.fakes.record_batches import batch_of
from tests.tiers.manager.workbench import PARTITION, Workbench, with_retention, workbench
from tiers.errors import LogDivergedError, RetriableRemoteStorageError
from tiers.manager.partition_manifest import PartitionManifestTask
from tiers.manager.task_services import TaskServices
from tiers.metadata.partition_manifest import PartitionManifest, decode_partition_manifest
from tiers.model.ids import RemoteLogSegmentId
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
        self.services: TaskServices = replace(bench.services, storage=storage, cluster_id="cluster")
        self.task = self.new_owner()

    def new_owner(self) -> PartitionManifestTask:
        self.task = PartitionManifestTask(self.services, PARTITION)
        return self.task

    async def round(self) -> list[str]:
        """What the end of a round asks the store."""
        before = len(self.storage.asked)
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
    assert await manifests.round() == []
    await copied(bench)
    assert await manifests.round() == ["get", "put"]
    assert await manifests.round() == []
    stored = await manifests.stored()
    assert stored.topic_id_partition.topic == "orders"
    assert [each.id for each in stored.segments] == [each.segment_id.id for each in bench.segments]
    assert (stored.log_start_offset, stored.dead) == (0, ())

    bench.metadata.tier_configs[PARTITION] = {"local.retention.ms": "7"}
    assert await manifests.round() == ["put"]
    assert (await manifests.stored()).tier_config == {"local.retention.ms": "7"}
    await bench.metadata.raise_local_log_start_offset(PARTITION, 1)
    assert await manifests.round() == ["put"]
    await bench.expire(with_retention(retention_bytes=0))
    assert await manifests.round() == ["put"]
    assert (await manifests.stored()).log_start_offset == bench.metadata.log_start_offset(PARTITION) != 0


async def test_a_new_owner_reads_what_is_there_and_writes_nothing_that_is_said(manifests: Manifests) -> None:
    await copied(manifests.bench)
    await manifests.round()
    manifests.new_owner()
    assert await manifests.round() == ["get"]
    assert await manifests.round() == []
    manifests.bench.metadata.owned = False
    manifests.bench.metadata.log_starts[PARTITION] = 1
    assert await manifests.round() == []
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


async def test_a_log_start_that_nobody_recorded_is_not_in_it(manifests: Manifests) -> None:
    await copied(manifests.bench)
    manifests.bench.metadata.log_starts.clear()
    await manifests.round()
    assert (await manifests.stored()).log_start_offset is None


async def test_a_store_that_fails_is_one_alarm_and_is_asked_again(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    manifests.storage.fails = True
    assert await manifests.round() == ["get", "put"]
    assert await manifests.round() == ["get", "put"]
    assert bench.metric("remote_log_alarms_total", topic="orders", reason="manifest") == 1
    manifests.storage.fails = False
    assert await manifests.round() == ["get", "put"]
    assert await manifests.round() == []


async def lose_metadata(bench: Workbench) -> None:
    bench.metadata.segments.clear()
    bench.metadata.log_starts.clear()


async def test_lost_metadata_is_not_begun_anew_beside_the_segments(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    await manifests.round()
    known = await manifests.stored()
    await lose_metadata(bench)
    manifests.new_owner()
    for _ in range(2):
        with pytest.raises(LogDivergedError, match=r"3 accepted segments .* rebuild"):
            await manifests.task.check()
    # A process that knew nothing of it would have copied again.
    bench.copy_task.start_over()
    await bench.copy_all()
    await manifests.round()
    assert await manifests.stored() == known
    assert bench.metric("remote_log_alarms_total", topic="orders", reason="manifest") == 1


async def test_what_was_deleted_as_it_should_be_may_be_forgotten(manifests: Manifests) -> None:
    bench = manifests.bench
    await copied(bench)
    await manifests.round()
    for segment in bench.segments:
        await manifests.storage.delete_log_segment_data(segment)
    await lose_metadata(bench)
    manifests.new_owner()
    await manifests.task.check()
    bench.copy_task.start_over()
    await bench.copy_all()
    assert await manifests.round() == ["get", "put"]


async def test_the_check_costs_nothing_where_metadata_is_known(manifests: Manifests) -> None:
    await manifests.task.check()
    assert len(manifests.storage.asked) == 1
    await manifests.task.check()
    await copied(manifests.bench)
    manifests.new_owner()
    await manifests.task.check()
    assert len(manifests.storage.asked) == 1
