"""Compares the answers themselves, at several versions: errors, bounds and epochs that clients hide from their users.

Every question has one right answer, which does not depend on a trim. REPLICA_NOT_AVAILABLE does not count as an answer,
since every client retries it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TypeVar
from uuid import UUID

from kafka.protocol.admin import DeleteRecordsRequest

from protocol.errors import ErrorCode
from tests.support.rigs.differential_workload import Topic
from tests.support.servers.peer import Peer, topic_id_of

TIMEOUT_S = 300.0
FETCH_VERSIONS = (4, 7, 10, 12, 17)
ZSTD_FROM = 10
"""Older versions get UNSUPPORTED_COMPRESSION_TYPE for remote zstd. Brokers since 4.0 do not check zstd any more."""
LIST_OFFSETS_VERSIONS = (1, 4, 7, 10)
WRONG_EPOCH = 99
UNKNOWN_PARTITION = 7
UNKNOWN_ID = UUID("7f3e8c1a-5b1d-4c39-9d60-3a1f0c9be812")

Answer = TypeVar("Answer", bound=tuple[object, ...])
Answers = dict[tuple[object, ...], object]
"""The answers by question."""


MARKERS_TIME = "when the broker wrote a marker"
"""Replaces the only value in these answers that must differ between two logs."""


def protocol_answers(topic: Topic, times: list[int], newest_ms: int) -> Answers:
    """Returns the answers of a topic. `times` are timestamps to look up. No record has one later than `newest_ms`."""
    host, _, port = topic.bootstrap.partition(":")
    with Peer((host, int(port))) as peer:
        return {
            **_fetched(peer, topic),
            **_offsets(peer, topic, times, newest_ms),
            **_epochs(peer, topic),
            **_refused_deletions(peer, topic),
        }


def _fetched(peer: Peer, topic: Topic) -> Answers:
    """Returns errors, HW, LSO, log start and diverging epoch. A request by topic id may also name an unknown id."""
    own_id = topic_id_of(topic.bootstrap, topic.name)
    start, end = topic.log_start, topic.log_end
    found: Answers = {}

    def ask(version: int, offset: int, epoch: int = -1, last: int = -1, partition: int = 0, known: bool = True) -> None:
        def once() -> tuple[object, ...]:
            response = peer.fetch(
                version,
                topic.name if known else f"{topic.name}-absent",
                own_id if known else UNKNOWN_ID,
                offset,
                partition=partition,
                max_bytes=1,
                last_fetched_epoch=last,
                current_leader_epoch=epoch,
            )
            (one,) = response.partitions
            bounds = (one.high_watermark, one.last_stable_offset, one.log_start_offset)
            return one.error_code, response.error_code, bounds, response.diverging_epoch(one)

        found["fetch", version, offset, epoch, last, partition, known] = settled(once)

    for version in FETCH_VERSIONS:
        with_records = (start, (start + end) // 2) if version >= ZSTD_FROM else ()
        for offset in (start - 1, *with_records, end, end + 1):
            for epoch in (-1, 0, WRONG_EPOCH) if version >= 9 else (-1,):
                ask(version, offset, epoch)
        ask(version, 0, partition=UNKNOWN_PARTITION)
        ask(version, 0, known=False)
        if version >= 12:
            for last in (0, WRONG_EPOCH):
                ask(version, start, last=last)
                ask(version, end, last=last)
    return found


def _offsets(peer: Peer, topic: Topic, times: list[int], newest_ms: int) -> Answers:
    """Returns the latest and earliest offsets, that of the largest timestamp, and those by time.

    It leaves out the special offsets of the local and the remote tier."""
    found: Answers = {}

    def ask(version: int, partition: int, timestamp: int, epoch: int = -1, isolation: int = 0) -> None:
        def once() -> tuple[object, ...]:
            (answer,) = peer.list_offsets(
                version,
                topic.name,
                [(partition, timestamp)],
                isolation_level=isolation,
                current_leader_epoch=epoch,
            )
            _, error, found_ms, offset, leader_epoch = answer
            return error, MARKERS_TIME if found_ms > newest_ms else found_ms, offset, leader_epoch

        found["offsets", version, partition, timestamp, epoch, isolation] = settled(once)

    for version in LIST_OFFSETS_VERSIONS:
        for timestamp in (-1, -2, *((-3,) if version >= 7 else ()), *times):
            for isolation in (0, 1) if version >= 2 else (0,):
                ask(version, 0, timestamp, isolation=isolation)
        ask(version, UNKNOWN_PARTITION, -2)
        if version >= 4:
            for timestamp in (-1, -2, times[0]):
                ask(version, 0, timestamp, epoch=WRONG_EPOCH)
    return found


def _epochs(peer: Peer, topic: Topic) -> Answers:
    def ask(version: int, epoch: int, current: int) -> tuple[object, ...]:
        return settled(lambda: peer.offset_for_leader_epoch(version, topic.name, epoch, current_leader_epoch=current))

    return {
        ("epoch", version, epoch, current): ask(version, epoch, current)
        for version in (2, 3, 4)
        for epoch in (-1, 0, WRONG_EPOCH)
        for current in (-1, 0, WRONG_EPOCH)
    }


def _refused_deletions(peer: Peer, topic: Topic) -> Answers:
    """Returns the errors of deletions beyond the end, below zero, and of an unknown partition or topic."""
    request, found = DeleteRecordsRequest, dict[tuple[object, ...], object]()
    for name, partition, offset in (
        (topic.name, 0, topic.log_end + 1),
        (topic.name, 0, -2),
        (topic.name, UNKNOWN_PARTITION, 0),
        (f"{topic.name}-absent", 0, 0),
    ):
        one = request.DeleteRecordsTopic.DeleteRecordsPartition(partition_index=partition, offset=offset)
        entry = request.DeleteRecordsTopic(name=name, partitions=[one])
        answer = peer.ask(request(topics=[entry], timeout_ms=20_000), 2)
        (answered,) = answer.topics[0].partitions
        found["delete", name == topic.name, partition, offset] = answered.error_code, answered.low_watermark
    return found


def settled(once: Callable[[], Answer]) -> Answer:
    """Returns the first answer without the error that every client retries. The error is the first field."""
    deadline = time.monotonic() + TIMEOUT_S
    while (answer := once())[0] == ErrorCode.REPLICA_NOT_AVAILABLE:
        assert time.monotonic() < deadline, "the answer is REPLICA_NOT_AVAILABLE for too long"
        time.sleep(0.05)
    return answer
