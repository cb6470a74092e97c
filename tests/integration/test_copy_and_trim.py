"""Copy and trim on a real broker, in a process that is killed after every step."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from protocol.records.record_batch import verify_batches
from tests.support.fakes.journaled_rlmm import JournaledRemoteLogMetadataManager
from tests.support.servers.copier import CopierOptions
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import (
    create_topic,
    produce,
    produce_transaction,
    random_values,
    topic_id_partition,
)
from tiers.broker.client import BrokerClient
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState

pytestmark = pytest.mark.integration
TIMEOUT_MS = 300_000
LIMIT_S = 300
"""The time limit of a copier from its start on, with a dozen copiers on a busy machine."""
STEPS = [
    ("segment-built", 2),
    ("copy-started-written", 1),
    ("objects-written", 2),
    ("copy-verified", 3),
    ("copy-finished-written", 2),
    ("trim-decided", 1),
    ("trimmed", 1),
]


class Tiers:
    """A topic in both tiers, and the broker's segment file from before the first copy."""

    def __init__(self, kafka: KafkaCluster, client: BrokerClient, partition: TopicIdPartition, folder: Path) -> None:
        self.kafka = kafka
        self.source = BrokerLogSource(client)
        self.partition = partition
        self.options = CopierOptions(kafka.address(), partition.topic, str(folder))
        self.original = (kafka.log_folder(partition.topic, 0) / f"{0:020}.log").read_bytes()
        self.next_offset = verify_batches(self.original)[-1].next_offset

    async def metadata(self) -> RemoteLogMetadataManager:
        metadata = JournaledRemoteLogMetadataManager(self.options.journal)
        await metadata.open()
        return metadata

    async def segments(self) -> list[RemoteLogSegmentMetadata]:
        return list((await self.metadata()).list_remote_log_segments(self.partition))

    async def remote_bytes(self) -> bytes:
        store = self.options.store()
        await store.open()
        try:
            parts = [
                bytes(await store.fetch_log_segment(one, 0, one.segment_size_bytes + 1))
                for one in await self.segments()
                if one.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
            ]
        finally:
            await store.close()
        return b"".join(parts)

    async def local_bytes(self, offset: int) -> bytes:
        data = b""
        while (read := await self.source.read(self.partition, offset, 1 << 20, TIMEOUT_MS)).records:
            data += read.records
            offset = verify_batches(read.records)[-1].next_offset
        return data

    async def log_start(self) -> int:
        return (await self.source.bounds(self.partition, TIMEOUT_MS)).log_start_offset

    async def check_that_every_offset_is_readable(self) -> None:
        remote = await self.remote_bytes()
        assert remote == self.original[: len(remote)]
        end = verify_batches(remote)[-1].next_offset if remote else 0
        local_start = await self.log_start()
        assert local_start <= end
        assert remote + await self.local_bytes(end) == self.original

    async def check_that_nothing_is_left_over(self) -> None:
        segments = await self.segments()
        assert {one.state for one in segments} == {RemoteLogSegmentState.COPY_SEGMENT_FINISHED}
        objects = [path for path in self.options.remote_folder.rglob("*") if path.is_file()]
        assert len(objects) == 2 * len(segments) + 1  # two objects per segment, and the manifest
        assert list(self.options.spool_folder.iterdir()) == []

    async def is_settled(self) -> bool:
        """Whether every record is remote, and all but the newest segment is trimmed."""
        metadata = await self.metadata()
        if metadata.remote_end_offset(self.partition) != self.next_offset - 1:
            return False
        newest = metadata.remote_log_segment_metadata(self.partition, self.next_offset - 1)
        return newest is not None and await self.log_start() == newest.start_offset


@pytest.fixture
async def client(kafka: KafkaCluster) -> AsyncIterator[BrokerClient]:
    client = BrokerClient([kafka.address()], client_id="test")
    await client.open()
    yield client
    await client.close()


async def made_tiers(kafka: KafkaCluster, client: BrokerClient, topic: str, folder: Path) -> Tiers:
    """Makes a topic. Waits for the transaction markers, which brokers write after the commit has returned."""
    partition = await topic_id_partition(client, topic)
    source = BrokerLogSource(client)
    async with asyncio.timeout(120):
        while True:
            bounds = await source.bounds(partition, TIMEOUT_MS)
            if bounds.last_stable_offset == bounds.high_watermark:
                break
            await asyncio.sleep(0.05)
    return Tiers(kafka, client, partition, folder)


@asynccontextmanager
async def copier(options: CopierOptions) -> AsyncIterator[asyncio.subprocess.Process]:
    """Runs the copier, and stops it cleanly at the end. If it failed, the error has its output."""
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(*options.command(), stdout=pipe, stderr=pipe)
    try:
        assert process.stdout is not None
        await asyncio.wait_for(process.stdout.readline(), LIMIT_S)
        yield process
    finally:
        if process.returncode is None:
            process.send_signal(signal.SIGTERM)
        _, errors = await asyncio.wait_for(process.communicate(), LIMIT_S)
        if process.returncode not in (0, -signal.SIGKILL):
            raise AssertionError(errors.decode())


async def settle(tiers: Tiers, options: CopierOptions) -> None:
    async with copier(options) as process, asyncio.timeout(LIMIT_S):
        while not await tiers.is_settled():
            assert process.returncode is None
            await asyncio.sleep(0.1)


async def test_the_remote_tier_holds_the_brokers_own_segment_file_byte_for_byte(
    kafka: KafkaCluster, client: BrokerClient, topic_name: str, tmp_path: Path
) -> None:
    create_topic(kafka.bootstrap_servers, topic_name)
    produce(kafka.bootstrap_servers, topic_name, random_values(200))
    produce_transaction(kafka.bootstrap_servers, topic_name, random_values(20), transactional_id="a", commit=False)
    produce_transaction(kafka.bootstrap_servers, topic_name, random_values(20), transactional_id="b", commit=True)
    tiers = await made_tiers(kafka, client, topic_name, tmp_path)
    await settle(tiers, tiers.options)
    assert await tiers.remote_bytes() == tiers.original
    assert len(await tiers.segments()) >= 7
    await tiers.check_that_nothing_is_left_over()


@pytest.mark.parametrize(("step", "at"), STEPS)
async def test_a_copier_killed_after_any_step_loses_nothing(
    kafka: KafkaCluster, client: BrokerClient, topic_name: str, tmp_path: Path, step: str, at: int
) -> None:
    create_topic(kafka.bootstrap_servers, topic_name)
    produce(kafka.bootstrap_servers, topic_name, random_values(120))
    tiers = await made_tiers(kafka, client, topic_name, tmp_path)
    options = CopierOptions(tiers.options.bootstrap, topic_name, str(tmp_path), kill_after=step, kill_at=at)
    async with copier(options) as process:
        assert await asyncio.wait_for(process.wait(), LIMIT_S) == -signal.SIGKILL
    await tiers.check_that_every_offset_is_readable()

    await settle(tiers, tiers.options)
    assert await tiers.remote_bytes() == tiers.original
    await tiers.check_that_every_offset_is_readable()
    await tiers.check_that_nothing_is_left_over()
