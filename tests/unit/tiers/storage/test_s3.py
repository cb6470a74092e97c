"""The promises of S3 alone: the number of requests per operation, and the error for each failure."""

from __future__ import annotations

import asyncio
import os
import uuid
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.servers.breaking_relay import BreakingRelay
from tests.support.servers.versitygw import VersityGateway
from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError, RetriableRemoteStorageError
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.instrumented import InstrumentedRemoteStorageManager, RemoteStorageMetrics
from tiers.storage.locations import LocatedRemoteStorageManager
from tiers.storage.remote_storage_manager import LogSegmentData
from tiers.storage.s3.storage import S3RemoteStorageManager

PART_BYTES = 5 << 20
BUCKET = "s3-alone"

Copied = tuple[RemoteLogSegmentMetadata, LogSegmentData]


@asynccontextmanager
async def opened(
    server: VersityGateway, overrides: Mapping[str, str] | None = None
) -> AsyncIterator[S3RemoteStorageManager]:
    await server.create_bucket(BUCKET)
    settings = server.settings(BUCKET) | {"cluster.id": "c", "part.size": str(PART_BYTES)}
    manager = S3RemoteStorageManager(settings | dict(overrides or {}))
    await manager.open()
    try:
        yield manager
    finally:
        await manager.close()


def segment(folder: Path, value_bytes: int) -> Copied:
    built = build_segment(folder / str(uuid.uuid4()), [batch_of(0, 1, value_bytes=value_bytes)])
    metadata = metadata_of(built)
    return metadata, built.log_segment_data(metadata)


async def asked(server: VersityGateway, before: Counter[str]) -> dict[str, int]:
    return dict(server.operations(BUCKET) - before)


async def test_a_range_arrives_in_the_memory_that_was_given(s3: VersityGateway, tmp_path: Path) -> None:
    metadata, data = segment(tmp_path, 1000)
    given: list[bytearray] = []

    def allocate(length: int) -> memoryview:
        given.append(bytearray(length))
        return memoryview(given[-1])

    async with opened(s3) as manager:
        await manager.copy_log_segment_data(metadata, data)
        located = LocatedRemoteStorageManager(manager)
        store = InstrumentedRemoteStorageManager(located, "s3", RemoteStorageMetrics(CollectorRegistry()))
        store.use_memory(allocate)
        view = await store.fetch_log_segment(metadata, 3, 99)
        assert [view.obj] == given
        assert given == [bytearray(data.log_segment.read_bytes()[3:100])]
        await store.fetch_indexes(metadata)
        assert len(given) == 1
        await store.delete_log_segment_data(metadata)


async def test_requests_per_operation(s3: VersityGateway, tmp_path: Path) -> None:
    small, large = segment(tmp_path, 1000), segment(tmp_path, 2 * PART_BYTES)
    async with opened(s3) as manager:
        before = s3.operations(BUCKET)
        await manager.copy_log_segment_data(*small)
        assert await asked(s3, before) == {"PutObject": 2}

        before = s3.operations(BUCKET)
        await manager.copy_log_segment_data(*large)
        assert await asked(s3, before) == {
            "CreateMultipartUpload": 1,
            "UploadPart": 3,
            "CompleteMultipartUpload": 1,
            "PutObject": 1,
        }

        before = s3.operations(BUCKET)
        await manager.fetch_log_segment(large[0], 0, PART_BYTES)
        await manager.fetch_log_segment(large[0], PART_BYTES, 2 * PART_BYTES)
        await manager.fetch_indexes(large[0])
        assert await asked(s3, before) == {"GetObject": 3}

        before = s3.operations(BUCKET)
        assert await manager.delete_log_segment_data(small[0])
        assert await manager.delete_log_segment_data(large[0])
        assert await asked(s3, before) == {"HeadObject": 2, "DeleteObject": 4}

        before = s3.operations(BUCKET)
        async for _ in manager.list_objects(""):
            pass
        assert await asked(s3, before) == {"ListObjectsV2": 1}


