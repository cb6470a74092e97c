"""Measures a client's latencies: of one record from producer to consumer, and of the first record after a seek."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Sequence

from confluent_kafka import Consumer, Producer, TopicPartition

RECORD_TIMEOUT_S = 30.0
LOG_ERRORS = 3  # a syslog level: librdkafka reports retries that succeed as warnings


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the value below which the given share of all values lies, or NaN if there are no values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def _consumer(bootstrap: str) -> Consumer:
    return Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "latency",
            "auto.offset.reset": "error",
            "enable.auto.commit": False,
            "fetch.wait.max.ms": 500,
            "fetch.queue.backoff.ms": 0,
            "log_level": LOG_ERRORS,
        }
    )


class TailProbe:
    """Writes one record at a time to partition 0, and waits until a consumer at the tail has read it.

    Producer and consumer connect to `bootstrap`. `samples` are milliseconds. The topic must exist, and no other
    producer may write to it.
    """

    def __init__(self, bootstrap: str, topic: str, interval_s: float = 0.01) -> None:
        self.samples: list[float] = []
        self.error: str | None = None
        self._topic = topic
        self._interval_s = interval_s
        self._stopped = threading.Event()
        self._producer = Producer(
            {"bootstrap.servers": bootstrap, "linger.ms": 0, "acks": "all", "log_level": LOG_ERRORS}
        )
        self._consumer = _consumer(bootstrap)
        self._thread = threading.Thread(target=self._run, name="tail-probe", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def take(self) -> list[float]:
        """Removes and returns the samples since the last call."""
        taken, self.samples = self.samples, []
        return taken

    def stop(self) -> None:
        self._stopped.set()
        self._thread.join(RECORD_TIMEOUT_S)

    def _run(self) -> None:
        try:
            where = TopicPartition(self._topic, 0)
            _, where.offset = self._consumer.get_watermark_offsets(where, RECORD_TIMEOUT_S)
            self._consumer.assign([where])
            self._round_trip()  # opens the connections
            while not self._stopped.wait(self._interval_s):
                self.samples.append(self._round_trip() * 1000)
        except Exception as error:
            self.error = f"{type(error).__name__}: {error}"
        finally:
            self._producer.flush(RECORD_TIMEOUT_S)
            self._consumer.close()

    def _round_trip(self) -> float:
        began = time.perf_counter()
        value = b"%f" % began
        self._producer.produce(self._topic, value, partition=0)
        self._producer.poll(0)
        message = self._consumer.poll(RECORD_TIMEOUT_S)
        if message is None:
            raise TimeoutError(f"a record was not read back within {RECORD_TIMEOUT_S:.0f} s")
        if message.error() is not None:
            raise RuntimeError(str(message.error()))
        if message.value() != value:
            raise RuntimeError("the consumer got another record than the one that was written")
        return time.perf_counter() - began


def seek_latencies(bootstrap: str, topic: str, ranges: dict[int, tuple[int, int]], count: int) -> list[float]:
    """Returns the milliseconds from a seek to its first record, without the time to connect.

    `ranges` has the bounds `[start, end)` of the random offsets, by partition."""
    consumer = _consumer(bootstrap)
    drawn = random.Random(917)
    samples: list[float] = []
    try:
        for number in range(count + 1):
            partition = drawn.choice(sorted(ranges))
            began = time.perf_counter()
            consumer.assign([TopicPartition(topic, partition, drawn.randrange(*ranges[partition]))])
            message = consumer.poll(RECORD_TIMEOUT_S)
            if message is None or message.error() is not None:
                raise TimeoutError(f"no record after a seek: {message.error() if message else 'nothing came'}")
            if number:  # the first seek opens the connections
                samples.append((time.perf_counter() - began) * 1000)
    finally:
        consumer.close()
    return samples
