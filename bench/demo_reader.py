"""One reader of the demo, in its own process: an unmodified client that consumes everything from offset 0.

The reader writes JSON to standard output, one object per line: its progress every half second, then the result.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass

import confluent_kafka
import kafka

from bench.clients.librdkafka import LOG_ERRORS
from bench.demo_records import PARTITIONS, TOPIC, Verifier

STALL_S = 60.0
PROGRESS_S = 0.5

# partition, offset, key, value, timestamp
Record = tuple[int | None, int | None, bytes | None, bytes | None, int]


@dataclass(slots=True)
class Result:
    client: str
    read: int = 0
    from_remote_tier: int = 0
    """The records whose offsets were below the broker's log start when reading began."""
    value_bytes: int = 0
    seconds: float = 0.0
    mismatches: list[str] | None = None
    error: str | None = None
    done: bool = False


def read_with_kafka_python(bootstrap: str) -> Iterator[list[Record]]:
    consumer = kafka.KafkaConsumer(
        bootstrap_servers=bootstrap,
        isolation_level="read_committed",
        auto_offset_reset="none",
        enable_auto_commit=False,
        max_poll_records=2000,
    )
    consumer.assign([kafka.TopicPartition(TOPIC, partition) for partition in range(PARTITIONS)])
    for partition in consumer.assignment():
        consumer.seek(partition, 0)
    while True:
        polled = consumer.poll(timeout_ms=500)
        yield [
            (where.partition, record.offset, record.key, record.value, record.timestamp)
            for where, records in polled.items()
            for record in records
        ]


def read_with_confluent_kafka(bootstrap: str) -> Iterator[list[Record]]:
    consumer = confluent_kafka.Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "demo",
            "isolation.level": "read_committed",
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
            "fetch.queue.backoff.ms": 10,
            "check.crcs": True,
            "log_level": LOG_ERRORS,
        }
    )
    consumer.assign([confluent_kafka.TopicPartition(TOPIC, partition, 0) for partition in range(PARTITIONS)])
    while True:
        records: list[Record] = []
        for message in consumer.consume(2000, timeout=0.5):
            if (error := message.error()) is not None:
                raise confluent_kafka.KafkaException(error)
            where = message.partition(), message.offset()
            records.append((*where, message.key(), message.value(), message.timestamp()[1]))
        yield records


CLIENTS: dict[str, Callable[[str], Iterator[list[Record]]]] = {
    "confluent-kafka": read_with_confluent_kafka,
    "kafka-python": read_with_kafka_python,
}


def read_all(result: Result, records: Iterator[list[Record]], verifier: Verifier, local_starts: dict[int, int]) -> None:
    """Reads until all records have arrived. Raises `TimeoutError` if no record arrives for a minute."""
    began = last_record = last_report = time.monotonic()
    for polled in records:
        now = time.monotonic()
        for partition, offset, key, value, timestamp_ms in polled:
            if partition is None or offset is None:
                raise ValueError("the client returned a record without a partition or an offset")
            verifier.check(partition, offset, key, value, timestamp_ms)
            result.from_remote_tier += offset < local_starts[partition]
        if polled:
            last_record = now
        elif now - last_record > STALL_S:
            raise TimeoutError(f"no record arrived for {STALL_S:.0f} s; the next ones are {verifier.next_sequence}")
        result.read, result.value_bytes, result.seconds = verifier.read, verifier.value_bytes, now - began
        if verifier.complete or len(verifier.mismatches) > 100:
            return
        if now - last_report > PROGRESS_S:
            last_report = now
            report(result)


def report(result: Result) -> None:
    print(json.dumps(asdict(result)), flush=True)


def main() -> int:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--client", choices=CLIENTS, required=True)
    arguments.add_argument("--bootstrap", required=True)
    arguments.add_argument("--records", type=int, required=True)
    arguments.add_argument("--first-timestamp-ms", type=int, required=True)
    arguments.add_argument("--local-starts", type=json.loads, required=True)
    given = arguments.parse_args()

    local_starts = {int(partition): int(start) for partition, start in given.local_starts.items()}
    verifier = Verifier(given.records, given.first_timestamp_ms)
    result = Result(given.client)
    try:
        read_all(result, CLIENTS[given.client](given.bootstrap), verifier, local_starts)
    except (kafka.errors.KafkaError, confluent_kafka.KafkaException, TimeoutError) as error:
        result.error = f"{type(error).__name__}: {error}"
    result.mismatches = verifier.mismatches[:10]
    result.done = verifier.complete
    report(result)
    return 0 if verifier.complete and not verifier.mismatches and result.error is None else 1


if __name__ == "__main__":
    sys.exit(main())
