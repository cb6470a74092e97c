"""The decoder returns the records that a client reads from a real broker: all codecs, headers, nulls, transactions."""

from __future__ import annotations

import time
from collections.abc import Iterator

import confluent_kafka
import pyarrow as pa
import pytest
from confluent_kafka import Producer, TopicPartition

from pipeline.decode.arrow_records import decode_batches
from pipeline.decode.record_columns import ALL_COLUMNS
from protocol.records.record_batch import verify_batches
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic, topic_id_partition, transactional_producer, until_decided
from tiers.broker.client import BrokerClient
from tiers.log.broker_log import BrokerLogSource
from tiers.segment.indexes.segment_index import AbortedTransactionRange

pytestmark = pytest.mark.integration
TIMEOUT_S = 300.0
TIMEOUT_MS = 300_000
LAST_OFFSET = (1 << 63) - 1
FETCH_BYTES = (1, 4_000, 1 << 20)
"""Limits for one batch, some batches, and all batches."""

Headers = list[tuple[str, str | bytes | None]]
Row = tuple[int, bytes | None, bytes | None, int, int, Headers]
"""A record: offset, key, value, timestamp type, timestamp, headers."""


def write(bootstrap: str, topic: str) -> None:
    """Writes records with every codec, and then concurrent transactions of two producers, some of them aborted."""
    for codec in ("none", "gzip", "snappy", "lz4", "zstd"):
        headers: Headers = [("codec", codec.encode()), ("ø", None)]
        settings: dict[str, str | int | float | bool] = {"compression.type": codec, "linger.ms": 50}
        settings["enable.idempotence"] = True  # a record that is sent again is not stored twice
        producer = Producer({"bootstrap.servers": bootstrap, **settings})
        for number in range(30):
            producer.produce(
                topic,
                None if number % 7 == 0 else b"value-%d" % number * 20,
                None if number % 3 == 0 else b"key-%d" % number,
                headers=headers[: number % 3],
                timestamp=1_600_000_000_000 - 1_000 * number,
            )
        assert producer.flush(TIMEOUT_S) == 0
    one, other = (transactional_producer(bootstrap, f"{topic}-{name}") for name in ("one", "other"))
    other.begin_transaction()
    for number, is_aborted in enumerate((True, False, True, False)):
        one.begin_transaction()
        for producer in (one, other, one):
            producer.produce(topic, b"%s-%d" % (b"aborted" if is_aborted else b"committed", number))
            assert producer.flush(TIMEOUT_S) == 0
        if is_aborted:
            one.abort_transaction(TIMEOUT_S)
        else:
            one.commit_transaction(TIMEOUT_S)
    other.commit_transaction(TIMEOUT_S)
    until_decided(bootstrap, topic)


def consumed(bootstrap: str, topic: str, isolation_level: str) -> list[Row]:
    rows: list[Row] = []
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "unused",
            "isolation.level": isolation_level,
            "enable.partition.eof": True,
        }
    )
    consumer.assign([TopicPartition(topic, 0, 0)])
    deadline = time.monotonic() + TIMEOUT_S
    while time.monotonic() < deadline:
        message = consumer.poll(1)
        if message is None:
            continue
        if (error := message.error()) is not None:
            assert error.code() == confluent_kafka.KafkaError._PARTITION_EOF
            break
        kind, timestamp = message.timestamp()
        headers = list(message.headers() or [])
        rows.append((message.offset() or 0, message.key(), message.value(), kind - 1, timestamp, headers))  # type: ignore[arg-type]  # pairs
    consumer.close()
    return rows


async def decoded(bootstrap: tuple[str, int], topic: str, max_bytes: int, is_committed_only: bool) -> list[Row]:
    """Decodes the log with fetches of `max_bytes`, each with the aborted transactions of the broker's answer."""
    rows: list[Row] = []
    client = BrokerClient([bootstrap], client_id="test")
    await client.open()
    source = BrokerLogSource(client)
    partition = await topic_id_partition(client, topic)
    offset, end = 0, (await source.bounds(partition, TIMEOUT_MS)).last_stable_offset
    while offset < end:
        read = await source.read(partition, offset, max_bytes, TIMEOUT_MS)
        for batch in decode_batches(
            read.records,
            topic=topic,
            partition=0,
            first_offset=offset,
            end_offset=end - 1,
            columns=ALL_COLUMNS,
            aborted=[
                AbortedTransactionRange(one.producer_id, one.first_offset, LAST_OFFSET)
                for one in read.aborted_transactions
            ],
            is_committed_only=is_committed_only,
        ):
            rows += rows_of(batch)
        offset = verify_batches(read.records)[-1].next_offset
    await client.close()
    return rows


def rows_of(batch: pa.RecordBatch) -> Iterator[Row]:
    timestamps = batch.column("timestamp").cast(pa.int64()).to_pylist()
    for row, timestamp in zip(batch.to_pylist(), timestamps, strict=True):
        headers = [(header["key"], header["value"]) for header in row["headers"] or ()]
        yield row["offset"], row["key"], row["value"], row["timestampType"], timestamp // 1000, headers


async def test_a_log_is_decoded_as_a_client_reads_it(kafka: KafkaCluster, topic_name: str) -> None:
    create_topic(kafka.bootstrap_servers, topic_name, config={"retention.ms": "-1"})  # the records have old timestamps
    write(kafka.bootstrap_servers, topic_name)

    for isolation_level, count in (("read_committed", 150 + 4 + 4), ("read_uncommitted", 150 + 4 + 8)):
        expected = consumed(kafka.bootstrap_servers, topic_name, isolation_level)
        assert len(expected) == count
        for max_bytes in FETCH_BYTES:
            is_committed_only = isolation_level == "read_committed"
            assert await decoded(kafka.address(), topic_name, max_bytes, is_committed_only) == expected
