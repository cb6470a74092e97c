"""A real log that was compacted once: its leader's epochs begin in holes."""

from __future__ import annotations

import asyncio
from pathlib import Path

import confluent_kafka
import pytest

from protocol.records.record_batch import iterate_batches
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, topic_id_partition
from tiers.broker.client import BrokerClient
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.log_history import epoch_before
from tiers.model.log_source import LogRead
from tiers.model.segment_metadata import leader_epoch_at
from tiers.segment.segment_builder import SegmentBuilder
from tiers.tasks.copy.segment_copy import append_records
from tiers.tasks.copy.spool import Spool

pytestmark = pytest.mark.integration

TIMEOUT_MS = 30_000
OF_EACH_LEADER = 10
COMPACTED = {"cleanup.policy": "compact", "min.cleanable.dirty.ratio": "0.001", "segment.ms": "100"}


def produce(kafka: KafkaCluster, topic: str, first: int, keys: list[str]) -> None:
    """Sends one batch for each key. The timestamps are so far apart that each batch begins a segment of the broker."""
    producer = confluent_kafka.Producer({"bootstrap.servers": kafka.bootstrap_servers})
    for number, key in enumerate(keys, first):
        producer.produce(topic, key=key, value=str(number), timestamp=1_700_000_000_000 + 10_000 * number)
        assert producer.flush(TIMEOUT_MS / 1000) == 0


async def test_every_offset_of_a_hole_has_the_epoch_of_the_leader(tmp_path: Path, topic_name: str) -> None:
    with KafkaCluster(settings={"log.cleaner.backoff.ms": "200"}) as kafka:
        create_topic(kafka.bootstrap_servers, topic_name, config=COMPACTED)
        produce(kafka, topic_name, 0, ["same"] * OF_EACH_LEADER)
        kafka.stop_broker(1)
        kafka.start_broker(1)
        produce(kafka, topic_name, OF_EACH_LEADER, ["same"] * OF_EACH_LEADER + ["last"])
        client = BrokerClient([kafka.address()], client_id="test")
        source = BrokerLogSource(client)
        partition = await topic_id_partition(client, topic_name)

        async def read() -> LogRead:
            return await source.read(partition, 0, 1 << 20, TIMEOUT_MS)

        async with asyncio.timeout(TIMEOUT_MS / 1000):
            # The cleaner announces nothing.
            while next(iterate_batches((await read()).records)).base_offset < OF_EACH_LEADER:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        spool = Spool(tmp_path / "spool", 1 << 30, 1)
        builder = SegmentBuilder(tmp_path / "segment", 0)
        try:
            found = await read()
            await append_records(
                builder, found.records, found.aborted_transactions, spool, source, partition, TIMEOUT_MS
            )
            built = builder.finish()
            epochs = [
                await epoch_before(source, partition, offset + 1, found.leader_epoch, TIMEOUT_MS)
                for offset in range(built.end_offset + 1)
            ]
        finally:
            builder.discard()
            spool.close()
            await client.close()
    assert len(set(epochs[:OF_EACH_LEADER])) == len(set(epochs[OF_EACH_LEADER:])) == 1
    assert epochs[0] < epochs[-1]
    assert [leader_epoch_at(built.segment_leader_epochs, offset) for offset in range(len(epochs))] == epochs
