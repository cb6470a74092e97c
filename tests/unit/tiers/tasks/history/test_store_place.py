"""A store that has nothing of what was copied may be another place: nothing is copied to it."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.versioned_storage import VersionedStorage
from tests.support.tiers import segment_metadata
from tests.support.tiers.attempts import begun
from tests.support.tiers.manifests import KEEP_NOTHING, KEY, CountingStorage, Manifests, copied
from tests.support.tiers.workbench import PARTITION, Workbench
from tiers.config.settings import StorageConfig
from tiers.config.storage_registry import create_storage
from tiers.errors import (
    MetadataLostError,
    RemoteLogMetadataNotReadyError,
    RemoteStorageError,
    RetriableRemoteStorageError,
)
from tiers.model.ids import TopicIdPartition
from tiers.storage.locations import LocatedRemoteStorageManager, decode_location
from tiers.storage.object_key import partition_manifest_key
from tiers.storage.remote_storage_manager import Version
from tiers.tasks.history.partition_manifest import PartitionManifestTask
from tiers.tasks.history.store_place import StorePlace


async def test_a_store_without_manifest_and_segments_may_be_another_place(manifests: Manifests) -> None:
    """Copies would go where no other process reads them."""
    bench = manifests.bench
    await copied(bench)
    await manifests.round()
    await manifests.storage.delete_object(KEY)
    for gone in bench.segments[:-1]:
        await manifests.storage.delete_log_segment_data(gone)
    manifests.new_owner()
    assert await manifests.round() == ["get", "get", "put"], "the store has a segment, so the manifest was lost"
    await manifests.storage.delete_object(KEY)
    await manifests.storage.delete_log_segment_data(bench.segments[-1])
    manifests.new_owner()
    for _ in range(2):
        with pytest.raises(MetadataLostError, match="does \\[storage\\] name another place"):
            await manifests.round()
    await bench.accept()
    await manifests.round()
    assert (await manifests.stored()).segments != ()


async def test_no_new_partition_is_copied_into_a_folder_without_its_mount(manifests: Manifests, tmp_path: Path) -> None:
    """The copies would be hidden when the file system is mounted again, and the brokers' records trimmed."""
    await copied(manifests.bench)
    await manifests.round()
    new = TopicIdPartition(UUID(int=2), 0, "new")
    (tmp_path / "mount-point").mkdir()
    unmounted = CountingStorage(tmp_path / "mount-point")
    await unmounted.open()
    services = replace(manifests.services, storage=unmounted, place=StorePlace())
    for _ in range(2):
        with pytest.raises(RemoteStorageError, match="neither the manifests nor the oldest segments of orders"):
            await PartitionManifestTask(services, new).check()
    assert [found async for found in unmounted.list_objects("")] == []
    await unmounted.close()

    await manifests.storage.delete_object(KEY)
    services = replace(manifests.services, place=StorePlace())
    await PartitionManifestTask(services, new).check()  # a segment of another partition is enough
    assert await manifests.storage.get_object(partition_manifest_key("cluster", new))


async def test_topics_whose_objects_are_gone_keep_no_new_partition_out_for_ever(manifests: Manifests) -> None:
    """An operator may have deleted the objects of topics that no owner works on any more."""
    await manifests.bench.check_manifest()
    await copied(manifests.bench)
    await manifests.round()
    for index in range(5):
        gone = segment_metadata.segment(TopicIdPartition(UUID(int=0), index, "gone"), 0, 9)
        await segment_metadata.copied(manifests.bench.metadata, gone)
    new = TopicIdPartition(UUID(int=2), 0, "new")
    with pytest.raises(RemoteStorageError, match="gone-0, gone-1, gone-2, which were copied"):
        await PartitionManifestTask(manifests.services, new).check()
    await PartitionManifestTask(manifests.services, new).check()
    assert await manifests.storage.get_object(partition_manifest_key("cluster", new))


