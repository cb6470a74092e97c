"""Measures the time from a seek to the first record, with librdkafka."""

from __future__ import annotations

import time
from collections.abc import Sequence

from confluent_kafka import Consumer, TopicPartition

from bench.clients.librdkafka import TIMEOUT_S, Target

MARKER_OFFSETS = 1
"""The offsets that the marker of a transaction takes."""

Place = tuple[int, int]
"""A partition and an offset."""


def first_records(target: Target, places: Sequence[Place], pause_s: float = 0.0) -> list[float]:
    """Returns the milliseconds from each seek to its first record, for all places but the first.

    The seek to the first place opens the connections. The consumer does not read ahead, so a seek never waits for the
    answer to an earlier one. It also reads what transactions aborted, so there is a record at every offset, except at
    the marker that ends a transaction. `pause_s` is the time between two seeks."""
    settings = {"queued.min.messages": 1, "isolation.level": "read_uncommitted"}
    consumer = Consumer({**target.consumer_settings(), **settings})
    samples: list[float] = []
    try:
        for partition, offset in places:
            began = time.perf_counter()
            consumer.assign([TopicPartition(target.topic, partition, offset)])
            message = consumer.poll(TIMEOUT_S)
            if message is None or message.error() is not None:
                raise TimeoutError(f"no record after a seek: {message.error() if message else 'nothing came'}")
            if (message.offset() or 0) - offset not in (0, MARKER_OFFSETS):
                raise RuntimeError(f"a seek to {offset} gave the record at {message.offset()}")
            samples.append((time.perf_counter() - began) * 1000)
            consumer.unassign()
            time.sleep(pause_s)
    finally:
        consumer.close()
    return samples[1:]
