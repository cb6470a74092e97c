"""A topic of both tiers behind a real proxy, all that was produced to it, and readers without Spark.

Partition 0 has remote segments, an overlap of both tiers and a tail that only the broker has; partition 1 is local.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from confluent_kafka import Message, Producer
from pyspark.sql.datasource import Filter, InputPartition
from pyspark.sql.types import StructType

from pipeline.source.datasource import KafkaTieredDataSource, PushingTieredReader
from pipeline.source.read_task import ReadTask
from tests.support.rigs.strict_consumer import log_bytes, until_trimmed
from tests.support.rigs.waiting import until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import TIMEOUT_S, TRANSACTION_TIMEOUT_MS, create_topic, until_decided
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

SEGMENT_BYTES = 100_000
FIRST_TIME_MS = 1_700_000_000_000
CODECS = ("none", "gzip", "snappy", "lz4", "zstd")
Row = dict[str, Any]


@dataclass
class ReadStage:
    kafka: KafkaCluster
    proxy: TidegateProcess
    folder: Path
    topic: str
    rows: list[Row] = field(default_factory=list)
    """As Spark should show them, headers included; those of aborted transactions are in `aborted` too."""
    aborted: set[tuple[int, int]] = field(default_factory=set)

    @property
    def options(self) -> dict[str, str]:
        """Read directly, both tiers."""
        return {"config": str(self.proxy.config), "subscribe": self.topic}

    def expected(self, *, partition: int | None = None, is_committed_only: bool = False) -> list[Row]:
        return sorted(
            (
                row
                for row in self.rows
                if row["topic"] == self.topic
                and partition in (None, row["partition"])
                and not (is_committed_only and (row["partition"], row["offset"]) in self.aborted)
            ),
            key=lambda row: (row["partition"], row["offset"]),
        )

    def is_at_rest(self) -> bool:
        """Waits until the records are remote."""
        reader, _ = reader_of({"config": self.options["config"], "assign": f'{{"{self.topic}":[0]}}'})
        local = tasks_of(reader)[-1].ranges[-1]
        return log_bytes(self.kafka, self.topic, local.first_offset) <= SEGMENT_BYTES

    def produce(self, count: int, *, partition: int = 0, codec: str = "none", topic: str | None = None) -> None:
        producer = Producer(
            {
                "bootstrap.servers": self.kafka.bootstrap_servers,
                "enable.idempotence": True,
                "compression.type": codec,
                "batch.num.messages": 20,
                "linger.ms": 5,
            }
        )
        self._send(producer, count, partition, topic or self.topic, is_aborted=False)

    def produce_in_transaction(self, count: int, *, commit: bool) -> None:
        producer = Producer(
            {
                "bootstrap.servers": self.kafka.bootstrap_servers,
                "transactional.id": f"{self.topic}-{time.monotonic_ns()}",
                "transaction.timeout.ms": TRANSACTION_TIMEOUT_MS,
                "batch.num.messages": 20,
            }
        )
        producer.init_transactions(TIMEOUT_S)
        producer.begin_transaction()
        self._send(producer, count, 0, self.topic, is_aborted=not commit)
        if commit:
            producer.commit_transaction(TIMEOUT_S)
        else:
            producer.abort_transaction(TIMEOUT_S)
        until_decided(self.kafka.bootstrap_servers, self.topic)

    def _send(self, producer: Producer, count: int, partition: int, topic: str, *, is_aborted: bool) -> None:
        """Returns when all are acknowledged."""
        for _ in range(count):
            number = len(self.rows)
            key = None if number % 7 == 0 else b"key-%d" % number
            value = None if number % 11 == 0 else os.urandom(300)
            headers = [("trace", b"%d" % number), ("empty", None)] if number % 5 == 0 else None
            time_ms = FIRST_TIME_MS + 1000 * number
            row: Row = {
                "key": key,
                "value": value,
                "topic": topic,
                "partition": partition,
                "timestamp": datetime.fromtimestamp(time_ms / 1000, UTC),
                "timestampType": 0,
                "headers": None if headers is None else [{"key": name, "value": header} for name, header in headers],
            }
            self.rows.append(row)

            def acknowledged(error: object, message: Message, row: Row = row) -> None:
                assert error is None, error
                row["offset"] = message.offset()
                if is_aborted:
                    self.aborted.add((partition, row["offset"]))

            producer.produce(
                topic,
                value,
                key,
                partition,
                on_delivery=acknowledged,
                timestamp=time_ms,
                headers=headers,  # type: ignore[arg-type]  # a header's value may be null
            )
            producer.poll(0)
        assert producer.flush(TIMEOUT_S) == 0


@contextmanager
def read_stage(kafka: KafkaCluster, folder: Path, topic: str) -> Iterator[ReadStage]:
    create_topic(kafka.bootstrap_servers, topic, partitions=2, config={"retention.ms": "-1"})
    rule = f'[[topics]]\nname = "{topic}*"\nlocal.retention.bytes = 1\nsegment.bytes = {SEGMENT_BYTES}\n'
    settings: dict[str, str | int] = {
        "remote.log.metadata.topic.name": f"__metadata-{topic}"[:200],
        "remote.log.visible.after.ms": 1000,
        "remote.log.manager.task.interval.ms": 1000,
    }
    with tidegate_over(kafka, folder, settings=settings, more=f'{rule}segment.ms = "1h"\n') as proxy:
        stage = ReadStage(kafka, proxy, folder, topic)
        for codec in CODECS:
            stage.produce(300, codec=codec)
        stage.produce_in_transaction(100, commit=False)
        stage.produce_in_transaction(100, commit=True)
        stage.produce(900)
        stage.produce(100, partition=1)
        until_trimmed(kafka, topic, 1900)
        stage.produce(50)
        until(stage.is_at_rest)
        yield stage


def reader_of(
    options: Mapping[str, str], schema: StructType | None = None, filters: Sequence[Filter] = ()
) -> tuple[PushingTieredReader, list[Filter]]:
    """Plans as Spark's planning process does, and returns the filters that it leaves to Spark."""
    source = KafkaTieredDataSource({**options, "pushdown": "true"})
    reader = source.reader(schema or source.schema())
    assert isinstance(reader, PushingTieredReader)
    return reader, list(reader.pushFilters(list(filters)))


def tasks_of(reader: PushingTieredReader) -> list[ReadTask]:
    found: Iterable[InputPartition] = reader.partitions()
    return [task for task in found if isinstance(task, ReadTask)]


def rows_of(options: Mapping[str, str], schema: StructType | None = None, filters: Sequence[Filter] = ()) -> list[Row]:
    """The rows by partition and offset as they came. The rows of a task are in the order of the log."""
    reader, _ = reader_of(options, schema, filters)
    return [row for task in tasks_of(reader) for batch in reader.read(task) for row in batch.to_pylist()]


def without_headers(rows: Iterable[Row]) -> list[Row]:
    return [{name: value for name, value in row.items() if name != "headers"} for row in rows]
