"""A store that answers a part of all requests by 503 SlowDown takes copies, and returns them."""

from __future__ import annotations

import random
from pathlib import Path

from tests.support.fakes.copies import opened, segment_to_copy
from tests.support.servers.faulty_s3 import FaultyS3
from tests.support.servers.versitygw import VersityGateway
from tiers.storage.s3.storage import S3RemoteStorageManager
from tiers.verify.read_back import read_back

BUCKET = "throttling"


async def test_a_copy_is_stored_read_back_and_deleted_by_the_first_call(s3: VersityGateway, tmp_path: Path) -> None:
    rolls = random.Random(48)
    await s3.create_bucket(BUCKET)
    metadata, data = segment_to_copy(tmp_path, 1 << 20, batches=12)
    with FaultyS3(s3.endpoint_url) as faulty:
        settings = s3.settings(BUCKET) | {"endpoint.url": faulty.url, "cluster.id": "c", "part.size": "5MiB"}
        async with opened(S3RemoteStorageManager(settings)) as storage:
            faulty.refuses = lambda method, path: rolls.random() < 0.3
            await storage.copy_log_segment_data(metadata, data)
            await read_back(storage, metadata, 1 << 20)
            assert await storage.delete_log_segment_data(metadata)
            assert len(faulty.refused) > 5
