"""A store without the marker of the tier is another place: no copy counts there, and nothing is trimmed or deleted."""

from __future__ import annotations

import shutil
from contextlib import suppress
from dataclasses import replace
from uuid import UUID

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers import segment_metadata
from tests.support.tiers.workbench import Workbench, copied, with_retention
from tiers.errors import RemoteLogMetadataNotReadyError, RemoteStorageError, RetriableRemoteStorageError
from tiers.model.ids import TopicIdPartition
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.locations import HOME, LocatedRemoteStorageManager, StorageLocation
from tiers.storage.object_key import marker_key
from tiers.tasks.history.tier_place import TierPlace, missing_marker, read_marker, write_marker

KEY = marker_key("cluster")


async def without_marker(bench: Workbench) -> None:
    """As a new tier, or one whose metadata was rebuilt."""
    bench.metadata.markers.clear()
    await bench.store.delete_object(KEY)


async def require(bench: Workbench) -> None:
    await bench.services.place.require(bench.services)


def recorded(bench: Workbench) -> tuple[UUID, bool]:
    known = bench.state.tier_marker(HOME)
    assert known is not None
    return known.marker_id, known.is_confirmed


async def unmounted(bench: Workbench) -> None:
    """Another folder takes the place of the store's. Its subfolder for temporary files is of an earlier start."""
    root = bench.folder / "remote"
    root.rename(bench.folder / "mounted")
    (root / ".tmp").mkdir(parents=True)


def mounted_again(bench: Workbench) -> None:
    shutil.rmtree(bench.folder / "remote")
    (bench.folder / "mounted").rename(bench.folder / "remote")


async def test_the_first_process_announces_writes_and_confirms_the_marker(bench: Workbench) -> None:
    await without_marker(bench)
    await require(bench)
    assert bench.steps == ["marker-announced", "marker-written"]
    assert recorded(bench) == (await read_marker(bench.store, "cluster"), True)
    await require(bench)
    assert len(bench.steps) == 2


async def test_a_marker_that_was_announced_is_written_by_any_owner(bench: Workbench) -> None:
    await without_marker(bench)
    await bench.metadata.put_tier_marker(HOME, UUID(int=7), is_confirmed=False)
    await bench.store.put_object(KEY, b'{"version": 1, "clus')
    await require(bench)
    assert recorded(bench) == (UUID(int=7), True)
    assert await read_marker(bench.store, "cluster") == UUID(int=7)


async def test_new_metadata_takes_the_marker_that_the_store_has(bench: Workbench) -> None:
    marker_id, _ = recorded(bench)
    bench.metadata.markers.clear()
    assert await missing_marker(bench.store, bench.state, "cluster", HOME) is None
    await require(bench)
    assert recorded(bench) == (marker_id, True)
    assert await missing_marker(bench.store, bench.state, "cluster", HOME) is None
    await bench.store.delete_object(KEY)
    assert await missing_marker(bench.store, bench.state, "cluster", HOME) == marker_id
    await bench.store.put_object(KEY, f'{{"version": 2, "clusterId": "cluster", "id": "{marker_id}"}}'.encode())
    with pytest.raises(RemoteStorageError, match="of a later release"):
        await require(bench)


async def test_an_unread_metadata_partition_may_know_copies(bench: Workbench) -> None:
    """Or the metadata of the markers may be behind: another process has written one."""
    await without_marker(bench)
    bench.metadata.knows_all_partitions = False
    with pytest.raises(RemoteLogMetadataNotReadyError, match="unknown whether any partition was copied"):
        await require(bench)
    bench.metadata.fresh = False
    await bench.store.put_object(KEY, b"damaged")
    with pytest.raises(RemoteLogMetadataNotReadyError, match="not fresh"):
        await require(bench)
    assert bench.metadata.markers == {}


