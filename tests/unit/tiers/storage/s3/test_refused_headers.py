"""Servers with the S3 protocol that refuse a header of AWS take copies."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.servers.racing_s3 import RacingS3
from tiers.errors import RemoteStorageError
from tiers.storage.object_key import indexes_key, log_key
from tiers.storage.s3.storage import S3RemoteStorageManager

PART_BYTES = 5 << 20


@asynccontextmanager
async def opened(refuses: Mapping[str, int]) -> AsyncIterator[tuple[RacingS3, S3RemoteStorageManager]]:
    async with RacingS3(races=(), refuses=refuses) as server:
        storage = S3RemoteStorageManager(server.settings() | {"cluster.id": "c", "part.size": str(PART_BYTES)})
        await storage.open()
        try:
            yield server, storage
        finally:
            await storage.close()


@pytest.mark.parametrize("status", [400, 501])
@pytest.mark.parametrize("value_bytes", [1_000, PART_BYTES])
async def test_a_copy_needs_no_condition(status: int, value_bytes: int, tmp_path: Path) -> None:
    built = build_segment(tmp_path / "segment", [batch_of(0, 1, value_bytes=value_bytes)])
    metadata = metadata_of(built)
    data = built.log_segment_data(metadata)
    async with opened({"If-None-Match": status}) as (server, storage):
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
        assert not found.has_atomic_creation
        assert "the store refuses the condition" in found.evidence
