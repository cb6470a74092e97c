"""The promises of S3 alone: the number of requests per operation, uploads in parts, and slow links."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.fakes import copies
from tests.support.fakes.copies import other_attempt, segment_to_copy
from tests.support.servers.breaking_relay import BreakingRelay
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.throttling_relay import ThrottlingRelay
from tests.support.servers.versitygw import VersityGateway
from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError, RetriableRemoteStorageError
from tiers.storage.locations import LocatedRemoteStorageManager
from tiers.storage.s3.storage import S3RemoteStorageManager
from tiers.verify.read_back import read_back

PART_BYTES = 5 << 20
BUCKET = "s3-alone"
RATE = 8_000_000


@asynccontextmanager
async def opened(server: VersityGateway, **overrides: str) -> AsyncIterator[S3RemoteStorageManager]:
    """A setting's dots are underscores here."""
    await server.create_bucket(BUCKET)
    settings = server.settings(BUCKET) | {"cluster.id": "c", "part.size": str(PART_BYTES)}
    settings |= {name.replace("_", "."): value for name, value in overrides.items()}
    async with copies.opened(S3RemoteStorageManager(settings)) as manager:
        yield manager


async def asked(server: VersityGateway, *calls: Awaitable[object]) -> dict[str, int]:
    """Returns the numbers of the requests that the calls lead to."""
    before = server.operations(BUCKET)
    for call in calls:
        await call
    return dict(server.operations(BUCKET) - before)


async def test_a_range_arrives_in_the_memory_that_was_given(s3: VersityGateway, tmp_path: Path) -> None:
    metadata, data = segment_to_copy(tmp_path, 1000)
    given: list[bytearray] = []

    def allocate(length: int) -> memoryview:
        given.append(bytearray(length))
        return memoryview(given[-1])

    async with opened(s3) as manager:
        await manager.copy_log_segment_data(metadata, data)
        store = LocatedRemoteStorageManager(manager)
        store.use_memory(allocate)
        view = await store.fetch_log_segment(metadata, 3, 99)
        assert [view.obj] == given
        assert given == [bytearray(data.log_segment.read_bytes()[3:100])]
        await store.fetch_indexes(metadata)
        assert len(given) == 1
        await store.delete_log_segment_data(metadata)


async def listed(manager: S3RemoteStorageManager) -> list[str]:
    return [stored.key async for stored in manager.list_objects("")]


async def test_requests_per_operation(s3: VersityGateway, tmp_path: Path) -> None:
    small, large = segment_to_copy(tmp_path, 1000), segment_to_copy(tmp_path, 2 * PART_BYTES)
    async with opened(s3) as manager:
        multipart = {"CreateMultipartUpload": 1, "UploadPart": 2, "CompleteMultipartUpload": 1, "PutObject": 1}
        reads = (
            manager.fetch_log_segment(large[0], 0, PART_BYTES),
            manager.fetch_log_segment(large[0], PART_BYTES, 2 * PART_BYTES),
            manager.fetch_indexes(large[0]),
        )
        deletions = (manager.delete_log_segment_data(small[0]), manager.delete_log_segment_data(large[0]))
        assert await asked(s3, manager.copy_log_segment_data(*small)) == {"PutObject": 2}
        assert await asked(s3, manager.copy_log_segment_data(*large)) == multipart
        assert await asked(s3, *reads) == {"GetObject": 3}
        assert await asked(s3, *deletions) == {"HeadObject": 2, "DeleteObject": 4}
        assert await asked(s3, listed(manager)) == {"ListObjectsV2": 1}


