"""The client kafka-python."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import kafka
from kafka.errors import OffsetOutOfRangeError
from kafka.structs import OffsetAndMetadata

from tests.support.clients.client import FETCH_BYTES, TIMEOUT_S, ClientRecord, OffsetOutOfRange, Offsets, header_pairs


class KafkaPython:
    def produce(self, bootstrap: str, topic: str, values: Sequence[bytes]) -> None:
        producer = _producer(bootstrap)
        try:
            _send(producer, topic, values)
        finally:
            producer.close(TIMEOUT_S)

    def transact(
        self, bootstrap: str, topic: str, values: Sequence[bytes], *, transactional_id: str, commit: bool
    ) -> None:
        producer = _producer(bootstrap, transactional_id=transactional_id)
        try:
            producer.init_transactions()
            producer.begin_transaction()
            _send(producer, topic, values)
            if commit:
                producer.commit_transaction()
            else:
                producer.abort_transaction()
        finally:
            producer.close(TIMEOUT_S)

    def consume(self, bootstrap: str, topic: str, group: str, count: int, isolation: str) -> list[ClientRecord]:
        consumer = kafka.KafkaConsumer(
            topic,
            bootstrap_servers=bootstrap,
            group_id=group,
            auto_offset_reset="earliest",
            enable_auto_commit=False,
            isolation_level=isolation,
        )
        try:
            found = _take(consumer, count)
            next_offset = OffsetAndMetadata(found[-1].offset + 1, "", -1)
            consumer.commit({kafka.TopicPartition(topic, 0): next_offset})
            return found
        finally:
            consumer.close()

    def read(
        self, bootstrap: str, topic: str, offset: int, count: int, isolation: str, max_bytes: int = FETCH_BYTES
    ) -> list[ClientRecord]:
        consumer = kafka.KafkaConsumer(
            bootstrap_servers=bootstrap,
            auto_offset_reset="none",
            isolation_level=isolation,
            max_partition_fetch_bytes=max_bytes,
        )
        partition = kafka.TopicPartition(topic, 0)
        try:
            consumer.assign([partition])
            consumer.seek(partition, offset)
            return _take(consumer, count)
        except OffsetOutOfRangeError as error:
            raise OffsetOutOfRange from error
        finally:
            consumer.close()

    def read_to(self, bootstrap: str, topic: str, offset: int, end: int, isolation: str) -> list[ClientRecord]:
        consumer = kafka.KafkaConsumer(bootstrap_servers=bootstrap, auto_offset_reset="none", isolation_level=isolation)
        partition = kafka.TopicPartition(topic, 0)
        found: list[ClientRecord] = []
        deadline = time.monotonic() + TIMEOUT_S
        try:
            consumer.assign([partition])
            consumer.seek(partition, offset)
            while (position := consumer.position(partition)) < end:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"at {position} of {end}")
                found += _records(consumer.poll(100))
            return found
        finally:
            consumer.close()

    def offsets(self, bootstrap: str, topic: str, timestamp: int) -> Offsets:
        consumer = kafka.KafkaConsumer(bootstrap_servers=bootstrap)
        partition = kafka.TopicPartition(topic, 0)
        try:
            earliest = consumer.beginning_offsets([partition])[partition]
            latest = consumer.end_offsets([partition])[partition]
            found = consumer.offsets_for_times({partition: timestamp})[partition]
            return Offsets(earliest, latest, None if found is None else found.offset)
        finally:
            consumer.close()


def _producer(bootstrap: str, **settings: Any) -> Any:
    return kafka.KafkaProducer(
        bootstrap_servers=bootstrap,
        enable_idempotence=True,
        acks="all",
        linger_ms=5,
        batch_size=4096,
        max_block_ms=int(1000 * TIMEOUT_S),
        transaction_timeout_ms=int(1000 * TIMEOUT_S),
        **settings,
    )


def _send(producer: Any, topic: str, values: Sequence[bytes]) -> None:
    sent = [producer.send(topic, value, partition=0) for value in values]
    producer.flush(TIMEOUT_S)
    for future in sent:
        future.get(TIMEOUT_S)


def _take(consumer: Any, count: int) -> list[ClientRecord]:
    """Reads `count` records. Each poll waits for all the remaining time.

    kafka-python 3.0 may lose an assignment when it rejoins because of new metadata. If the poll ends while SyncGroup is
    in progress, the next poll sees no need to rejoin and ignores the answer (KAFKA-9815 in the Java client). This
    happens after every first join that was faster than the topic's metadata, with any broker.
    """
    found: list[ClientRecord] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < count:
        left_ms = int(1000 * (deadline - time.monotonic()))
        if left_ms <= 0:
            raise TimeoutError(f"{len(found)} of {count} records came, of {consumer.assignment()}")
        found += _records(consumer.poll(left_ms, max_records=count - len(found)))
    return found


def _records(polled: Any) -> list[ClientRecord]:
    return [
        ClientRecord(each.offset, each.timestamp, each.key, each.value, header_pairs(each.headers))
        for messages in polled.values()
        for each in messages
    ]