async def test_the_place_of_another_tier_is_refused(bench: Workbench) -> None:
    await write_marker(bench.store, "cluster", HOME, UUID(int=8))
    for _ in range(2):
        with pytest.raises(RemoteStorageError, match="the place of another tier"):
            await require(bench)
        with pytest.raises(RemoteStorageError, match="the place of another tier"):
            await missing_marker(bench.store, bench.state, "cluster", HOME)


async def test_a_place_without_the_segments_that_were_copied_gets_no_marker(bench: Workbench) -> None:
    """It asks for some of them each time: an operator may have deleted the objects of some topics."""
    for index in range(10):
        gone = segment_metadata.segment(TopicIdPartition(UUID(int=0), index, "gone"), 0, 9)
        await segment_metadata.copied(bench.metadata, gone)
    await copied(bench)
    await without_marker(bench)
    bench.services = replace(bench.services, place=TierPlace())
    with pytest.raises(RemoteStorageError, match="is it not mounted"):
        await require(bench)
    await require(bench)
    await without_marker(bench)
    await unmounted(bench)
    for _ in range(4):
        with pytest.raises(RemoteStorageError, match="is it not mounted"):
            await require(bench)
    assert await bench.objects() == []


async def test_no_copy_counts_after_the_file_system_was_unmounted(bench: Workbench) -> None:
    """The brokers keep all records until it is mounted again."""
    await copied(bench)
    known = bench.finished
    await unmounted(bench)
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10, 20)))
    with pytest.raises(RemoteStorageError, match=r"tier\.json"):
        await bench.copy_all()
    bench.now_ms += 60_000
    with pytest.raises(RemoteStorageError, match=r"tier\.json"):
        await bench.trim_task.run(with_retention(local_retention_bytes=0))
    for _ in range(2):
        with pytest.raises(RemoteStorageError, match=r"tier\.json"):
            await bench.check_facts()
    assert (bench.finished, bench.log.trims) == (known, [])
    mounted_again(bench)
    await bench.check_facts()
    await bench.copy_all()
    assert len(bench.finished) > len(known)


async def test_no_copy_counts_that_the_next_mount_hides(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The file system is mounted again right after the objects were written. They are in the folder below."""
    await copied(bench)
    known = bench.finished
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(10, 20)))
    await unmounted(bench)
    place, require = bench.services.place, bench.services.place.require

    async def mounted_meanwhile(services: object, segments: object) -> None:
        if (bench.folder / "mounted").exists():
            mounted_again(bench)
        await require(bench.services)

    monkeypatch.setattr(place, "require", mounted_meanwhile)
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


async def test_each_location_has_a_marker_of_its_own(bench: Workbench) -> None:
    """The broker keeps the records that are in a location which is not mounted."""
    folder = bench.folder / "east"
    folder.mkdir()
    east = LocalRemoteStorageManager({"path": str(folder), "cluster.id": "cluster"})
    await east.open()
    located = LocatedRemoteStorageManager(bench.store, [StorageLocation("east", east)])
    bench.services = replace(bench.services, storage=located)
    bench.restart()
    bench.log.append(*(batch_of(start, 10, value_bytes=15) for start in range(0, 70, 10)))
    await bench.check_facts()
    await bench.copy_all()
    assert bench.finished == [(0, 29), (30, 59)]
    assert (folder / "cluster" / "tier.east.json").is_file()
    folder.rename(bench.folder / "mounted")
    (folder / ".tmp").mkdir(parents=True)
    bench.log.append(*(batch_of(start, 10, value_bytes=15) for start in range(70, 160, 10)))
    with pytest.raises(RemoteStorageError, match=r"does not have the marker tier\.east\.json"):
        await bench.copy_all()
    assert bench.finished == [(0, 29), (30, 59)]
    bench.now_ms += 60_000
    with pytest.raises(RemoteStorageError, match=r"does not have the marker tier\.east\.json"):
        await bench.trim(with_retention(local_retention_bytes=0))
    assert bench.log.log_start_offset == 0
    await east.close()
