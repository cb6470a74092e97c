"""`read_local_range`: reads the record batches of an offset range from the leader: a broker, or a proxy in front of it.

Fetch uses the topic id, so a topic that was recreated under the same name is an error and is never read by mistake. The
reader finds a moved leader again. It repeats fetches without progress until `timeout_ms` have passed without progress.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

from pipeline.source.remote_read import RawBatches
from protocol.errors import CorruptBatchError, ErrorCode
from protocol.records.record_batch import RecordBatch, iterate_batches
from tiers.backoff import Backoff
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.broker.fetch import READ_COMMITTED, READ_UNCOMMITTED, FetchedPartition, FetchPosition, fetch_raw
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition
from tiers.segment.indexes.segment_index import AbortedTransactionRange
from tiers.segment.transactions import MARKER_NOT_COPIED

FETCH_BYTES = 8 << 20
TIMEOUT_MS = 120_000
_MAX_WAIT_MS = 500
_REQUEST_TIMEOUT_MS = 30_000
_BACKOFF = Backoff(base_ms=50, cap_ms=1_000)
_LANE = "read"
_FOR_GOOD = frozenset(
    {
        ErrorCode.TOPIC_AUTHORIZATION_FAILED,
        ErrorCode.CLUSTER_AUTHORIZATION_FAILED,
        ErrorCode.UNSUPPORTED_VERSION,
        ErrorCode.UNSUPPORTED_COMPRESSION_TYPE,
        ErrorCode.CORRUPT_MESSAGE,
    }
)


class OffsetOutOfRangeError(Exception):
    """The leader does not have `offset`: it was trimmed or expired, or it lies beyond the end of a new leader's log."""

    def __init__(self, partition: TopicIdPartition, offset: int) -> None:
        super().__init__(f"the leader of {partition} does not have offset {offset}")
        self.offset = offset


async def read_local_range(
    client: BrokerClient,
    partition: TopicIdPartition,
    first_offset: int,
    end_offset: int,
    *,
    is_committed_only: bool,
    timeout_ms: int = TIMEOUT_MS,
    fetch_bytes: int = FETCH_BYTES,
) -> AsyncGenerator[RawBatches]:
    """Yields the batches that hold `[first_offset, end_offset]` (inclusive). The first and the last batch may reach
    beyond the range.

    With `is_committed_only` the range must lie below the last stable offset. Raises `OffsetOutOfRangeError`, and
    `BrokerError`, with UNKNOWN_TOPIC_ID if the topic is gone."""
    offset, failures, is_stale = first_offset, 0, False
    progress_ms = monotonic_ms()
    while offset <= end_offset:
        try:
            fetched = await _fetch(client, partition, offset, fetch_bytes, is_committed_only, is_stale)
        except BrokerError as error:
            if not error.retriable or monotonic_ms() - progress_ms >= timeout_ms:
                raise
            fetched = None
        last = None if fetched is None else _last_batch(fetched, offset)
        if fetched is None or last is None:
            if monotonic_ms() - progress_ms >= timeout_ms:
                raise BrokerError(f"{partition}: no records arrived from offset {offset} on for {timeout_ms} ms")
            failures, is_stale = failures + 1, True
            await asyncio.sleep(_BACKOFF.pause_ms(failures) / 1000)
            continue
        offset, failures, is_stale = last.next_offset, 0, False
        yield RawBatches(fetched.records[: last.end], _aborted(fetched), offset)
        progress_ms = monotonic_ms()


async def _fetch(
    client: BrokerClient,
    partition: TopicIdPartition,
    offset: int,
    fetch_bytes: int,
    is_committed_only: bool,
    is_stale: bool,
) -> FetchedPartition | None:
    """Sends one Fetch. Returns None if the broker throttles the client."""
    max_age_ms = 0 if is_stale else 30_000
    leader = await client.leader_of(partition, _REQUEST_TIMEOUT_MS, max_age_ms)
    fetched = await fetch_raw(
        client,
        leader.node_id,
        [FetchPosition(partition.topic_id, partition.partition, offset, leader.leader_epoch, max_bytes=fetch_bytes)],
        max_bytes=fetch_bytes,
        max_wait_ms=_MAX_WAIT_MS,
        isolation_level=READ_COMMITTED if is_committed_only else READ_UNCOMMITTED,
        timeout_ms=_REQUEST_TIMEOUT_MS,
        lane=_LANE,
    )
    for one in fetched:
        if one.error == ErrorCode.OFFSET_OUT_OF_RANGE:
            raise OffsetOutOfRangeError(partition, offset)
        if one.error != ErrorCode.NONE:
            raise BrokerError(
                f"{partition}: the leader answered {one.error}", one.error, retriable=one.error not in _FOR_GOOD
            )
        return one
    return None


def _last_batch(fetched: FetchedPartition, offset: int) -> RecordBatch | None:
    """Returns the last whole batch, or None if there is none at `offset` or above."""
    last = None
    try:
        for last in iterate_batches(fetched.records):  # noqa: B007  # the last one is what is wanted
            pass
    except CorruptBatchError as error:
        raise BrokerError(f"offset {offset}: {error}", ErrorCode.CORRUPT_MESSAGE) from error
    return last if last is not None and last.last_offset >= offset else None


def _aborted(fetched: FetchedPartition) -> tuple[AbortedTransactionRange, ...]:
    """Returns the aborted ranges without an end: Fetch does not give it, the ABORT marker in the batches does."""
    return tuple(
        AbortedTransactionRange(one.producer_id, one.first_offset, MARKER_NOT_COPIED)
        for one in fetched.aborted_transactions
    )