async def test_an_object_that_is_there_is_never_written_over(s3: VersityGateway, tmp_path: Path) -> None:
    """Both paths of creation meet the object of the same attempt, and look at its size instead of replacing it."""
    async with opened(s3) as manager, s3.client() as client:
        for metadata, data in (segment(tmp_path, 1000), segment(tmp_path, 2 * PART_BYTES)):
            await manager.copy_log_segment_data(metadata, data)
            prefix = "".join([stored.key async for stored in manager.list_objects("") if stored.key.endswith(".log")])
            written = (await client.head_object(Bucket=BUCKET, Key=prefix))["LastModified"], prefix
            before = s3.operations(BUCKET)
            await manager.copy_log_segment_data(metadata, data)
            assert (await asked(s3, before))["HeadObject"] == 2
            assert ((await client.head_object(Bucket=BUCKET, Key=prefix))["LastModified"], prefix) == written
            await manager.delete_log_segment_data(metadata)
        assert await s3.uploads(BUCKET) == 0


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        ({"secret.access.key": "wrong"}, "secret.access.key"),
        ({"access.key.id": "nobody"}, "access.key.id"),
        ({"bucket": "no-such-bucket"}, "change `bucket`"),
    ],
)
async def test_refusals_name_the_setting_to_change(
    s3: VersityGateway, tmp_path: Path, overrides: dict[str, str], named: str
) -> None:
    metadata, data = segment(tmp_path, 1000)
    async with opened(s3, overrides) as manager:
        for call in (
            manager.check(),
            manager.copy_log_segment_data(metadata, data),
            manager.fetch_log_segment(metadata, 0, 9),
            manager.fetch_indexes(metadata),
            manager.get_object("manifest.json"),
            manager.put_object("manifest.json", b"{}"),
        ):
            with pytest.raises(RemoteStorageError) as raised:
                await call
            assert named in str(raised.value)
            assert not raised.value.retriable
            assert not isinstance(raised.value, RemoteResourceNotFoundError)
            assert "wrong" not in str(raised.value)


async def test_a_server_that_dies_in_the_middle_of_a_read(s3: VersityGateway, tmp_path: Path) -> None:
    metadata, data = segment(tmp_path, 2 * PART_BYTES)
    async with BreakingRelay(s3.port) as relay, opened(s3) as direct:
        await direct.copy_log_segment_data(metadata, data)
        async with opened(s3, {"endpoint.url": relay.url}) as manager:
            assert len(await manager.fetch_log_segment(metadata, 0, 99)) == 100
            relay.cut_after("down", PART_BYTES)
            with pytest.raises(RetriableRemoteStorageError):
                await manager.fetch_log_segment(metadata, 0, 1 << 40)
            with pytest.raises(RetriableRemoteStorageError):
                await manager.fetch_indexes(metadata)
        await direct.delete_log_segment_data(metadata)


async def test_a_server_that_dies_in_the_middle_of_a_copy(s3: VersityGateway, tmp_path: Path) -> None:
    """The abort cannot be delivered either: the parts wait in the store until the attempt is deleted."""
    metadata, data = segment(tmp_path, 4 * PART_BYTES)
    other = replace(metadata, segment_id=RemoteLogSegmentId(metadata.topic_id_partition, uuid.uuid4()))
    async with (
        BreakingRelay(s3.port) as relay,
        opened(s3) as direct,
        opened(s3, {"endpoint.url": relay.url}) as manager,
    ):
        relay.cut_after("up", 3 * PART_BYTES)
        with pytest.raises(RetriableRemoteStorageError):
            await manager.copy_log_segment_data(metadata, data)
        assert await s3.uploads(BUCKET) == 1
        with pytest.raises(RemoteResourceNotFoundError):
            await direct.fetch_log_segment(metadata, 0, 0)
        assert await direct.delete_log_segment_data(other)
        assert await s3.uploads(BUCKET) == 1
        assert await direct.delete_log_segment_data(metadata)
        assert await s3.uploads(BUCKET) == 0


async def test_unfinished_uploads_are_listed_and_aborted_once_or_twice(s3: VersityGateway) -> None:
    async with opened(s3, {"prefix": "uploads"}) as manager, s3.client() as client:
        keys = ["a.log", "a.log", "b.log"]
        for key in keys:
            await client.create_multipart_upload(Bucket=BUCKET, Key=f"uploads/{key}")
        found = [upload async for upload in manager.list_uploads()]
        assert sorted(upload.key for upload in found) == keys
        assert all(upload.started_ms is not None and upload.started_ms > 1_700_000_000_000 for upload in found)
        for upload in (*found, *found):
            await manager.abort_upload(upload)
        assert [upload async for upload in manager.list_uploads()] == []


