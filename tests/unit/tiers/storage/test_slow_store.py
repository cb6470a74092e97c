"""A slow store: calls with progress continue, others end (docs/design.md, "Durability and deadlines")."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.servers.throttling_relay import ThrottlingRelay
from tests.support.servers.versitygw import VersityGateway
from tiers.errors import RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.remote_storage_manager import LogSegmentData
from tiers.storage.s3.storage import S3RemoteStorageManager

PART_BYTES = 5 << 20
BUCKET = "slow"
RATE = 8_000_000


@asynccontextmanager
async def opened(server: VersityGateway, overrides: Mapping[str, str]) -> AsyncIterator[S3RemoteStorageManager]:
    await server.create_bucket(BUCKET)
    settings = server.settings(BUCKET) | {"cluster.id": "c", "part.size": str(PART_BYTES)}
    manager = S3RemoteStorageManager(settings | dict(overrides))
    await manager.open()
    try:
        yield manager
    finally:
        await manager.close()


def segment(folder: Path, value_bytes: int) -> tuple[RemoteLogSegmentMetadata, LogSegmentData]:
    built = build_segment(folder / str(uuid.uuid4()), [batch_of(0, 1, value_bytes=value_bytes)])
    metadata = metadata_of(built)
    return metadata, built.log_segment_data(metadata)


async def copy_all(s3: VersityGateway, count: int, deadline_s: float, folder: Path) -> None:
    """Copies `count` segments of three parts at once, through a link of 8 MB/s, and reads one back."""
    segments = [segment(folder, 2 * PART_BYTES + 1000) for _ in range(count)]
    slow = {"timeout.ms": str(int(deadline_s * 1000))}
    async with (
        ThrottlingRelay(s3.port, RATE) as relay,
        opened(s3, slow | {"endpoint.url": relay.url}) as manager,
    ):
        async with asyncio.TaskGroup() as group:
            for metadata, data in segments:
                group.create_task(manager.copy_log_segment_data(metadata, data))
        moved = relay.up.taken
        metadata, data = segments[-1]
        assert await manager.fetch_log_segment(metadata, 0) == data.log_segment.read_bytes()
    assert moved > 2 * PART_BYTES * count
    # All parts share the link, so at first each of them takes longer than its deadline.
    assert 2 * PART_BYTES * count / RATE > 2 * deadline_s
    assert await s3.uploads(BUCKET) == 0


async def test_uploads_through_a_slow_link_finish(s3: VersityGateway, tmp_path: Path) -> None:
    await copy_all(s3, 2, 0.8, tmp_path)


@pytest.mark.full
async def test_ten_uploads_share_eight_megabytes_a_second(s3: VersityGateway, tmp_path: Path) -> None:
    await copy_all(s3, 10, 3.0, tmp_path)


async def test_an_upload_that_moves_no_byte_ends(s3: VersityGateway, tmp_path: Path) -> None:
    metadata, data = segment(tmp_path, 2 * PART_BYTES)
    async with opened(s3, {"timeout.ms": "300000"}) as patient:
        await patient.put_object("manifest.json", b"{}")
    async with (
        ThrottlingRelay(s3.port, RATE) as relay,
        opened(s3, {"timeout.ms": "200", "endpoint.url": relay.url}) as manager,
    ):
        relay.passes.clear()
        with pytest.raises(RetriableRemoteStorageError, match="no answer in time"):
            await asyncio.wait_for(manager.copy_log_segment_data(metadata, data), 60)
        with pytest.raises(RetriableRemoteStorageError, match="no answer in time"):
            await asyncio.wait_for(manager.get_object("manifest.json"), 60)
