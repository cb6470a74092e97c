"""The store has a manifest that another owner wrote: when the present owner may replace it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.tiers.manifests import KEEP_NOTHING, KEY, Manifests
from tests.support.tiers.workbench import PARTITION
from tiers.errors import (
    MetadataLostError,
    ObjectChangedError,
    RemoteLogMetadataNotReadyError,
)
from tiers.metadata.partition_manifest import (
    encode_partition_manifest,
)
from tiers.model.log_start import LogStart, LogStartReason
from tiers.storage.remote_storage_manager import Version, VersionedObject
from tiers.tasks.history.stored_manifest import bury_manifest, manifest_of
from tiers.tasks.retention.trim_task import TrimTask


async def put_of_another_owner(manifests: Manifests, ahead: int) -> bytes:
    """Puts a manifest that reflects `ahead` metadata records more than the present owner has read."""
    manifest = manifest_of(manifests.bench.metadata, "cluster", PARTITION)
    position = manifest.position._replace(next_offset=manifest.position.next_offset + ahead)
    content = encode_partition_manifest(replace(manifest, position=position))
    await manifests.storage.put_object(KEY, content)
    return content


async def test_a_manifest_that_reflects_a_later_offset_is_not_replaced(trimmable: Manifests) -> None:
    """There is a newer owner, or metadata was lost. This owner finds out, and neither writes nor trims."""
    await trimmable.round()
    newer = await put_of_another_owner(trimmable, 5)
    await trimmable.bench.record_log_start(1)
    with pytest.raises(RemoteLogMetadataNotReadyError, match="does not replace"):
        await trimmable.task.run()
    trim = TrimTask(trimmable.services, PARTITION, trimmable.task)
    with pytest.raises(RemoteLogMetadataNotReadyError, match="does not replace"):
        await trim.run(KEEP_NOTHING, 0)
    trimmable.bench.metadata.is_position_confirmed = False
    with pytest.raises(MetadataLostError, match="lost records since"):
        await trimmable.task.run()
    assert await trimmable.storage.get_object(KEY) == newer
    trimmable.bench.metadata.is_position_confirmed = True
    trimmable.bench.metadata.written += 5  # the records of other partitions, which the owner reads now
    assert await trimmable.task.run()
    assert (await trimmable.stored()).log_start == LogStart(1, 0, LogStartReason.USER)


async def test_a_late_manifest_is_replaced_after_a_takeover(trimmable: Manifests) -> None:
    """The PUT of a paused owner arrives after the first read of the next owner, which has nothing to write."""
    await trimmable.round()
    known = await trimmable.stored()
    trimmable.new_owner()
    assert await trimmable.round() == ["get"]
    old = replace(known, segments=known.segments[:1], position=known.position._replace(next_offset=1))
    await trimmable.storage.put_object(KEY, encode_partition_manifest(old))
    assert await trimmable.round() == []
    trimmable.bench.now_ms += trimmable.services.settings.remote_log.visible_after_ms
    assert await trimmable.round() == ["get", "get", "put"]
    assert (await trimmable.stored()).segments == known.segments
    assert await trimmable.round() == []


async def test_a_conditional_write_replaces_only_what_was_read(
    trimmable: Manifests, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A newer owner writes between this owner's GET and its PUT."""
    storage, version = trimmable.storage, 0
    put = storage.put_object

    async def put_if(key: str, data: bytes, if_match: Version | None = None) -> Version | None:
        nonlocal version
        if if_match is not None and if_match != str(version):
            raise ObjectChangedError(f"version {version}, not {if_match}")
        version += 1
        await put(key, data)
        return str(version)

    async def get_versioned(key: str) -> VersionedObject:
        found = VersionedObject(await storage.get_object(key), str(version))
        if version == raced_at:
            await put_of_another_owner(trimmable, 5)
        return found

    monkeypatch.setattr(storage, "put_object", put_if)
    monkeypatch.setattr(storage, "get_versioned", get_versioned)
    await put_of_another_owner(trimmable, 0)
    raced_at = version
    await trimmable.bench.record_log_start(1)
    with pytest.raises(RemoteLogMetadataNotReadyError, match="does not replace"):
        await trimmable.round()
    found = await trimmable.stored()
    assert found.is_later_than(trimmable.bench.metadata.position(PARTITION))


async def test_the_manifest_of_a_newer_owner_is_not_buried(trimmable: Manifests) -> None:
    newer = await put_of_another_owner(trimmable, 5)
    with pytest.raises(RemoteLogMetadataNotReadyError, match="newer owner"):
        await bury_manifest(trimmable.services, PARTITION)
    assert await trimmable.storage.get_object(KEY) == newer
