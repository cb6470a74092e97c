"""Writes the demo's records with an unmodified producer, some compressed, and aborts one transaction in between.

The producers have no delivery callback: the client would lose a `KeyboardInterrupt` that is raised in one. A record
whose delivery fails is missing when the demo reads.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from confluent_kafka import Producer
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewTopic

from bench.clients.librdkafka import LOG_ERRORS
from bench.demo_records import ABORTED_PER_PARTITION, PARTITIONS, TOPIC, Batch, aborted_value, key, value

TIMEOUT_S = 60.0


@dataclass(slots=True)
class Produced:
    records: int = 0
    value_bytes: int = 0
    aborted: int = 0


def create_topic(bootstrap: str, name: str, partitions: int, settings: dict[str, str]) -> None:
    new = NewTopic(name, num_partitions=partitions, replication_factor=1, config=settings)
    # The variable keeps the client alive: a client that is garbage collected ends its requests.
    admin = AdminClient({"bootstrap.servers": bootstrap, "log_level": LOG_ERRORS})
    admin.create_topics([new])[name].result(TIMEOUT_S)


def produce(
    bootstrap: str, batches: Sequence[Batch], first_timestamp_ms: int, progress: Callable[[Produced], None]
) -> Produced:
    """Writes the sequence numbers of `batches` to every partition, and waits until all records are acknowledged.

    Aborts a transaction before the third batch. `first_timestamp_ms` is the timestamp of sequence number 0. Raises
    `TimeoutError`."""
    produced = Produced()
    for number, batch in enumerate(batches):
        if number == 2:
            produced.aborted = abort_transaction(bootstrap)
        producer = Producer(
            {
                "bootstrap.servers": bootstrap,
                "enable.idempotence": True,
                "log_level": LOG_ERRORS,
                "compression.type": batch.codec,
                "compression.level": 1,
                "linger.ms": 20,
                "batch.size": 256 * 1024,
                "queue.buffering.max.kbytes": 64 * 1024,
            }
        )
        for sequence in range(batch.first, batch.last + 1):
            for partition in range(PARTITIONS):
                content = value(partition, sequence)
                send(producer, partition, key(partition, sequence), content, first_timestamp_ms + sequence)
                produced.records += 1
                produced.value_bytes += len(content)
            if sequence % 256 == 0:
                producer.poll(0)
                progress(produced)
        deadline = time.monotonic() + TIMEOUT_S
        while producer.flush(0.5):
            progress(produced)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{batch.codec} batches were not acknowledged within {TIMEOUT_S:.0f} s")
    return produced


def send(producer: Producer, partition: int, its_key: bytes, its_value: bytes, timestamp_ms: int) -> None:
    while True:
        try:
            producer.produce(TOPIC, its_value, its_key, partition=partition, timestamp=timestamp_ms)
        except BufferError:
            producer.poll(0.1)
        else:
            return


def abort_transaction(bootstrap: str) -> int:
    """Writes records to every partition in a transaction, waits until they are delivered, and aborts the transaction.

    Returns the number of records. Raises `TimeoutError`."""
    producer = Producer({"bootstrap.servers": bootstrap, "transactional.id": "demo-aborted", "log_level": LOG_ERRORS})
    producer.init_transactions(TIMEOUT_S)
    producer.begin_transaction()
    for number in range(ABORTED_PER_PARTITION):
        for partition in range(PARTITIONS):
            producer.produce(TOPIC, aborted_value(number), partition=partition)
    if producer.flush(TIMEOUT_S):
        raise TimeoutError(f"the transaction's records were not acknowledged within {TIMEOUT_S:.0f} s")
    producer.abort_transaction(TIMEOUT_S)
    return ABORTED_PER_PARTITION * PARTITIONS
