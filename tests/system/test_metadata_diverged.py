"""A broker loses the tail of a metadata log, and new records follow. A reader of the old tail notices it."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from protocol.errors import ErrorCode
from tests.support.rigs.metadata_managers import TopicBasedManager, bear_standstills
from tests.support.servers.kafka import ALONE, KafkaCluster
from tests.support.tiers.segment_metadata import copied, segment
from tests.support.tiers.waiting import until
from tiers.broker.client import BrokerClient
from tiers.broker.fetch import FetchPosition, fetch_raw
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.state.writer import saved_identity
from tiers.metadata.topic.metadata_topic import MetadataTopicSettings
from tiers.metadata.topic.settings import TopicBasedSettings
from tiers.model.ids import TopicIdPartition

pytestmark = pytest.mark.integration
TIMEOUT_MS = 60_000
TOPIC = "__metadata"
_HEAD = struct.Struct(">qi")


def cut_tail(log: Path, end_offset: int) -> None:
    """Removes the batches from `end_offset` on."""
    raw, position = log.read_bytes(), 0
    while position < len(raw):
        base_offset, length = _HEAD.unpack_from(raw, position)
        if base_offset >= end_offset:
            break
        position += _HEAD.size + length
    assert position < len(raw)
    with log.open("r+b") as file:
        file.truncate(position)


@asynccontextmanager
async def opened(kafka: KafkaCluster, folder: Path, *, is_member: bool) -> AsyncIterator[TopicBasedManager]:
    client = BrokerClient([kafka.address()], client_id="test")
    settings = TopicBasedSettings(
        folder,
        topic=MetadataTopicSettings(TOPIC, 1),
        is_member=is_member,
        open_timeout_ms=TIMEOUT_MS,
        write_timeout_ms=TIMEOUT_MS,
    )
    manager = TopicBasedManager(client, settings)
    try:
        await manager.log.open()
        yield manager
    finally:
        await manager.log.close()
        await client.close()


async def test_a_metadata_partition_that_lost_its_tail_and_grew_again_is_noticed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bear_standstills(monkeypatch)
    partition = TopicIdPartition(uuid4(), 0, "orders")
    before, other = tmp_path / "before", tmp_path / "other"
    with KafkaCluster(settings=ALONE) as kafka:
        async with opened(kafka, before, is_member=True) as manager:
            await until(lambda: manager.log.owns(partition))
            for start in (0, 10, 20):
                await copied(manager, segment(partition, start, start + 9))
            await manager.log.ensure_fresh(partition, 0, TIMEOUT_MS)
            read = manager.log.position(partition)
            assert await manager.log.confirms(partition, read, TIMEOUT_MS)
        kafka.stop_broker(1)
        cut_tail(kafka.log_folder(TOPIC, 0) / f"{0:020}.log", read.next_offset - 5)
        await asyncio.to_thread(kafka.start_broker, 1)
        async with opened(kafka, before, is_member=False) as manager:
            with pytest.raises(RemoteLogMetadataNotReadyError):
                await manager.log.ensure_fresh(partition, TIMEOUT_MS, 2_000)
            await until(lambda: manager.log.status().alarm is not None)
            assert f"and was read to {read.next_offset}" in str(manager.log.status().alarm)
        async with opened(kafka, other, is_member=True) as manager:
            await until(lambda: manager.log.owns(partition))
            for start in (100, 110, 120):
                await copied(manager, segment(partition, start, start + 9))
            assert manager.log.position(partition).next_offset > read.next_offset
            assert manager.log.position(partition).leader_epoch > read.leader_epoch
            assert not await manager.log.confirms(partition, read, TIMEOUT_MS)
            asked = FetchPosition(read.topic_id, 0, read.next_offset, last_fetched_epoch=read.leader_epoch)
            (answer,) = await fetch_raw(manager.log._client, 1, [asked], max_bytes=1 << 20, timeout_ms=TIMEOUT_MS)
            assert (answer.error, len(answer.records)) == (ErrorCode.NONE, 0)
            assert answer.diverging is not None
            assert answer.diverging.leader_epoch == read.leader_epoch
            assert answer.diverging.end_offset < read.next_offset
        for _ in range(2):
            async with opened(kafka, before, is_member=True) as manager:
                with pytest.raises(RemoteLogMetadataNotReadyError):
                    await manager.log.ensure_fresh(partition, TIMEOUT_MS, 2_000)
                await until(lambda: "now has other records" in str(manager.log.status().alarm))
                assert manager.log.follower.events_read == 0
                assert not manager.log.is_fresh(partition, TIMEOUT_MS)
                assert not manager.log.owns(partition)
                assert manager.state.remote_end_offset(partition) == 29
        assert saved_identity(before) is not None
