"""Servers with the S3 protocol that refuse a header of AWS, or demand one, take copies."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.servers.racing_s3 import CHECKSUM_IS_REQUIRED, RacingS3
from tiers.errors import RemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.object_key import indexes_key, log_key
from tiers.storage.remote_storage_manager import LogSegmentData
from tiers.storage.s3.storage import S3RemoteStorageManager

PART_BYTES = 5 << 20


@asynccontextmanager
async def opened(server: RacingS3) -> AsyncIterator[S3RemoteStorageManager]:
    async with server:
        storage = S3RemoteStorageManager(server.settings() | {"cluster.id": "c", "part.size": str(PART_BYTES)})
        await storage.open()
        try:
            yield storage
        finally:
            await storage.close()


@pytest.fixture(params=[1_000, PART_BYTES], ids=["one PUT", "parts"])
def segment(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[RemoteLogSegmentMetadata, LogSegmentData]:
    built = build_segment(tmp_path / "segment", [batch_of(0, 1, value_bytes=request.param)])
    metadata = metadata_of(built)
    return metadata, built.log_segment_data(metadata)


@pytest.mark.parametrize(
    "refuses",
    [
        {"If-None-Match": 400},
        {"If-None-Match": 501},
        {"x-amz-checksum-crc32c": 400, "x-amz-checksum-algorithm": 400},
        {"If-None-Match": 501, "x-amz-checksum-crc32c": 400, "x-amz-checksum-algorithm": 400},
    ],
    ids=["condition", "condition as unknown", "checksum", "both"],
)
async def test_a_copy_needs_no_header_of_aws(
    refuses: dict[str, int], segment: tuple[RemoteLogSegmentMetadata, LogSegmentData]
) -> None:
    metadata, data = segment
    server = RacingS3(races=(), refuses=refuses)
    async with opened(server) as storage:
        await storage.check()
        for _ in range(2):  # the second copy finds the objects of the first one
            await storage.copy_log_segment_data(metadata, data)
            assert server.objects == {
                log_key("c", metadata): data.log_segment.read_bytes(),
                indexes_key("c", metadata): data.indexes,
            }
        with pytest.raises(RemoteStorageError, match="a uuid was used twice"):
            await storage.copy_log_segment_data(metadata, replace(data, indexes=b"others"))
        (found,) = await storage.probe()
        assert found.has_atomic_creation == ("If-None-Match" not in refuses)
        assert ("the store refuses the condition" in found.evidence) == ("If-None-Match" in refuses)


@pytest.mark.parametrize("refuses", [{}, {"If-None-Match": 501}], ids=["as AWS", "without conditions"])
async def test_a_bucket_with_object_lock_gets_the_checksum_of_each_body(
    refuses: dict[str, int], segment: tuple[RemoteLogSegmentMetadata, LogSegmentData]
) -> None:
    metadata, data = segment
    server = RacingS3(races=(), refuses=refuses, is_locked=True)
    async with opened(server) as storage:
        await storage.check()
        await storage.copy_log_segment_data(metadata, data)
        assert server.objects[log_key("c", metadata)] == data.log_segment.read_bytes()
        assert server.objects[indexes_key("c", metadata)] == data.indexes
        (found,) = await storage.probe()
        assert found.has_atomic_creation == (not refuses)


async def test_a_refusal_has_the_words_of_the_store() -> None:
    server = RacingS3(races=(), refuses={"x-amz-checksum-crc32c": 400}, is_locked=True)
    async with opened(server) as storage:
        with pytest.raises(RemoteStorageError, match=re.escape(f"400 InvalidRequest: {CHECKSUM_IS_REQUIRED}")):
            await storage.check()
