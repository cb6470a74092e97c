"""Reads a range of a partition again and again with librdkafka, as fast as it can, in a process of its own.

Each line of the output has two numbers: the time (`time.monotonic`), and the bytes of record values so far.
"""

from __future__ import annotations

import argparse
import sys
import time
from dataclasses import dataclass
from typing import NoReturn

from confluent_kafka import Consumer, TopicPartition

from bench.clients.librdkafka import Target, add_target, target_of
from bench.clients.lines import LineProcess, exit_when_stdin_closes

REPORT_S = 0.1
MESSAGES = 4000


@dataclass(frozen=True, slots=True)
class Range:
    """The offsets `[start, end)` of a partition."""

    partition: int
    start: int
    end: int

    def at(self, share: float) -> int:
        """Returns the offset behind that share of the range."""
        return self.start + int(share * (self.end - self.start))


class BackfillReader(LineProcess):
    """A context manager that runs the reader. It begins behind a share of the range, and starts over at its end."""

    def __init__(self, target: Target, over: Range, begin_at: float = 0.0) -> None:
        bounds = [str(over.partition), str(over.start), str(over.end), str(over.at(begin_at))]
        super().__init__("bench.clients.backfill_reader", [*target.arguments(), *bounds])


def read(target: Target, over: Range, first: int) -> NoReturn:
    exit_when_stdin_closes()
    consumer = Consumer(target.consumer_settings())
    consumer.assign([TopicPartition(target.topic, over.partition, first)])
    total, reported_at = 0, 0.0
    while True:
        messages = consumer.consume(MESSAGES, REPORT_S)
        for message in messages:
            if (error := message.error()) is not None:
                sys.exit(f"the backfill ended: {error}")
            total += len(message)
        now = time.monotonic()
        if messages and now - reported_at >= REPORT_S:
            reported_at = now
            print(f"{now:.6f} {total}", flush=True)
        if messages and (messages[-1].offset() or 0) >= over.end - 1:
            consumer.assign([TopicPartition(target.topic, over.partition, over.start)])


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__)
    add_target(arguments)
    for name in ("partition", "start", "end", "first"):
        arguments.add_argument(name, type=int)
    given = arguments.parse_args()
    read(target_of(given), Range(given.partition, given.start, given.end), given.first)


if __name__ == "__main__":
    main()
