"""A GET that a real S3 server never ends: the second one, on a connection of its own, brings the bytes."""

from __future__ import annotations

from pathlib import Path

from tests.support.fakes.idle import wait_idle
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tests.support.servers.breaking_relay import BreakingRelay
from tests.support.servers.versitygw import VersityGateway
from tiers.config.settings import RemoteLogConfig
from tiers.model.ids import TopicIdPartition
from tiers.reader.remote_log_reader import RemoteLogReader, RemoteLogReaderSettings, RemoteReadRequest, monotonic_ms
from tiers.storage.s3.storage import S3RemoteStorageManager

BUCKET = "hedged"
P0 = TopicIdPartition(TOPIC_ID, 0, "orders")
GETS = 30
SETTINGS = RemoteLogReaderSettings(
    min_get_bytes=1, max_get_bytes=1, remote_log=RemoteLogConfig(read_ahead_bytes=1, reader_hedge_max_percent=50)
)


async def test_a_get_that_stands_still_does_not_hold_up_the_read(s3: VersityGateway, tmp_path: Path) -> None:
    await s3.create_bucket(BUCKET)
    tier = RemoteTier(tmp_path)
    async with BreakingRelay(s3.port) as relay:
        store = S3RemoteStorageManager(s3.settings(BUCKET) | {"cluster.id": "c", "endpoint.url": relay.url})
        tier.storage.inner = store
        batches = await tier.fill(P0, segments=1, batches=GETS + 2, value_bytes=100)
        try:
            async with RemoteLogReader(tier.rlmm, tier.storage, SETTINGS) as reader:

                async def read(number: int) -> bytes:
                    answer = await reader.read(
                        RemoteReadRequest(
                            P0,
                            10 * number,
                            1,
                            min_one_message=True,
                            isolation_level=0,
                            deadline_ms=monotonic_ms() + 60_000,
                            connection_id=1,
                        )
                    )
                    return b"".join(answer.records)

                for number in range(GETS):  # each asks for the chunk that follows as well
                    assert await read(number) == batches[number]
                await wait_idle(reader.chunk_pool)
                wins, asked = reader.hedged_reads.hedge_wins, len(tier.storage.gets)
                relay.hold_after("down", 100)
                assert await read(GETS + 1) == batches[GETS + 1]
                assert relay.reached.is_set()
                assert reader.hedged_reads.hedge_wins == wins + 1
                assert len(tier.storage.gets) == asked + 2
                assert tier.storage.running == 0
                assert reader.chunk_pool.bytes_in_flight == 0
        finally:
            await store.close()
