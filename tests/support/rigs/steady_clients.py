"""A producer and a consumer of one kind each, which go on until they are told to stop, and what happened to them.

The producers are idempotent and retry, as applications do. Each writes the numbers from 0 on into one partition. A
consumer is the only member of its group.
"""

from __future__ import annotations

import json
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import confluent_kafka
import kafka as kafka_python

from tests.support.servers.kafka import java_command

_INTERVAL_S = 0.02
_END_TIMEOUT_S = 120.0


@dataclass
class Seen:
    """`written` are the numbers that the broker acknowledged, `read` those that the consumer returned, in order."""

    name: str
    written: list[int] = field(default_factory=list)
    read: list[int] = field(default_factory=list)
    assignments: int = 0
    errors: list[str] = field(default_factory=list)


@contextmanager
def _threads(seen: Seen, *works: Callable[[threading.Event], None]) -> Iterator[None]:
    """Runs the producer first, and ends it first. The consumer ends when it has read all that was written."""
    stops = [threading.Event() for _ in works]

    def run(work: Callable[[threading.Event], None], stop: threading.Event) -> None:
        try:
            work(stop)
        except Exception as error:  # the test asserts that there is none
            seen.errors.append(f"{work.__name__}: {error!r}")

    threads = [threading.Thread(target=run, args=pair, daemon=True) for pair in zip(works, stops, strict=True)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        for stop, thread in zip(stops, threads, strict=True):
            stop.set()
            thread.join(_END_TIMEOUT_S)


def _until_all_is_read(seen: Seen, stop: threading.Event) -> Iterator[None]:
    deadline = None
    while True:
        if stop.is_set():
            deadline = deadline or time.monotonic() + _END_TIMEOUT_S
            if len(seen.read) >= len(seen.written) or time.monotonic() > deadline:
                return
        yield


@contextmanager
def librdkafka(bootstrap: str, topic: str, seen: Seen, folder: Path) -> Iterator[None]:
    def produce(stop: threading.Event) -> None:
        producer = confluent_kafka.Producer(
            {"bootstrap.servers": bootstrap, "enable.idempotence": True, "linger.ms": 0, "log_level": 3}
        )

        def heard(error: Any, message: Any) -> None:
            if error is None:
                seen.written.append(int(message.value() or b""))
            else:
                seen.errors.append(f"produce: {error}")

        number = 0
        while not stop.is_set():
            producer.produce(topic, str(number).encode(), partition=0, on_delivery=heard)
            number += 1
            producer.poll(_INTERVAL_S)
        if producer.flush(_END_TIMEOUT_S):
            seen.errors.append("produce: not all was sent")

    def consume(stop: threading.Event) -> None:
        settings = {"bootstrap.servers": bootstrap, "group.id": topic, "auto.offset.reset": "earliest", "log_level": 3}
        consumer = confluent_kafka.Consumer(settings)

        def assigned(*_: object) -> None:
            seen.assignments += 1

        consumer.subscribe([topic], on_assign=assigned)
        for _ in _until_all_is_read(seen, stop):
            message = consumer.poll(0.1)
            if message is not None and message.error() is not None:
                seen.errors.append(f"consume: {message.error()}")
            elif message is not None:
                seen.read.append(int(message.value() or b""))
        consumer.close()

    with _threads(seen, produce, consume):
        yield


@contextmanager
def kafka_python_client(bootstrap: str, topic: str, seen: Seen, folder: Path) -> Iterator[None]:
    def produce(stop: threading.Event) -> None:
        producer = kafka_python.KafkaProducer(bootstrap_servers=bootstrap, enable_idempotence=True, acks="all")
        number = 0
        sent = []
        while not stop.is_set():
            sent.append(producer.send(topic, str(number).encode(), partition=0))
            number += 1
            time.sleep(_INTERVAL_S)
        for number, future in enumerate(sent):
            future.get(_END_TIMEOUT_S)
            seen.written.append(number)
        producer.close()

    def consume(stop: threading.Event) -> None:
        consumer = kafka_python.KafkaConsumer(bootstrap_servers=bootstrap, group_id=topic, auto_offset_reset="earliest")

        class Listener(kafka_python.ConsumerRebalanceListener):  # type: ignore[misc]  # it ships no types
            def on_partitions_assigned(self, assigned: object) -> None:
                seen.assignments += 1

            def on_partitions_revoked(self, revoked: object) -> None:
                return

        consumer.subscribe([topic], listener=Listener())
        for _ in _until_all_is_read(seen, stop):
            # kafka-python 3.0.12 loses an assignment that comes right after the end of a poll. So the poll is long.
            for records in consumer.poll(5_000).values():
                seen.read += [int(record.value) for record in records]
        consumer.close()

    with _threads(seen, produce, consume):
        yield


@contextmanager
def java(bootstrap: str, topic: str, seen: Seen, folder: Path) -> Iterator[None]:
    """Kafka's verifiable clients, each in its own process. They tell what happens in lines of JSON."""
    retries = folder / "producer.properties"
    retries.write_text(f"retries=2147483647\nenable.idempotence=true\nclient.id={topic}\n")

    def events(
        main: str,
        arguments: Sequence[str],
        stop: threading.Event,
        on_event: Callable[[Any], None],
        is_done: Callable[[], bool] = lambda: True,
    ) -> None:
        command = java_command(f"org.apache.kafka.tools.{main}", heap_mib=128, log_level="ERROR")
        with subprocess.Popen(
            [*command, "--bootstrap-server", bootstrap, "--topic", topic, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as process:

            def end() -> None:
                stop.wait()
                deadline = time.monotonic() + _END_TIMEOUT_S
                while not is_done() and time.monotonic() < deadline:
                    time.sleep(_INTERVAL_S)
                process.terminate()

            ending = threading.Thread(target=end, daemon=True)
            ending.start()
            assert process.stdout is not None
            for line in process.stdout:
                on_event(json.loads(line))
        if not stop.is_set():
            seen.errors.append(f"{main} ended with {process.returncode}")

    def produce(stop: threading.Event) -> None:
        def heard(event: Any) -> None:
            if event["name"] == "producer_send_success":
                seen.written.append(int(event["value"]))
            elif event["name"] == "producer_send_error":
                seen.errors.append(f"produce: {event}")

        rate = str(round(1 / _INTERVAL_S))
        events(
            "VerifiableProducer", ["--throughput", rate, "--acks", "-1", "--command-config", str(retries)], stop, heard
        )

    def consume(stop: threading.Event) -> None:
        def heard(event: Any) -> None:
            if event["name"] == "partitions_assigned":
                seen.assignments += 1
            elif event["name"] == "record_data":
                seen.read.append(int(event["value"]))
            elif event["name"] == "offsets_committed" and not event["success"]:
                seen.errors.append(f"commit: {event}")

        arguments = ["--group-id", topic, "--reset-policy", "earliest", "--verbose"]
        events("VerifiableConsumer", arguments, stop, heard, lambda: len(seen.read) >= len(seen.written))

    with _threads(seen, produce, consume):
        yield


CLIENTS = {"Java": java, "librdkafka": librdkafka, "kafka-python": kafka_python_client}
