"""Writes records at a steady rate and reads them at the tail, in a process of its own: what a live consumer feels.

Each line of the output has four numbers: the time at which the record was written (`time.monotonic`), milliseconds from
then to the acknowledgement, milliseconds from then to the record's arrival at the consumer, and by how many
milliseconds the probe itself wrote late. The next record is written at its time even if earlier ones have not arrived.
So a stall of the server counts for every record in it.
"""

from __future__ import annotations

import argparse
import os
import sys
import threading
import time
from dataclasses import dataclass
from typing import NoReturn

from confluent_kafka import Consumer, KafkaError, Message, Producer, TopicPartition

from bench.clients.librdkafka import TIMEOUT_S, Target, add_target, target_of
from bench.clients.lines import LineProcess, exit_when_stdin_closes

RECORD_BYTES = 256
RATE_PER_S = 200.0


@dataclass(frozen=True, slots=True)
class TailSample:
    at_s: float
    """When the record was written, by `time.monotonic`."""
    produce_ms: float
    consume_ms: float
    late_ms: float


class TailProbe(LineProcess):
    """A context manager that runs the probe. No other producer may write to partition 0 of the topic."""

    def __init__(self, target: Target, rate_per_s: float = RATE_PER_S) -> None:
        super().__init__("bench.clients.tail_probe", [*target.arguments(), "--rate", str(rate_per_s)])

    def samples(self) -> list[TailSample]:
        """Removes and returns the samples so far."""
        return [TailSample(*line) for line in self.take()]


class _Probe:
    def __init__(self, target: Target, rate_per_s: float) -> None:
        self._topic = target.topic
        self._interval_s = 1 / rate_per_s
        self._run = os.urandom(8)
        self._producer = Producer(target.producer_settings())
        self._consumer = Consumer(target.consumer_settings())
        self._written: dict[int, tuple[float, float]] = {}
        """The time and the lateness of each record that is not complete, by its number."""
        self._acknowledged: dict[int, float] = {}
        self._arrived: dict[int, float] = {}
        self._lock = threading.Lock()
        self._first_arrived = threading.Event()

    def run(self) -> NoReturn:
        exit_when_stdin_closes()
        where = TopicPartition(self._topic, 0)
        _, where.offset = self._consumer.get_watermark_offsets(where, TIMEOUT_S)
        self._consumer.assign([where])
        threading.Thread(target=self._read, daemon=True).start()
        self._write()

    def _write(self) -> NoReturn:
        self._send(-1, 0.0)  # opens the connections
        deadline = time.monotonic() + TIMEOUT_S
        while not self._first_arrived.is_set() and time.monotonic() < deadline:
            self._producer.poll(0.01)
        number, began = 0, time.monotonic()
        while True:
            due = began + number * self._interval_s
            while (left := due - time.monotonic()) > 0:
                self._producer.poll(left)
            self._send(number, -left * 1000)
            number += 1

    def _send(self, number: int, late_ms: float) -> None:
        value = (self._run + number.to_bytes(8, signed=True)).ljust(RECORD_BYTES, b".")

        def acknowledged(error: KafkaError | None, _: Message) -> None:
            if error is not None:
                sys.exit(f"a record was not acknowledged: {error}")
            self._complete(number, self._acknowledged)

        with self._lock:
            self._written[number] = time.monotonic(), late_ms
        self._producer.produce(self._topic, value, partition=0, on_delivery=acknowledged)

    def _read(self) -> NoReturn:
        while True:
            message = self._consumer.poll(0.2)
            if message is None:
                continue
            if (error := message.error()) is not None:
                if error.fatal() or error.code() == KafkaError._AUTO_OFFSET_RESET:
                    print(f"the tail cannot be read: {error}", file=sys.stderr)
                    os._exit(1)
                continue
            value = message.value() or b""
            if value.startswith(self._run):
                number = int.from_bytes(value[8:16], signed=True)
                if number < 0:
                    self._first_arrived.set()
                else:
                    self._complete(number, self._arrived)

    def _complete(self, number: int, of: dict[int, float]) -> None:
        now = time.monotonic()
        if number < 0:
            return
        with self._lock:
            of[number] = now
            if number not in self._acknowledged or number not in self._arrived:
                return
            written, late_ms = self._written.pop(number)
            produce_ms = (self._acknowledged.pop(number) - written) * 1000
            consume_ms = (self._arrived.pop(number) - written) * 1000
        print(f"{written:.6f} {produce_ms:.3f} {consume_ms:.3f} {late_ms:.3f}", flush=True)


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    add_target(arguments)
    arguments.add_argument("--rate", type=float, default=RATE_PER_S)
    given = arguments.parse_args()
    _Probe(target_of(given), given.rate).run()


if __name__ == "__main__":
    main()
