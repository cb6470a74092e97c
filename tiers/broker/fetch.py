"""Fetches partitions by topic id on a `BrokerClient`, without a session and without decoding batches.

See docs/semantics.md 13.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kafka.protocol.consumer import FetchRequest

from protocol.apis.fetch.request import MAX_VERSION
from protocol.apis.fetch.response import FetchResponse, FetchResponsePartition, parse_fetch_response
from protocol.errors import ErrorCode, ProtocolError
from tiers.broker.client import DEFAULT_LANE, BrokerClient
from tiers.errors import BrokerError
from tiers.model.log_source import AbortedTransaction, EpochEndOffset

READ_UNCOMMITTED = 0
READ_COMMITTED = 1
_TOPIC_IDS_SINCE = 13
_SESSIONLESS_EPOCH = -1


@dataclass(frozen=True, slots=True)
class FetchPosition:
    """The position from which to fetch a partition.

    With a `leader_epoch` of -1, the broker does not check the leader epoch. With a `last_fetched_epoch` of -1, it does
    not check for divergence."""

    topic_id: UUID
    partition: int
    offset: int
    leader_epoch: int = -1
    max_bytes: int = 1024 * 1024
    last_fetched_epoch: int = -1


@dataclass(frozen=True, slots=True)
class FetchedPartition:
    """One partition of the answer. `records` is a view of the response; its last batch may be incomplete.

    `diverging` is the offset at which the log's history leaves that of the position's last fetched epoch
    (docs/semantics.md 6.3). The answer then has neither an error nor records."""

    topic_id: UUID
    partition: int
    error: int
    high_watermark: int
    last_stable_offset: int
    log_start_offset: int
    aborted_transactions: tuple[AbortedTransaction, ...]
    records: memoryview
    diverging: EpochEndOffset | None = None
    preferred_read_replica: int = -1
    """The node id to read from instead. The answer then has no records, and -1 for all offsets."""


async def fetch_raw(
    client: BrokerClient,
    node_id: int,
    positions: Sequence[FetchPosition],
    *,
    max_bytes: int,
    max_wait_ms: int = 0,
    isolation_level: int = READ_COMMITTED,
    timeout_ms: int | None = None,
    lane: str = DEFAULT_LANE,
) -> list[FetchedPartition]:
    """Fetches the positions from one broker.

    A broker that throttles answers without partitions, so the list may be shorter than `positions`. A request with
    `max_wait_ms` blocks the requests after it on its lane, so it needs its own lane. Raises `BrokerError` for an error
    of the whole response."""
    message = FetchRequest(
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=max_bytes,
        isolation_level=isolation_level,
        session_id=0,
        session_epoch=_SESSIONLESS_EPOCH,
        topics=_topics(positions),
        forgotten_topics_data=[],
        rack_id="",
    )
    body, version = await client.request_raw(
        node_id, message, timeout_ms, min_version=_TOPIC_IDS_SINCE, max_version=MAX_VERSION, lane=lane
    )
    try:
        response = parse_fetch_response(body, 0, version)
        fetched = [_partition(response, partition) for partition in response.partitions]
    except ProtocolError as error:
        raise BrokerError(f"a Fetch response cannot be read: {error}") from error
    if response.error_code != ErrorCode.NONE:
        raise BrokerError("the broker refused a Fetch request", response.error_code, retriable=True)
    return fetched


def _topics(positions: Sequence[FetchPosition]) -> list[Any]:
    by_topic: dict[UUID, list[Any]] = {}
    for position in positions:
        by_topic.setdefault(position.topic_id, []).append(
            FetchRequest.FetchTopic.FetchPartition(
                partition=position.partition,
                current_leader_epoch=position.leader_epoch,
                fetch_offset=position.offset,
                last_fetched_epoch=position.last_fetched_epoch,
                log_start_offset=-1,
                partition_max_bytes=position.max_bytes,
            )
        )
    return [FetchRequest.FetchTopic(topic_id=topic_id, partitions=parts) for topic_id, parts in by_topic.items()]


def _partition(response: FetchResponse, partition: FetchResponsePartition) -> FetchedPartition:
    assert isinstance(partition.topic, UUID)
    diverging = response.diverging_epoch(partition)
    return FetchedPartition(
        topic_id=partition.topic,
        partition=partition.partition,
        error=partition.error_code,
        high_watermark=partition.high_watermark,
        last_stable_offset=partition.last_stable_offset,
        log_start_offset=partition.log_start_offset,
        aborted_transactions=tuple(
            AbortedTransaction(producer_id, first_offset)
            for producer_id, first_offset in response.aborted_transactions(partition) or ()
        ),
        records=response.records(partition),
        diverging=None if diverging is None else EpochEndOffset(diverging.epoch, diverging.end_offset),
        preferred_read_replica=partition.preferred_read_replica,
    )
