"""Decodes a read_committed Fetch of a metadata partition into the `MetadataEvent`s of its committed records.

The broker also sends the records of aborted transactions, and names those transactions (docs/semantics.md 7). Their
records are dropped, from the first offset of the aborted transaction up to the marker that ended it.

A record is foreign if it cannot be read, or if only owners write its type and it was written outside of a transaction.
Brokers with their own tier write such records. The reader skips and counts them, and logs one line per read.

A record of a later release that no reader may ignore (`UnknownRecordError`) ends the read in front of it, since it may
change the meaning of those behind it. The position never passes that record. After an upgrade, or when compaction has
removed it, the process continues there.
"""

from __future__ import annotations

import heapq
import logging

from protocol.errors import CorruptBatchError, ErrorCode
from protocol.primitives import Buffer
from protocol.records.record_batch import RecordBatch, verify_batches
from protocol.records.record_reader import Record, read_records
from tiers.broker.fetch import FetchedPartition
from tiers.errors import BrokerError, RemoteLogMetadataError
from tiers.metadata.records.serde import (
    CUT_API_KEY,
    LOCAL_LOG_START_API_KEY,
    LOG_START_OFFSET_API_KEY,
    TOPIC_DELETION_API_KEY,
    UnknownRecordError,
)
from tiers.metadata.state.replay import MetadataEvent, PartitionRead, UnknownRecord
from tiers.model.quick_values import garbage_collection_paused
from tiers.segment.transactions import end_transaction_marker

logger = logging.getLogger(__name__)

_MAX_NAME_BYTES = 255
"""The longest name in a key. It is longer than any writer's name, and keeps the state's own keys below LMDB's limit."""
_ANYBODYS = (CUT_API_KEY, LOG_START_OFFSET_API_KEY, TOPIC_DELETION_API_KEY)
"""The records that any process may write, without ownership and without a transaction.

Neither their order nor their repetition matters. This includes the tombstones of log starts and of a trim: a tombstone
comes in one batch with the log start that replaces the named one, or with the CUT that voids it. If a repeated request
brings a replaced log start back, it does no harm, since the higher log start counts. If it brings one back that has
ended, the owner asks the leader in its next round. If it ends a later trim, the next trim is recorded again."""
_ANYBODYS_TOMBSTONES = (LOG_START_OFFSET_API_KEY, LOCAL_LOG_START_API_KEY)


@garbage_collection_paused()
def read_committed(fetched: FetchedPartition, position: int) -> PartitionRead:
    """Returns the events from `position` on.

    Raises `BrokerError` for the partition's error, and `CorruptBatchError`."""
    if fetched.error != ErrorCode.NONE:
        raise BrokerError(f"metadata partition {fetched.partition}", fetched.error, retriable=True)
    to_abort = [(aborted.first_offset, aborted.producer_id) for aborted in fetched.aborted_transactions]
    heapq.heapify(to_abort)
    aborting: set[int] = set()
    events: list[MetadataEvent] = []
    foreign: list[tuple[int, str]] = []
    leader_epoch = -1
    unknown: UnknownRecord | None = None
    for batch in verify_batches(fetched.records):
        while to_abort and to_abort[0][0] <= batch.last_offset:
            aborting.add(heapq.heappop(to_abort)[1])
        if batch.is_control:
            # Compaction may empty a marker whose batch it keeps. The log then has no record of that transaction left.
            marker = end_transaction_marker(fetched.records, batch)
            if marker is not None and marker.aborts:
                aborting.discard(batch.producer_id)
        elif not (batch.is_transactional and batch.producer_id in aborting):
            unknown = _read_events(fetched.records, batch, position, events, foreign)
        if unknown is not None:
            # For a position at the start of a batch, the last leader epoch is that of the batch before it.
            if unknown.offset > max(position, batch.base_offset):
                position, leader_epoch = unknown.offset, batch.leader_epoch
            break
        position, leader_epoch = max(position, batch.next_offset), batch.leader_epoch
    if foreign:
        offset, error = foreign[0]
        logger.error(
            "foreign records in the remote log metadata topic are skipped",
            extra={"metadata_partition": fetched.partition, "records": len(foreign), "offset": offset, "error": error},
        )
    return PartitionRead(fetched.partition, events, position, leader_epoch, len(foreign), unknown)


def _read_events(
    buf: Buffer, batch: RecordBatch, position: int, events: list[MetadataEvent], foreign: list[tuple[int, str]]
) -> UnknownRecord | None:
    """Adds the events of one batch to `events`, up to an unknown record, which it returns.

    For each foreign record, it adds the offset and the error to `foreign`."""
    try:
        for record in read_records(buf, batch):
            if record.offset < position:
                continue
            try:
                event = _event(record, batch.is_transactional)
            except UnknownRecordError as error:
                if error.is_surely_ours or batch.is_transactional:
                    return UnknownRecord(record.offset, str(error))
                foreign.append((record.offset, str(error)))
            except RemoteLogMetadataError as error:
                foreign.append((record.offset, str(error)))
            else:
                if event is not None:
                    events.append(event)
    except CorruptBatchError as error:
        if batch.is_transactional:
            raise
        # The checksum is correct, so the producer wrote these bytes. No Tidegate producer writes such a batch.
        foreign.append((batch.base_offset, str(error)))
    return None


def _event(record: Record, in_transaction: bool) -> MetadataEvent | None:
    """Returns the event of a record; None: this release may ignore the record. Raises `RemoteLogMetadataError`."""
    event = MetadataEvent.of(record.offset, record.timestamp, record.key or b"", record.value)
    if event is None:
        return None
    api_key, name = event.key.api_key, event.key.name
    if len(name) > _MAX_NAME_BYTES:
        raise RemoteLogMetadataError(f"a key of api key {api_key} with a name of {len(name)} bytes")
    if not in_transaction and api_key not in (_ANYBODYS_TOMBSTONES if event.record is None else _ANYBODYS):
        what = "a tombstone" if event.record is None else "a record"
        raise RemoteLogMetadataError(f"{what} of api key {api_key} outside of a transaction")
    return event
