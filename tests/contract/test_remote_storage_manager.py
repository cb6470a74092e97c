"""The contract of `RemoteStorageManager`, over every implementation and its real store."""

from __future__ import annotations

import asyncio
import os
import threading
import time
import uuid
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support.examples import install_example
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.servers.stores import CLUSTER_ID, opened, settings_of
from tests.support.tiers.waiting import until
from tiers.config.managers import create_storage
from tiers.config.settings import StorageConfig
from tiers.errors import (
    RemoteResourceNotFoundError,
    RemoteStorageError,
)
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage import arrow, file_system, hdfs
from tiers.storage.object_key import marker_key, partition_prefix
from tiers.storage.remote_storage_manager import LogSegmentData, RemoteStorageManager, check_by_an_object

PATIENCE_MS = "300000"


STORES = ["local", "s3", "gcs", "azure", "hdfs"]
LONG_LISTING = {"local": 1005, "s3": 1005, "hdfs": 45}
"""More than a page of what the store answers; pyarrow pages by itself."""
"""The stores that create atomically."""


@pytest.fixture(params=STORES)
def store(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    return name


@pytest.fixture
async def storage(store: str, request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[RemoteStorageManager]:
    settings = await settings_of(store, request, tmp_path)
    async with opened(store, settings | {"timeout.ms": PATIENCE_MS}) as manager:
        yield manager
        await manager.close()


Copied = tuple[RemoteLogSegmentMetadata, LogSegmentData]


@pytest.fixture(params=["small", "several parts"])
def segment(request: pytest.FixtureRequest, store: str, tmp_path: Path) -> Copied:
    """Big enough for three parts of a multipart upload or three pieces of a file, or for less than one."""
    value_bytes = 1000 if request.param == "small" else 16 << 20 if store == "s3" else 5 << 19
    built = build_segment(tmp_path / "log", [batch_of(0, 5), batch_of(5, 1, value_bytes=value_bytes)])
    metadata = metadata_of(built)
    return metadata, built.log_segment_data(metadata)


def other_attempt(metadata: RemoteLogSegmentMetadata) -> RemoteLogSegmentMetadata:
    return replace(metadata, segment_id=RemoteLogSegmentId(metadata.topic_id_partition, uuid.uuid4()))


async def keys(storage: RemoteStorageManager, prefix: str = "") -> list[str]:
    return [stored.key async for stored in storage.list_objects(prefix)]


async def test_a_usable_store_passes_its_check_and_keeps_nothing_of_it(storage: RemoteStorageManager) -> None:
    await check_by_an_object(storage)
    assert await keys(storage) == []


async def read_ranges(storage: RemoteStorageManager, metadata: RemoteLogSegmentMetadata, log: bytes) -> None:
    """Checks every kind of range of a copied segment."""
    size = len(log)
    for start in (0, 1, size // 2, size - 1, size, size + 1, 1 << 40):
        assert await storage.fetch_log_segment(metadata, start) == log[start:]
        assert await storage.fetch_log_segment(metadata, start, start) == log[start : start + 1]
    for start, end in ((0, size - 1), (3, 9), (size - 4, size + 100), (0, 1 << 40)):
        assert await storage.fetch_log_segment(metadata, start, end) == log[start : end + 1]
    for start, no_end in ((1, 0), (10, 3), (0, -1), (-1, 5), (-1, None)):
        with pytest.raises(ValueError, match="not a range"):
            await storage.fetch_log_segment(metadata, start, no_end)


async def test_a_copied_segment_is_read_back_by_ranges(storage: RemoteStorageManager, segment: Copied) -> None:
    """Ranges are inclusive, are clamped, and may have no end. The spool file may go once it is copied."""
    metadata, data = segment
    assert await storage.copy_log_segment_data(metadata, data) is None
    log = data.log_segment.read_bytes()
    data.log_segment.unlink()
    assert await storage.fetch_indexes(metadata) == data.indexes
    await read_ranges(storage, metadata, log)
    view = await storage.fetch_log_segment(metadata, 0, 9)
    if not view.readonly:  # the caller owns the buffer
        view[0] = view[0] ^ 0xFF
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(storage.fetch_log_segment(metadata, n, n + 99)) for n in range(0, 1000, 10)]
    assert [bytes(task.result()) for task in tasks] == [log[n : n + 100] for n in range(0, 1000, 10)]


@pytest.mark.parametrize("store", ["local"])
@pytest.mark.parametrize("kind", ["tape", "located"])
async def test_ranges_of_a_third_partys_store_and_of_a_location(
    kind: str, store: str, segment: Copied, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "east").mkdir()
    place = {"path": str(tmp_path), "locations": [{"name": "east", "path": str(tmp_path / "east")}]}
    config = {"implementation": "local", **place}
    if kind == "tape":
        install_example("tape-store", tmp_path / "site-packages")
        monkeypatch.syspath_prepend(str(tmp_path / "site-packages"))
        config = {"implementation": "tape", "folder": str(tmp_path / "east")}
    storage = create_storage(StorageConfig.model_validate(config), "c")
    await storage.open()
    metadata, data = segment
    metadata = replace(metadata, custom_metadata=await storage.copy_log_segment_data(metadata, data))
    await read_ranges(storage, metadata, data.log_segment.read_bytes())
    await storage.close()


async def test_a_second_copy_changes_nothing_and_with_other_data_is_refused(
    storage: RemoteStorageManager, segment: Copied, tmp_path: Path
) -> None:
    metadata, data = segment
    for _ in range(2):
        await storage.copy_log_segment_data(metadata, data)
    shorter = tmp_path / "shorter"
    shorter.write_bytes(data.log_segment.read_bytes()[:-1])
    with pytest.raises(RemoteStorageError, match="a uuid was used twice") as raised:
        await storage.copy_log_segment_data(metadata, replace(data, log_segment=shorter))
    assert not raised.value.retriable
    assert await storage.fetch_log_segment(metadata, 0, 1 << 40) == data.log_segment.read_bytes()
    assert await storage.fetch_indexes(metadata) == data.indexes
    assert len(await keys(storage)) == 2


async def test_attempts_live_side_by_side(storage: RemoteStorageManager, segment: Copied) -> None:
    metadata, data = segment
    other = other_attempt(metadata)
    await storage.copy_log_segment_data(metadata, data)
    await storage.copy_log_segment_data(other, data)
    assert await storage.delete_log_segment_data(other)
    assert await storage.fetch_indexes(metadata) == data.indexes
    with pytest.raises(RemoteResourceNotFoundError):
        await storage.fetch_indexes(other)


async def test_a_segment_file_that_is_gone_is_an_error_for_good(
    storage: RemoteStorageManager, segment: Copied, tmp_path: Path
) -> None:
    metadata, data = segment
    with pytest.raises(RemoteStorageError) as raised:
        await storage.copy_log_segment_data(metadata, replace(data, log_segment=tmp_path / "missing"))
    assert not raised.value.retriable
    assert await keys(storage) == []


async def test_a_missing_segment_is_not_found(storage: RemoteStorageManager, segment: Copied) -> None:
    metadata, _ = segment
    with pytest.raises(RemoteResourceNotFoundError):
        await storage.fetch_log_segment(metadata, 0, 0)
    with pytest.raises(RemoteResourceNotFoundError):
        await storage.fetch_indexes(metadata)
    with pytest.raises(RemoteResourceNotFoundError):
        await storage.get_object("no/such/object")


async def test_delete_is_idempotent_and_leaves_nothing(storage: RemoteStorageManager, segment: Copied) -> None:
    metadata, data = segment
    assert await storage.delete_log_segment_data(metadata)
    await storage.copy_log_segment_data(metadata, data)
    assert await storage.delete_log_segment_data(metadata)
    assert await storage.delete_log_segment_data(metadata)
    assert await keys(storage) == []
    with pytest.raises(RemoteResourceNotFoundError):
        await storage.fetch_log_segment(metadata, 0, 0)


async def test_a_small_object_is_written_replaced_and_deleted_twice(storage: RemoteStorageManager) -> None:
    key = marker_key(CLUSTER_ID)
    for content in (b"first", b"second", b""):
        await storage.put_object(key, content)
        assert await storage.get_object(key) == content
    await storage.put_object("other", b"stays")
    for _ in range(2):
        await storage.delete_object(key)
    with pytest.raises(RemoteResourceNotFoundError):
        await storage.get_object(key)
    assert await keys(storage) == ["other"]


async def test_a_listing_names_all_below_a_prefix_in_order(storage: RemoteStorageManager, segment: Copied) -> None:
    metadata, data = segment
    prefix = partition_prefix(CLUSTER_ID, metadata.topic_id_partition)
    now_ms = time.time_ns() // 1_000_000
    os.utime(data.log_segment, (0, 0))  # a segment may have been open for long
    await storage.copy_log_segment_data(metadata, data)
    await storage.put_object(prefix + "manifest.json", b"{}")
    neighbour = partition_prefix(CLUSTER_ID, replace(metadata.topic_id_partition, partition=4))
    await storage.put_object(neighbour + "manifest.json", b"{}")

    found = [stored async for stored in storage.list_objects(prefix)]
    assert [stored.key for stored in found] == sorted(stored.key for stored in found)
    sizes = sorted(stored.size_bytes for stored in found)
    assert sizes == sorted([2, len(data.indexes), data.log_segment.stat().st_size])
    assert all(stored.key.startswith(prefix) for stored in found)
    written = [stored.modified_ms for stored in found]
    # The times are the store's; those of S3 and Azure are whole seconds.
    assert all(each is not None and abs(each - now_ms) < 3_600_000 for each in written), written
    assert len(await keys(storage)) == 4
    # Beginnings that end amid the name of a folder.
    assert await keys(storage, prefix[:-3]) == [stored.key for stored in found]
    assert set(await keys(storage, prefix[:2])) >= {stored.key for stored in found}
    assert await keys(storage, "g") == []
    assert await keys(storage, "no/such/prefix/") == []


async def test_a_listing_of_more_than_a_page(store: str, storage: RemoteStorageManager) -> None:
    count = LONG_LISTING.get(store, 25)
    async with asyncio.TaskGroup() as group:
        for number in range(count):
            group.create_task(storage.put_object(f"many/{number:04d}", b""))
    assert await keys(storage, "many/") == [f"many/{number:04d}" for number in range(count)]


@pytest.mark.parametrize(
    ("store", "overrides", "named"),
    [
        ("local", {"path": "/no/such/folder"}, "change `path`"),
        ("arrow", {"uri": "file:///no/such/folder"}, "change `uri`"),
        ("s3", {"secret.access.key": "wrong"}, "the credentials come from `access.key.id` and `secret.access.key`"),
        ("s3", {"bucket": "no-such-bucket"}, "change `bucket`"),
        ("gcs", {"uri": "gs://no-such-bucket/prefix"}, "change `uri`"),
        ("azure", {"account.key": "d3Jvbmc="}, "the credentials come from `account.key`"),
        ("azure", {"uri": "az://no-such-container/prefix"}, "change `uri`"),
        ("hdfs", {"path": "/of/another"}, r"rights on `path`; the credentials come from .*\$HADOOP_USER_NAME"),
    ],
)
async def test_a_refusal_names_the_setting_to_change(
    store: str,
    overrides: dict[str, str],
    named: str,
    request: pytest.FixtureRequest,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = await settings_of(store, request, tmp_path)
    monkeypatch.setenv("HADOOP_USER_NAME", "nobody")
    with pytest.raises(RemoteStorageError, match=named) as raised:
        async with opened(store, settings | overrides) as manager:
            await check_by_an_object(manager)
    assert not raised.value.retriable
    assert "wrong" not in str(raised.value)
    assert "d3Jvbmc" not in str(raised.value)


@pytest.mark.parametrize("store", ["gcs", "azure", "hdfs"])
@pytest.mark.parametrize("written", ["a copy", "a replacement"])
async def test_a_write_that_is_cancelled_is_taken_back(
    store: str, written: str, request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a thread, which cannot be stopped. `local` and `s3` have tests of their own."""
    make = hdfs.in_this_process if store == "hdfs" else arrow.in_this_process
    calls = make(await settings_of(store, request, tmp_path) | {"cluster.id": CLUSTER_ID})
    storage = file_system.FileSystemRemoteStorageManager(calls)
    await storage.open()
    await storage.put_object("manifest", b"before")
    built = build_segment(tmp_path / "log", [batch_of(0, 1, value_bytes=5 << 19)])
    metadata = metadata_of(built)
    data = built.log_segment_data(metadata)
    halfway, resumed, loop = asyncio.Event(), threading.Event(), asyncio.get_running_loop()

    async def write() -> None:
        if written == "a copy":
            await storage.copy_log_segment_data(metadata, data)
        else:
            await storage.put_object("manifest", b"after")

    def hold(name: str) -> None:
        pieces_of = getattr(file_system, name)

        def held(*args: Any) -> Iterator[bytes]:
            pieces = pieces_of(*args)
            yield next(pieces)
            loop.call_soon_threadsafe(halfway.set)
            resumed.wait()
            yield from pieces

        monkeypatch.setattr(file_system, name, held)

    for name in ("_pieces_of", "_one_piece"):
        hold(name)
    async with asyncio.TaskGroup() as group:
        writing = group.create_task(write())
        await halfway.wait()
        assert await storage.get_object("manifest") == b"before"
        writing.cancel()
    assert calls.abandoned == 1
    resumed.set()
    await until(lambda: calls.abandoned == 0)
    assert (await keys(storage), await storage.get_object("manifest")) == (["manifest"], b"before")
    monkeypatch.undo()
    await write()
    if written == "a copy":
        assert await storage.fetch_log_segment(metadata, 0, 1 << 40) == data.log_segment.read_bytes()
    else:
        assert await storage.get_object("manifest") == b"after"
    await storage.close()
