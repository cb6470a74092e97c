"""A store that answers a part of all requests by 503 SlowDown takes copies, and returns them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.versitygw import VersityGateway
from tiers.storage.s3.storage import S3RemoteStorageManager
from tiers.verify.read_back import read_back

BUCKET = "throttling"


def every_third() -> Callable[[str, str], bool]:
    requests = iter(range(1_000_000))
    return lambda method, path: next(requests) % 3 == 2


def three_of_ten() -> Callable[[str, str], bool]:
    rolls = random.Random(48)
    return lambda method, path: rolls.random() < 0.3


@pytest.mark.parametrize("refuses", [every_third, three_of_ten])
async def test_a_copy_is_stored_read_back_and_deleted_by_the_first_call(
    refuses: Callable[[], Callable[[str, str], bool]], s3: VersityGateway, tmp_path: Path
) -> None:
    await s3.create_bucket(BUCKET)
    built = build_segment(tmp_path / "segment", [batch_of(offset, 1, value_bytes=1 << 20) for offset in range(12)])
    metadata = metadata_of(built)
    with FaultyS3(s3.endpoint_url) as faulty:
        settings = s3.settings(BUCKET) | {"endpoint.url": faulty.url, "cluster.id": "c", "part.size": "5MiB"}
        storage = S3RemoteStorageManager(settings)
        await storage.open()
        faulty.refuses = refuses()
        try:
            await storage.copy_log_segment_data(metadata, built.log_segment_data(metadata))
            await read_back(storage, metadata, 1 << 20)
            assert await storage.delete_log_segment_data(metadata)
            assert len(faulty.refused) > 5
        finally:
            await storage.close()