async def test_a_second_page_of_uploads_begins_after_the_last_of_the_first(
    s3: VersityGateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Answers as S3 gives them: versitygw 1.8 refuses the marker that it gave itself."""
    markers: list[tuple[object, object]] = []

    async def answer(operation: str, key: str, **parameters: Any) -> dict[str, Any]:
        markers.append((parameters.get("KeyMarker"), parameters.get("UploadIdMarker")))
        one = {"Uploads": [{"Key": "b", "UploadId": "2"}]}
        two = {"Uploads": [{"Key": "a", "UploadId": "1"}], "IsTruncated": True}
        return one if len(markers) > 1 else two | {"NextKeyMarker": "a", "NextUploadIdMarker": "1"}

    async with opened(s3) as manager:
        monkeypatch.setattr(manager._up, "call", answer)
        assert [(upload.key, upload.id) async for upload in manager.list_uploads()] == [("a", "1"), ("b", "2")]
    assert markers == [(None, None), ("a", "1")]


async def test_a_copy_that_is_cancelled_takes_its_parts_back(s3: VersityGateway, tmp_path: Path) -> None:
    metadata, data = segment(tmp_path, 4 * PART_BYTES)
    async with (
        BreakingRelay(s3.port) as relay,
        opened(s3, {"endpoint.url": relay.url}) as manager,
        asyncio.TaskGroup() as group,
    ):
        relay.hold_after("up", PART_BYTES)
        copying = group.create_task(manager.copy_log_segment_data(metadata, data))
        await relay.reached.wait()
        assert await s3.uploads(BUCKET) == 1
        copying.cancel()
        with pytest.raises(asyncio.CancelledError):
            await copying
        assert await s3.uploads(BUCKET) == 0


async def test_a_server_that_answers_nothing_meets_the_deadline(s3: VersityGateway, tmp_path: Path) -> None:
    metadata, data = segment(tmp_path, 1000)
    async with opened(s3) as direct:
        await direct.copy_log_segment_data(metadata, data)
    async with (
        BreakingRelay(s3.port) as relay,
        opened(s3, {"endpoint.url": relay.url, "timeout.ms": "200"}) as manager,
    ):
        relay.hold_all()
        for call in (
            manager.fetch_log_segment(metadata, 0, 9),
            manager.put_object("manifest.json", b"{}"),
            manager.delete_log_segment_data(metadata),
        ):
            with pytest.raises(RetriableRemoteStorageError):
                await call


async def test_a_server_that_is_not_there_is_retriable(s3: VersityGateway, tmp_path: Path) -> None:
    metadata, data = segment(tmp_path, 1000)
    async with BreakingRelay(s3.port) as relay:
        url = relay.url
    async with opened(s3, {"endpoint.url": url}) as manager:
        for call in (manager.fetch_indexes(metadata), manager.copy_log_segment_data(metadata, data), manager.check()):
            with pytest.raises(RetriableRemoteStorageError):
                await call


async def test_objects_survive_a_killed_server(tmp_path: Path) -> None:
    metadata, data = segment(tmp_path, 1000)
    with VersityGateway() as server:
        async with opened(server) as manager:
            await manager.copy_log_segment_data(metadata, data)
            server.kill()
            with pytest.raises(RetriableRemoteStorageError):
                await manager.fetch_indexes(metadata)
            server.start()
            assert await manager.fetch_indexes(metadata) == data.indexes


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"cluster.id": "c"}, "'bucket'"),
        ({"bucket": "b"}, "'cluster.id'"),
        ({"bucket": "b", "cluster.id": "a/b"}, "cluster id"),
        ({"bucket": "b", "cluster.id": "c", "endpoint": "http://s"}, "did you mean endpoint.url"),
        ({"bucket": "b", "cluster.id": "c", "access.key.id": "a"}, "belong together"),
        ({"bucket": "b", "cluster.id": "c", "part.size": "4MiB"}, "below 5242880"),
        ({"bucket": "b", "cluster.id": "c", "part.size": "big"}, "number of bytes"),
        ({"bucket": "b", "cluster.id": "c", "path.style": "maybe"}, "true or false"),
    ],
)
def test_settings_that_cannot_work_are_named(settings: dict[str, str], named: str) -> None:
    with pytest.raises(ValueError, match=named):
        S3RemoteStorageManager(settings)


async def test_an_endpoint_that_is_no_url_is_named() -> None:
    manager = S3RemoteStorageManager({"bucket": "b", "cluster.id": "c", "endpoint.url": "nonsense", "region": "r"})
    with pytest.raises(RemoteStorageError, match=r"endpoint\.url"):
        await manager.open()
    await manager.close()


async def test_a_segment_file_that_shrinks_during_its_upload_is_named(
    s3: VersityGateway, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    metadata, data = segment(tmp_path, 1000)
    read = os.pread
    async with opened(s3) as manager:
        monkeypatch.setattr(os, "pread", lambda descriptor, length, start: read(descriptor, length - 1, start))
        with pytest.raises(RemoteStorageError, match="the segment to copy ends at"):
            await manager.copy_log_segment_data(metadata, data)