@pytest.mark.full
async def test_a_server_that_dies_in_the_middle_of_a_copy(s3: VersityGateway, tmp_path: Path) -> None:
    """The abort cannot be delivered either: the parts wait in the store until the attempt is deleted."""
    metadata, data = segment_to_copy(tmp_path, 4 * PART_BYTES)
    async with (
        BreakingRelay(s3.port) as relay,
        opened(s3) as direct,
        opened(s3, endpoint_url=relay.url) as manager,
    ):
        relay.cut_after("up", 3 * PART_BYTES)
        with pytest.raises(RetriableRemoteStorageError):
            await manager.copy_log_segment_data(metadata, data)
        assert await s3.uploads(BUCKET) == 1
        with pytest.raises(RemoteResourceNotFoundError):
            await direct.fetch_log_segment(metadata, 0, 0)
        assert await direct.delete_log_segment_data(other_attempt(metadata))
        assert await s3.uploads(BUCKET) == 1
        assert await direct.delete_log_segment_data(metadata)
        assert await s3.uploads(BUCKET) == 0


async def test_unfinished_uploads_are_listed_and_aborted_once_or_twice(s3: VersityGateway) -> None:
    async with opened(s3, prefix="uploads") as manager, s3.client() as client:
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
    marks = {"IsTruncated": True, "NextKeyMarker": "a", "NextUploadIdMarker": "1"}
    pages = {
        None: {"Uploads": [{"Key": "a", "UploadId": "1"}], **marks},
        "a1": {"Uploads": [{"Key": "b", "UploadId": "2"}]},
    }

    async def answer(operation: str, KeyMarker: str = "", UploadIdMarker: str = "", **_: Any) -> Any:
        return pages[KeyMarker + UploadIdMarker or None]

    async with opened(s3) as manager:
        monkeypatch.setattr(manager._up, "call", answer)
        assert [(upload.key, upload.id) async for upload in manager.list_uploads()] == [("a", "1"), ("b", "2")]


async def test_a_copy_that_is_cancelled_takes_its_parts_back(s3: VersityGateway, tmp_path: Path) -> None:
    metadata, data = segment_to_copy(tmp_path, 4 * PART_BYTES)
    async with (
        BreakingRelay(s3.port) as relay,
        opened(s3, endpoint_url=relay.url) as manager,
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
    metadata, data = segment_to_copy(tmp_path, 1000)
    read = os.pread
    async with opened(s3) as manager:
        monkeypatch.setattr(os, "pread", lambda descriptor, length, start: read(descriptor, length - 1, start))
        with pytest.raises(RemoteStorageError, match="the segment to copy ends at"):
            await manager.copy_log_segment_data(metadata, data)


@pytest.mark.full
async def test_uploads_through_a_slow_link_finish(s3: VersityGateway, tmp_path: Path) -> None:
    """All parts share a link of 8 MB/s, so at first each of them takes longer than its deadline."""
    segments = [segment_to_copy(tmp_path, 2 * PART_BYTES + 1000) for _ in range(2)]
    async with (
        ThrottlingRelay(s3.port, RATE) as relay,
        opened(s3, timeout_ms="800", endpoint_url=relay.url) as manager,
    ):
        async with asyncio.TaskGroup() as group:
            for metadata, data in segments:
                group.create_task(manager.copy_log_segment_data(metadata, data))
        assert relay.up.taken > 2 * PART_BYTES * 2 > 2 * 0.8 * RATE
        metadata, data = segments[-1]
        assert await manager.fetch_log_segment(metadata, 0) == data.log_segment.read_bytes()
    assert await s3.uploads(BUCKET) == 0


async def test_a_store_that_throttles_takes_a_copy_by_the_first_call(s3: VersityGateway, tmp_path: Path) -> None:
    rolls = random.Random(48)
    metadata, data = segment_to_copy(tmp_path, 1 << 20, batches=12)
    with FaultyS3(s3.endpoint_url) as faulty:
        async with opened(s3, endpoint_url=faulty.url) as storage:
            faulty.refuses = lambda method, path: rolls.random() < 0.3
            await storage.copy_log_segment_data(metadata, data)
            await read_back(storage, metadata, 1 << 20)
            assert await storage.delete_log_segment_data(metadata)
            assert len(faulty.refused) > 5
