"""`OutageProbe` repeats, during an outage of the store, the operations that the outage must not affect.

It creates topics, adds partitions, produces records, and reads them from the local tier, through proxies that are up. A
try does not count if a proxy or the broker went away or came back during it.
"""

from __future__ import annotations

import threading
import time
import uuid
from contextlib import suppress

from confluent_kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from confluent_kafka.cimpl import NewPartitions, NewTopic

from tests.drill.acknowledged_records import AcknowledgedRecords
from tests.drill.rig import DrillProxy, DrillRig
from tests.drill.violations import OUTAGE, Violations

_TIMEOUT_S = 30.0
_PAUSE_S = 1.0
_LOG_NOTHING = 0


class OutageProbe:
    """Call `run` in its own thread. It ends after `stop`."""

    def __init__(self, rig: DrillRig, acknowledged: AcknowledgedRecords, violations: Violations) -> None:
        self._rig = rig
        self._acknowledged = acknowledged
        self._violations = violations
        self._stopping = threading.Event()
        self.tries = 0
        """The number of undisturbed tries. Each try does all operations."""
        self.slowest_s = 0.0
        self.error: str | None = None

    def stop(self) -> None:
        self._stopping.set()

    def run(self) -> None:
        try:
            while not self._stopping.wait(_PAUSE_S):
                up = self._rig.surviving()
                if up and self._rig.store_is_away:
                    self._try(up[self.tries % len(up)])
        except Exception as error:
            self.error = f"the probe ended: {error!r}"
            raise

    def _try(self, proxy: DrillProxy) -> None:
        began_s, trouble = time.monotonic(), None
        try:
            self._use_a_new_topic(proxy)
            self._read_the_tail(proxy)
        except (KafkaException, TimeoutError) as error:
            trouble = repr(error)
        took_s = time.monotonic() - began_s
        if not proxy.is_up or self._rig.disrupted_at_s >= began_s:
            return
        self.tries += 1
        self.slowest_s = max(self.slowest_s, took_s)
        if trouble is not None:
            self._violations.add(OUTAGE, f"{proxy.name}, after {took_s:.1f} s: {trouble}")

    def _use_a_new_topic(self, proxy: DrillProxy) -> None:
        """Creates a topic, adds a partition, writes to the new partition, reads from it, and deletes the topic."""
        topic = f"drill-probe-{uuid.uuid4().hex[:8]}"
        admin = AdminClient({"bootstrap.servers": proxy.bootstrap, "log_level": _LOG_NOTHING})
        admin.create_topics([NewTopic(topic, num_partitions=1, replication_factor=1)])[topic].result(_TIMEOUT_S)
        try:
            admin.create_partitions([NewPartitions(topic, 2)])[topic].result(_TIMEOUT_S)
            _produce(proxy, topic, 1)
            self._read(proxy, TopicPartition(topic, 1, 0))
        finally:
            admin.delete_topics([topic])[topic].result(_TIMEOUT_S)

    def _read_the_tail(self, proxy: DrillProxy) -> None:
        """Reads the newest certain record of each tiered partition, which is always local."""
        for partition in self._acknowledged.partitions.values():
            certain = partition.certain_from(partition.asked_start)
            if certain:
                self._read(proxy, TopicPartition(*partition.place, certain[-1]))

    def _read(self, proxy: DrillProxy, at: TopicPartition) -> None:
        settings = {"bootstrap.servers": proxy.bootstrap, "group.id": "unused", "log_level": _LOG_NOTHING}
        consumer = Consumer({**settings, "auto.offset.reset": "error"})
        try:
            consumer.assign([at])
            deadline_s = time.monotonic() + _TIMEOUT_S
            while time.monotonic() < deadline_s:
                message = consumer.poll(0.5)
                if message is not None and message.error() is None:
                    return
            raise TimeoutError(f"{at.topic} {at.partition} {at.offset} was not read in {_TIMEOUT_S:.0f} s")
        finally:
            consumer.close()


def _produce(proxy: DrillProxy, topic: str, partition: int) -> None:
    """Produces a record. Retries, since brokers learn of a new partition late, and librdkafka does not retry then."""
    errors: list[KafkaError | None] = []
    deadline_s = time.monotonic() + _TIMEOUT_S
    while time.monotonic() < deadline_s:
        producer = Producer({"bootstrap.servers": proxy.bootstrap, "acks": "all", "log_level": _LOG_NOTHING})
        with suppress(KafkaException):
            producer.produce(topic, b"probe", partition=partition, on_delivery=lambda error, _: errors.append(error))
            producer.flush(_TIMEOUT_S)
        if errors and errors[-1] is None:
            return
        time.sleep(0.1)
    raise TimeoutError(f"no record was acknowledged: {errors[-1:]}")