async def test_a_segment_in_another_location_does_not_show_that_home_is_mounted(
    manifests: Manifests, tmp_path: Path
) -> None:
    """The new partition's first manifest goes home, and so may its copies."""
    for name in ("east", "mount-point"):
        (tmp_path / name).mkdir()
    east = {"name": "east", "path": str(tmp_path / "east")}

    def store(home: str) -> LocatedRemoteStorageManager:
        config = {"implementation": "local", "path": str(tmp_path / home), "locations": [east]}
        return create_storage(StorageConfig.model_validate(config), "cluster")

    mounted, unmounted = store("remote"), store("mount-point")
    await mounted.open()
    await unmounted.open()
    bench = manifests.bench
    bench.services = replace(bench.services, storage=mounted)
    bench.restart()
    await bench.check_manifest()
    await copied(bench)
    assert {decode_location(each.custom_metadata)[0] for each in bench.segments} == {"east"}
    new = TopicIdPartition(UUID(int=2), 0, "new")
    services = replace(bench.services, storage=unmounted, place=StorePlace())
    for _ in range(2):
        with pytest.raises(RemoteStorageError, match="neither the manifests nor the oldest segments of orders"):
            await PartitionManifestTask(services, new).check()
    services = replace(bench.services, place=StorePlace())
    await PartitionManifestTask(services, new).check()
    for each in (mounted, unmounted):
        await each.close()


async def unmounted(bench: Workbench) -> None:
    """Another folder takes the place of the store's. Its subfolder for temporary files is of an earlier start."""
    root = bench.folder / "remote"
    root.rename(bench.folder / "mounted")
    (root / ".tmp").mkdir(parents=True)


def mounted_again(bench: Workbench) -> None:
    shutil.rmtree(bench.folder / "remote")
    (bench.folder / "mounted").rename(bench.folder / "remote")


async def test_no_copy_counts_after_the_file_system_was_unmounted(bench: Workbench) -> None:
    """The partition stops until the store has its manifest again. The brokers keep all records."""
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10)))
    await bench.check_manifest()
    await bench.copy_all()
    await bench.write_manifest()
    known = bench.finished
    await unmounted(bench)
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10, 20)))
    with pytest.raises(MetadataLostError, match="does \\[storage\\] name another place"):
        await bench.copy_all()
    bench.now_ms += 60_000
    with pytest.raises(MetadataLostError, match="does \\[storage\\] name another place"):
        await bench.trim_task.run(KEEP_NOTHING, 0)
    for _ in range(2):
        with pytest.raises(MetadataLostError, match="does \\[storage\\] name another place"):
            await bench.check_manifest()
    assert bench.finished == known
    assert bench.log.trims == []
    mounted_again(bench)
    await bench.check_manifest()
    await bench.copy_all()
    assert len(bench.finished) > len(known)


async def test_an_older_manifest_in_the_folder_below_shows_nothing(bench: Workbench) -> None:
    """A PUT of the manifest went there when the file system was unmounted the first time."""
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10)))
    await bench.check_manifest()
    older = await bench.store.get_object(KEY)
    await bench.copy_all()
    await bench.write_manifest()
    known = bench.finished
    await unmounted(bench)
    await bench.store.put_object(KEY, older)
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10, 20)))
    with pytest.raises(MetadataLostError, match="does \\[storage\\] name another place"):
        await bench.copy_all()
    for _ in range(2):
        with pytest.raises(MetadataLostError, match="does \\[storage\\] name another place"):
            await bench.check_manifest()
    assert bench.finished == known
    assert await bench.store.get_object(KEY) == older


class LosesAnswers(VersionedStorage):
    loses = False

    async def put_object(self, key: str, data: bytes, if_match: Version | None = None) -> Version | None:
        version = await super().put_object(key, data, if_match)
        if self.loses:
            raise RetriableRemoteStorageError("the store did not answer in time")
        return version


async def test_a_write_over_the_manifest_shows_the_place_without_an_answer(bench: Workbench, tmp_path: Path) -> None:
    """The partition has no segment that could show the place."""
    (tmp_path / "store").mkdir()
    storage = LosesAnswers(tmp_path / "store")
    await storage.open()
    await storage.probe()
    task = PartitionManifestTask(replace(bench.services, storage=storage), PARTITION)
    await task.check()
    await bench.record_log_start(0)
    storage.loses = True
    assert not await task.run()
    storage.loses = False
    await bench.record_log_start(5)
    assert await task.run()


