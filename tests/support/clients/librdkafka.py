"""The client confluent-kafka, which wraps librdkafka."""

from __future__ import annotations

import time
from collections.abc import Sequence

import confluent_kafka
from confluent_kafka import Consumer, KafkaError, KafkaException, Message, TopicPartition
from confluent_kafka.admin import AdminClient, OffsetSpec  # type: ignore[attr-defined]  # they export it without saying so

from tests.support.clients.client import (
    CLASSIC,
    FETCH_BYTES,
    TIMEOUT_S,
    ClientRecord,
    OffsetOutOfRange,
    Offsets,
    header_pairs,
)
from tests.support.servers.producing import produce, produce_transaction


class Librdkafka:
    def __init__(self, group_protocol: str = CLASSIC) -> None:
        self._group_protocol = group_protocol

    def produce(self, bootstrap: str, topic: str, values: Sequence[bytes]) -> None:
        produce(bootstrap, topic, values)

    def transact(
        self, bootstrap: str, topic: str, values: Sequence[bytes], *, transactional_id: str, commit: bool
    ) -> None:
        produce_transaction(bootstrap, topic, values, transactional_id=transactional_id, commit=commit)

    def consume(self, bootstrap: str, topic: str, group: str, count: int, isolation: str) -> list[ClientRecord]:
        consumer = _consumer(bootstrap, group, "earliest", isolation, self._group_protocol)
        try:
            consumer.subscribe([topic])
            found = _take(consumer, count)
            consumer.commit(offsets=[TopicPartition(topic, 0, found[-1].offset + 1)], asynchronous=False)
            return found
        finally:
            consumer.close()

    def read(
        self, bootstrap: str, topic: str, offset: int, count: int, isolation: str, max_bytes: int = FETCH_BYTES
    ) -> list[ClientRecord]:
        consumer = _consumer(bootstrap, "unused", "error", isolation, max_bytes=max_bytes)
        try:
            consumer.assign([TopicPartition(topic, 0, offset)])
            return _take(consumer, count)
        finally:
            consumer.close()

    def read_to(self, bootstrap: str, topic: str, offset: int, end: int, isolation: str) -> list[ClientRecord]:
        """Reads to `end`, and waits for the end event: the client's `position` only follows the returned records."""
        consumer = _consumer(bootstrap, "unused", "error", isolation, tells_end=True)
        found: list[ClientRecord] = []
        deadline = time.monotonic() + TIMEOUT_S
        try:
            consumer.assign([TopicPartition(topic, 0, offset)])
            while time.monotonic() < deadline:
                for message in consumer.consume(500, 0.1):
                    error = message.error()
                    if error is None or error.code() != KafkaError._PARTITION_EOF:
                        found.append(_record(message))
                    elif (message.offset() or 0) >= end:
                        return found
            raise TimeoutError(f"{len(found)} records came, but no end event at {end}")
        finally:
            consumer.close()

    def offsets(self, bootstrap: str, topic: str, timestamp: int) -> Offsets:
        """Returns the offsets. Retries while they are unavailable: unlike other clients, librdkafka does not retry."""
        consumer = _consumer(bootstrap, "unused", "error", "read_uncommitted")
        deadline = time.monotonic() + TIMEOUT_S
        try:
            while True:
                try:
                    return _offsets(consumer, bootstrap, topic, timestamp)
                except KafkaException as refused:
                    is_passing = refused.args[0].code() == KafkaError.REPLICA_NOT_AVAILABLE
                    if not is_passing or time.monotonic() > deadline:
                        raise
        finally:
            consumer.close()


def _earliest(bootstrap: str, topic: str) -> int:
    asked = {TopicPartition(topic, 0): OffsetSpec.earliest()}  # type: ignore[no-untyped-call]  # it has no annotations
    admin = AdminClient({"bootstrap.servers": bootstrap})  # the name keeps the client alive until the answer comes
    (answer,) = admin.list_offsets(asked).values()
    return int(answer.result(TIMEOUT_S).offset)


def _offsets(consumer: Consumer, bootstrap: str, topic: str, timestamp: int) -> Offsets:
    earliest, latest = consumer.get_watermark_offsets(TopicPartition(topic, 0), TIMEOUT_S)
    # Either the log is empty, or the earliest offset is unavailable and librdkafka returns the latest one.
    if earliest == latest:
        earliest = _earliest(bootstrap, topic)
    (found,) = consumer.offsets_for_times([TopicPartition(topic, 0, timestamp)], TIMEOUT_S)
    if found.error is not None:
        raise KafkaException(found.error)
    # If no record is that late, librdkafka returns the end.
    return Offsets(earliest, latest, None if found.offset == confluent_kafka.OFFSET_END else found.offset)


def _consumer(
    bootstrap: str,
    group: str,
    reset: str,
    isolation: str,
    group_protocol: str = CLASSIC,
    max_bytes: int = FETCH_BYTES,
    tells_end: bool = False,
) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": group,
            "group.protocol": group_protocol,
            "auto.offset.reset": reset,
            "enable.auto.commit": False,
            "isolation.level": isolation,
            "check.crcs": True,
            "fetch.message.max.bytes": max_bytes,
            "enable.partition.eof": tells_end,
        }
    )


def _take(consumer: Consumer, count: int) -> list[ClientRecord]:
    found: list[ClientRecord] = []
    deadline = time.monotonic() + TIMEOUT_S
    while len(found) < count:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{len(found)} of {count} records came")
        found += [_record(message) for message in consumer.consume(count - len(found), 0.5)]
    return found


def _record(message: Message) -> ClientRecord:
    error = message.error()
    if error is not None:
        if error.code() == KafkaError._AUTO_OFFSET_RESET:
            raise OffsetOutOfRange(str(error))
        raise RuntimeError(str(error))
    offset, key, value = message.offset(), message.key(), message.value()
    assert offset is not None
    assert key is None or isinstance(key, bytes)
    assert value is None or isinstance(value, bytes)
    headers = header_pairs(message.headers())  # type: ignore[arg-type]  # its declared type is wider than its values
    return ClientRecord(offset, message.timestamp()[1], key, value, headers)
