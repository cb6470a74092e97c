"""Writes transactions to real topics."""

from __future__ import annotations

import os
import time

from confluent_kafka import Producer

from tests.support.rigs.waiting import TIMEOUT_S
from tests.support.servers.producing import TRANSACTION_TIMEOUT_MS, until_end


class Writer:
    """Writes transactions of several producers to one partition, in batches of ten records of 1000 bytes.

    Every topic gets the same records in the same transactions, so that they have the same offsets.
    """

    def __init__(self, bootstrap: str, *topics: str) -> None:
        self._bootstrap = bootstrap
        self._topics = topics
        self._producers: dict[str, Producer] = {}
        self.end_offset = 0

    def plain(self, count: int) -> None:
        settings: dict[str, str | int | float | bool] = {"batch.num.messages": 10, "enable.idempotence": True}
        producer = Producer({"bootstrap.servers": self._bootstrap, **settings})
        self._send(producer, count)

    def begin(self, name: str) -> None:
        producer = self._producers.get(name)
        if producer is None:
            settings: dict[str, str | int | float | bool] = {"batch.num.messages": 10, "linger.ms": 5}
            settings |= {"transactional.id": f"{self._topics[0]}-{name}"}
            settings |= {"transaction.timeout.ms": TRANSACTION_TIMEOUT_MS}  # clients read meanwhile
            producer = self._producers[name] = Producer({"bootstrap.servers": self._bootstrap, **settings})
            producer.init_transactions(TIMEOUT_S)
        producer.begin_transaction()

    def send(self, name: str, count: int) -> None:
        self._send(self._producers[name], count)

    def abort(self, name: str) -> None:
        self._producers[name].abort_transaction(TIMEOUT_S)
        self._ended()

    def commit(self, name: str) -> None:
        self._producers[name].commit_transaction(TIMEOUT_S)
        self._ended()

    def _ended(self) -> None:
        """Waits for the marker, which comes after the coordinator's answer. It has the same offset in every topic."""
        self.end_offset += 1
        for topic in self._topics:
            until_end(self._bootstrap, topic, self.end_offset)

    def _send(self, producer: Producer, count: int) -> None:
        now_ms = time.time_ns() // 1_000_000
        for _ in range(count):
            value = os.urandom(500).hex().encode()
            for topic in self._topics:
                producer.produce(topic, value, partition=0, timestamp=now_ms)
        assert producer.flush(TIMEOUT_S) == 0
        self.end_offset += count

    def transaction(self, name: str, count: int, *, commit: bool) -> None:
        self.begin(name)
        self.send(name, count)
        (self.commit if commit else self.abort)(name)
