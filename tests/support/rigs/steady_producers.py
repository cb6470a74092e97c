"""Producers with acks=all that write a record every 10 ms, and the times of their acknowledgements."""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise

from confluent_kafka import KafkaError, Message, Producer

from tests.support.servers.kafka import java_command

_VERIFIABLE_PRODUCER = "org.apache.kafka.tools.VerifiableProducer"
"""It retries nothing, so a broker that died costs it some errors."""
_INTERVAL_S = 0.01
_END_TIMEOUT_S = 60.0


class Acknowledgements:
    """The times of a producer's acknowledgements, by the monotonic clock in seconds."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.errors = 0
        self._times: list[float] = []

    def note(self) -> None:
        self._times.append(time.monotonic())

    def __len__(self) -> int:
        return len(self._times)

    def longest_pause(self, begin: float) -> float:
        """Returns the longest pause that ended after `begin`, in seconds. The last one may not have ended yet."""
        times = [each for each in self._times if each >= begin - 1] + [time.monotonic()]
        return max((later - earlier for earlier, later in pairwise(times)), default=float("inf"))


@contextmanager
def librdkafka(bootstrap: str, topic: str, acknowledged: Acknowledgements) -> Iterator[None]:
    producer = Producer({"bootstrap.servers": bootstrap, "acks": "all", "linger.ms": 0, "log_level": 3})
    stopped = threading.Event()

    def heard(error: KafkaError | None, message: Message) -> None:
        if error is None:
            acknowledged.note()
        else:
            acknowledged.errors += 1

    def produce() -> None:
        while not stopped.is_set():
            producer.produce(topic, b"x" * 100, partition=0, on_delivery=heard)
            producer.poll(_INTERVAL_S)
        producer.flush(_END_TIMEOUT_S)

    thread = threading.Thread(target=produce, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stopped.set()
        thread.join()


@contextmanager
def java(bootstrap: str, topic: str, acknowledged: Acknowledgements) -> Iterator[None]:
    rate = str(round(1 / _INTERVAL_S))
    command = java_command(_VERIFIABLE_PRODUCER, heap_mib=128, log_level="ERROR")
    command += ["--bootstrap-server", bootstrap, "--topic", topic, "--throughput", rate, "--acks", "-1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as process:

        def read() -> None:
            assert process.stdout is not None
            for line in process.stdout:
                event = json.loads(line)["name"]
                if event == "producer_send_success":
                    acknowledged.note()
                elif event == "producer_send_error":
                    acknowledged.errors += 1

        thread = threading.Thread(target=read, daemon=True)
        thread.start()
        try:
            yield
        finally:
            process.terminate()
            process.wait()
            thread.join()