async def test_no_attempt_is_finished_in_the_folder_below_that_has_its_objects(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file system is unmounted between the two looks at the place of the store."""
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10)))
    await bench.check_manifest()
    await begun(bench, 0, 30)
    places = iter([None, RemoteStorageError("not mounted")])

    async def check_place() -> None:
        if error := next(places, None):
            raise error

    monkeypatch.setattr(bench.attempts, "_check_place", check_place)
    bounds = await bench.log.bounds(PARTITION, 1000)
    assert not await bench.attempts.run(bounds, None)
    assert bench.finished == []
    bench.now_ms += 60_000
    assert await bench.attempts.run(bounds, None)
    assert bench.finished == [(0, 29)]


async def test_no_first_copy_goes_into_a_folder_that_was_unmounted_since(manifests: Manifests) -> None:
    """The store was the right place for an earlier new partition. Now it has nothing of any partition."""
    await copied(manifests.bench)
    await manifests.round()
    first, second = (TopicIdPartition(UUID(int=number), 0, "new") for number in (2, 3))
    await PartitionManifestTask(manifests.services, first).check()
    await unmounted(manifests.bench)
    with pytest.raises(RemoteStorageError, match="neither the manifests nor the oldest segments of orders"):
        await PartitionManifestTask(manifests.services, second).check()
    assert [found async for found in manifests.storage.list_objects("")] == []


async def test_an_unread_metadata_partition_may_know_copies(manifests: Manifests) -> None:
    """So a store without any object may be another place, and gets no first manifest yet."""
    manifests.bench.metadata.knows_all_partitions = False
    with pytest.raises(RemoteLogMetadataNotReadyError, match="whether any partition was copied"):
        await manifests.task.check()
    assert [found async for found in manifests.storage.list_objects("")] == []
    manifests.bench.metadata.knows_all_partitions = True
    await manifests.task.check()
    assert (await manifests.stored()).segments == ()


async def in_two_places(bench: Workbench) -> LocatedRemoteStorageManager:
    """Segments go to the location "east" until an operator gives it the weight 0."""
    (bench.folder / "east").mkdir(exist_ok=True)
    east = {"name": "east", "path": str(bench.folder / "east"), "weight": int(not bench.segments)}
    config = {"implementation": "local", "path": str(bench.folder / "remote"), "locations": [east]}
    store = create_storage(StorageConfig.model_validate(config), "cluster")
    await store.open()
    bench.services = replace(bench.services, storage=store)
    bench.restart()
    return store


async def test_no_copy_counts_in_an_unmounted_home_with_old_segments_elsewhere(bench: Workbench) -> None:
    """The oldest segments are in a location that is still there. New ones go home."""
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10)))
    first = await in_two_places(bench)
    await bench.check_manifest()
    await bench.copy_all()
    await bench.write_manifest()
    known = bench.finished
    second = await in_two_places(bench)
    await bench.check_manifest()
    await unmounted(bench)
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10, 20)))
    with pytest.raises(RemoteStorageError, match="is it not mounted"):
        await bench.copy_all()
    bench.restart()
    with pytest.raises(RemoteStorageError, match="is it not mounted"):
        await bench.check_manifest()
    assert bench.finished == known
    mounted_again(bench)
    await bench.check_manifest()
    await bench.copy_all()
    assert len(bench.finished) > len(known)
    for each in (first, second):
        await each.close()


async def test_no_copy_counts_after_an_unmount_without_a_known_manifest(bench: Workbench) -> None:
    """The manifest is not readable, so the oldest segments show whether the store is still the right place."""
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10)))
    await bench.check_manifest()
    await bench.copy_all()
    await bench.store.put_object(KEY, b"damaged")
    bench.restart()
    await bench.check_manifest()
    known = bench.finished
    await unmounted(bench)
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10, 20)))
    with pytest.raises(MetadataLostError, match="does \\[storage\\] name another place"):
        await bench.copy_all()
    assert bench.finished == known


async def test_no_copy_counts_that_the_next_mount_hides(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system is mounted again right after the objects were written. They are in the folder below."""
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10)))
    await bench.check_manifest()
    await bench.copy_all()
    await bench.write_manifest()
    known = bench.finished
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10, 20)))
    await unmounted(bench)
    check = bench.manifest_task.require_stored

    async def mounted_meanwhile() -> None:
        if (bench.folder / "mounted").exists():
            mounted_again(bench)
        await check()

    monkeypatch.setattr(bench.attempts, "_check_place", mounted_meanwhile)
    with pytest.raises(RemoteStorageError):
        await bench.copy_all()
    assert bench.finished == known
    hidden = {each.segment_id for each in bench.segments if each.start_offset == 90}
    for _ in range(3):
        with suppress(RetriableRemoteStorageError):
            await bench.copy_all()
        bench.now_ms += 60_000
    assert sorted(bench.finished)[: len(known) + 1] == [*known, (90, 119)]
    assert not hidden & {each.segment_id for each in bench.segments}, "the folder below has no segment that counts"
