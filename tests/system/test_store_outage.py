"""A real S3 server is killed during copies, and started again."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.servers.versitygw import VersityGateway
from tests.support.tiers.workbench import Workbench, workbench
from tiers.errors import RetriableRemoteStorageError
from tiers.storage.object_key import parse_segment_key
from tiers.storage.s3.storage import S3RemoteStorageManager

pytestmark = pytest.mark.integration
BUCKET = "outage"
ROUNDS = 8


@pytest.fixture
async def gateway() -> AsyncIterator[VersityGateway]:
    """A server for this test only, so that other tests do not notice the outage."""
    with VersityGateway() as gateway:
        await gateway.create_bucket(BUCKET)
        yield gateway


@pytest.fixture
async def store(gateway: VersityGateway) -> AsyncIterator[S3RemoteStorageManager]:
    store = S3RemoteStorageManager(gateway.settings(BUCKET) | {"cluster.id": "cluster", "timeout.ms": "30000"})
    await store.open()
    yield store
    await store.close()


async def round_of(bench: Workbench) -> bool:
    bench.now_ms += 30_000
    bench.wall_ms += 30_000
    return await bench.copy()


async def test_an_outage_of_many_rounds_leaves_one_attempt_and_copying_goes_on(
    gateway: VersityGateway, store: S3RemoteStorageManager, tmp_path: Path
) -> None:
    async with workbench(tmp_path) as bench:
        bench.services = replace(bench.services, storage=store)
        bench.metadata.markers.clear()  # they are of another store
        bench.restart()
        bench.log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(10)])
        gateway.kill()
        for _ in range(ROUNDS):
            with pytest.raises(RetriableRemoteStorageError):
                await round_of(bench)
        assert bench.steps.count("copy-started-written") == 1
        (attempt,) = bench.segments
        assert (attempt.start_offset, attempt.end_offset) == (0, 29)

        gateway.start()
        while await round_of(bench):
            pass
        assert bench.finished == [(0, 29), (30, 59), (60, 89)]
        assert bench.segments[0].segment_id == attempt.segment_id, "the segment was copied again with another uuid"
        assert bench.steps.count("copy-started-written") == len(bench.segments) == 3
        keys = [parse_segment_key(each.key) async for each in store.list_objects("")]
        assert Counter(key.segment_uuid for key in keys if key is not None) == {
            each.segment_id.id: 2 for each in bench.segments
        }
        assert not list(bench.services.spool.kept())
