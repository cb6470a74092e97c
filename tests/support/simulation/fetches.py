"""A broker's side of Fetch, with long polls (docs/semantics.md 2.3, 3.1, 6.3)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from functools import partial
from typing import NamedTuple
from uuid import UUID

from protocol.apis.fetch.encoding import encode_partition, encode_response
from protocol.apis.fetch.response import AbortedTransaction, EpochEndOffset
from protocol.errors import ErrorCode
from protocol.primitives import Buffer
from tests.support.simulation.cluster import SimBroker, SimCluster, SimPartition

FETCH_VERSION = 16
"""The version of the clients' requests."""


class AskedPartition(NamedTuple):
    topic_id: UUID
    partition: int
    offset: int
    leader_epoch: int
    last_fetched_epoch: int
    max_bytes: int


class AskedFetch(NamedTuple):
    version: int
    max_wait_ms: int
    min_bytes: int
    max_bytes: int
    is_read_committed: bool
    partitions: Sequence[AskedPartition]


class _Answer(NamedTuple):
    entry: Callable[[], Sequence[Buffer]]
    """Encodes the answer. Most attempts of a long poll find nothing new, and are never sent."""
    size: int
    ends_wait: bool


def fetch(cluster: SimCluster, broker: SimBroker, asked: AskedFetch, correlation_id: int) -> asyncio.Future[bytes]:
    """Returns the whole payload, header included, when the broker answers."""
    answered: asyncio.Future[bytes] = cluster.loop.create_future()
    watched: list[SimPartition] = []

    def attempt(is_last: bool) -> None:
        if answered.done():
            return
        entries = _read_all(cluster, broker, asked)
        size = sum(one.size for one in entries)
        if is_last or size >= asked.min_bytes or any(one.ends_wait for one in entries):
            answered.set_result(_encode(asked, entries, correlation_id))
            for partition in watched:
                partition.watchers.remove(retry)

    def retry() -> None:
        attempt(False)

    attempt(asked.max_wait_ms <= 0)
    if not answered.done():
        for one in asked.partitions:
            topic = cluster.topic_by_id(broker, one.topic_id)
            if topic is not None and one.partition < len(topic.partitions):
                watched.append(topic.partitions[one.partition])
                watched[-1].watchers.append(retry)
        cluster.loop.later(asked.max_wait_ms / 1000, attempt, True)
    return answered


def _encode(asked: AskedFetch, entries: Sequence[_Answer], correlation_id: int) -> bytes:
    topics: list[tuple[UUID, list[Sequence[Buffer]]]] = []
    for one, answer in zip(asked.partitions, entries, strict=True):
        if not topics or topics[-1][0] != one.topic_id:
            topics.append((one.topic_id, []))
        topics[-1][1].append(answer.entry())
    return b"".join(encode_response(asked.version, correlation_id, topics))


def _read_all(cluster: SimCluster, broker: SimBroker, asked: AskedFetch) -> list[_Answer]:
    left, min_one = asked.max_bytes, True
    answers = []
    for one in asked.partitions:
        answer = _read(cluster, broker, asked, one, left, min_one)
        left = max(0, left - answer.size)
        min_one = min_one and not answer.size
        answers.append(answer)
    return answers


def _refused(asked: AskedFetch, one: AskedPartition, code: int) -> _Answer:
    return _Answer(partial(encode_partition, asked.version, one.partition, error_code=code), 0, True)


def _read(
    cluster: SimCluster, broker: SimBroker, asked: AskedFetch, one: AskedPartition, left: int, min_one: bool
) -> _Answer:
    topic = cluster.topic_by_id(broker, one.topic_id)
    if topic is None:
        return _refused(asked, one, ErrorCode.UNKNOWN_TOPIC_ID)
    partition = topic.partitions[one.partition]
    code = cluster.check_leader(broker, partition, one.leader_epoch)
    if code:
        return _refused(asked, one, code)
    log = partition.replicas[broker.node_id]
    diverging: EpochEndOffset | None = None
    if one.last_fetched_epoch >= 0:
        epoch, end = log.end_offset_for(one.last_fetched_epoch)
        if epoch < 0 or end < 0 or one.offset < log.start:
            return _refused(asked, one, ErrorCode.OFFSET_OUT_OF_RANGE)
        if epoch < one.last_fetched_epoch or end < one.offset:
            diverging = EpochEndOffset(epoch, end)
    if diverging is None and not log.start <= one.offset <= log.end:
        return _refused(asked, one, ErrorCode.OFFSET_OUT_OF_RANGE)
    records = b""
    if diverging is None:
        bound = log.last_stable_offset if asked.is_read_committed else log.high_watermark
        if one.offset <= partition.unreadable_at < log.end:
            damaged = log.batch_start(partition.unreadable_at)
            if damaged is not None and damaged <= one.offset < bound:
                return _refused(asked, one, ErrorCode.KAFKA_STORAGE_ERROR)
            bound = bound if damaged is None else min(bound, damaged)
        records, _ = log.read(one.offset, bound, min(one.max_bytes, left), min_one)
    aborted: list[AbortedTransaction] | None = None
    if asked.is_read_committed:
        # A broker looks for the end of the records in a sparse index, so it also names later transactions.
        found = log.aborted_between(one.offset, log.end) if records else []
        aborted = [AbortedTransaction(producer_id, first) for producer_id, first in found]
    entry = partial(
        encode_partition,
        asked.version,
        one.partition,
        high_watermark=log.high_watermark,
        last_stable_offset=log.last_stable_offset,
        log_start_offset=log.start,
        aborted_transactions=aborted,
        records=(records,),
        diverging_epoch=diverging,
    )
    return _Answer(entry, len(records), diverging is not None)
