"""`Writer`: a thread that produces to one topic through proxies that are up. It reports its results to
`AcknowledgedRecords`.

* Partition 0 gets only idempotent records, so its offsets have no gaps. The other partitions also get transactions, and
  some of those are aborted.
* A producer belongs to one proxy. It waits while the proxy is gone, so its records come late, or never.
* From time to time the writer deletes records from a topic that may lose records.
"""

from __future__ import annotations

import contextlib
import random
import threading
import time
from collections.abc import Callable, Iterator

from confluent_kafka import KafkaError, KafkaException, Message, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from tests.drill.acknowledged_records import AcknowledgedPartition, AcknowledgedRecords
from tests.drill.records import DrillRecord, encode
from tests.drill.rig import DrillProxy, DrillRig

RECORD_BYTES = 1_000
_TIMEOUT_S = 15.0
_BURST = (5, 30)
_TRANSACTIONS = 0.3
_ABORTS = 0.35
_DELETIONS_EVERY_S = 12.0
_DELETED_AT_ONCE = 150
_LOG_NOTHING = 0


class Writer:
    def __init__(
        self,
        rig: DrillRig,
        acknowledged: AcknowledgedRecords,
        topic: str,
        seed: int,
        *,
        records_per_s: float,
        deletes: bool,
    ) -> None:
        self._rig = rig
        self._acknowledged = acknowledged
        self._topic = topic
        self._chance = random.Random(seed)
        self._records_per_s = records_per_s
        self._deletes = deletes
        self._stopping = threading.Event()
        self._producers: dict[str, Producer] = {}
        self._transactional: tuple[str, Producer] | None = None
        self.produced = 0
        self.deletions = 0
        self.error: str | None = None

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        """Writes until `stop`. Then waits for the records in flight."""
        try:
            self._write()
        except Exception as error:
            self.error = f"the writer of {self._topic} ended: {error!r}"
            raise
        finally:
            for producer in self._producers.values():
                producer.flush(2 * _TIMEOUT_S)

    def _write(self) -> None:
        delete_at_s = time.monotonic() + _DELETIONS_EVERY_S
        while not self._stopping.is_set():
            up = self._rig.surviving()
            burst = self._chance.randint(*_BURST)
            if up:
                proxy = self._chance.choice(up)
                if self._chance.random() < _TRANSACTIONS:
                    self._transaction(proxy, burst)
                else:
                    self._burst(proxy, burst)
                if self._deletes and time.monotonic() >= delete_at_s:
                    delete_at_s = time.monotonic() + _DELETIONS_EVERY_S
                    self._delete(proxy)
            for producer in self._producers.values():
                producer.poll(0)
            self._stopping.wait(burst / self._records_per_s)

    def _burst(self, proxy: DrillProxy, count: int) -> None:
        producer = self._producers.get(proxy.name)
        if producer is None:
            producer = self._producers[proxy.name] = Producer(
                {
                    "bootstrap.servers": proxy.bootstrap,
                    "enable.idempotence": True,
                    "linger.ms": 5,
                    "message.timeout.ms": 60_000,
                    "queue.buffering.max.messages": 5_000,
                    "log_level": _LOG_NOTHING,
                }
            )
        for partition in self._acknowledged_of(self._chance.randrange(self._rig.topics.partitions), count):
            record = partition.new_record()
            with contextlib.suppress(BufferError):  # the proxy has been gone for a long time; the record is never sent
                producer.produce(
                    self._topic,
                    encode(record, RECORD_BYTES),
                    partition=partition.place[1],
                    on_delivery=_noted(partition, record),
                )
                self.produced += 1

    def _acknowledged_of(self, partition: int, count: int) -> Iterator[AcknowledgedPartition]:
        return (self._acknowledged[self._topic, partition] for _ in range(count))

    def _transaction(self, proxy: DrillProxy, count: int) -> None:
        """Writes a transaction. If its outcome is unknown, it reports nothing: the records may exist or not."""
        try:
            producer = self._transactional_producer(proxy)
            producer.begin_transaction()
            partition = self._acknowledged[self._topic, self._chance.randrange(1, self._rig.topics.partitions)]
            written: list[tuple[int, int]] = []
            records = [partition.new_record() for _ in range(count)]
            for record in records:

                def noted(error: KafkaError | None, message: Message, sequence: int = record.sequence) -> None:
                    offset = message.offset()
                    if error is None and offset is not None:
                        written.append((sequence, offset))

                value = encode(record, RECORD_BYTES)
                producer.produce(self._topic, value, partition=partition.place[1], on_delivery=noted)
            self.produced += count
            if self._chance.random() < _ABORTS:
                producer.flush(_TIMEOUT_S)
                producer.abort_transaction(_TIMEOUT_S)
                partition.aborted(record.sequence for record in records)
            else:
                producer.commit_transaction(_TIMEOUT_S)
                partition.acknowledged(written)
        except KafkaException:
            self._transactional = None

    def _transactional_producer(self, proxy: DrillProxy) -> Producer:
        """Returns a producer for the proxy. A new producer fences the one before, and ends its transaction."""
        if self._transactional is not None and self._transactional[0] == proxy.name:
            return self._transactional[1]
        producer = Producer(
            {
                "bootstrap.servers": proxy.bootstrap,
                "transactional.id": f"drill-{self._topic}",
                "transaction.timeout.ms": 10_000,
                "linger.ms": 5,
                "log_level": _LOG_NOTHING,
            }
        )
        producer.init_transactions(_TIMEOUT_S)
        self._transactional = proxy.name, producer
        return producer

    def _delete(self, proxy: DrillProxy) -> None:
        """Deletes the records below a certain record that lies not far above the last deletion."""
        partition = self._acknowledged[self._topic, self._chance.randrange(self._rig.topics.partitions)]
        certain = partition.certain_from(partition.asked_start)
        if len(certain) < 2 * _DELETED_AT_ONCE:
            return
        offset = certain[_DELETED_AT_ONCE]
        partition.ask_to_delete(offset)
        try:
            admin = AdminClient({"bootstrap.servers": proxy.bootstrap, "log_level": _LOG_NOTHING})
            asked = admin.delete_records([TopicPartition(*partition.place, offset)], request_timeout=_TIMEOUT_S)
            for answer in asked.values():
                answer.result(_TIMEOUT_S)
        except (KafkaException, TimeoutError):  # the records may be deleted or not
            return
        partition.deleted(offset)
        self.deletions += 1


def _noted(partition: AcknowledgedPartition, record: DrillRecord) -> Callable[[KafkaError | None, Message], None]:
    def noted(error: KafkaError | None, message: Message) -> None:
        offset = message.offset()
        if error is None and offset is not None:
            partition.acknowledged([(record.sequence, offset)])

    return noted
