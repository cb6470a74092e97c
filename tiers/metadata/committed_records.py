"""What a read_committed Fetch of a metadata partition says: its committed records as `MetadataEvent`s.

The broker sends aborted records too and names their transactions (semantics 7): a producer's records are dropped from
its aborted transaction's first offset up to the marker that ended it.

Nothing that somebody else writes into the topic may stop the reading, or count as written by an owner: what cannot be
read is foreign, and so is what only owners write but no transaction brought, such as the records of brokers with a tier
of their own. Foreign records are left out and counted, and one line tells of all that one read brought.

A record of a later release that no reader may ignore (`UnknownRecordError`) ends the read in front of it. The position
never passes that record, so the state need not store its offset. After an upgrade the process goes on there, and
replays every record once and in order. If compaction removes the record, a process without the upgrade goes on as well.
This process does not replay the records behind it: together with the unknown record they may mean something else.
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
from tiers.metadata.quick_values import making_many
from tiers.metadata.serde import (
    RecordKey,
    UnknownRecordError,
    check_known,
    decode_key,
    decode_value,
    key_of,
    nothing_key,
)
from tiers.metadata.state_replay import MetadataEvent, PartitionRead, UnknownRecord
from tiers.model.segment_metadata import (
    LogStartOffsetUpdate,
    OperatorAcceptanceUpdate,
    QuarantineDeletionUpdate,
    TopicDeletionUpdate,
)
from tiers.segment.control_record import end_transaction_marker

log = logging.getLogger(__name__)

_MAX_NAME_BYTES = 255
"""In a key: more than any writer's name has, and less than the state's own keys may."""
_ANYBODYS = (LogStartOffsetUpdate, QuarantineDeletionUpdate, OperatorAcceptanceUpdate, TopicDeletionUpdate)
"""Written without ownership, and so that neither order nor repetition matters: no transaction is needed."""


@making_many()
def read_committed(fetched: FetchedPartition, position: int) -> PartitionRead:
    """The events from `position` on. Raises `BrokerError` for the partition's error, `CorruptBatchError`."""
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
            # Compaction empties a marker whose batch it must keep: that one ends nothing that is still in the log.
            marker = end_transaction_marker(fetched.records, batch)
            if marker is not None and marker.aborts:
                aborting.discard(batch.producer_id)
        elif not (batch.is_transactional and batch.producer_id in aborting):
            unknown = _read_events(fetched.records, batch, position, events, foreign)
        if unknown is not None:
            # A position at the very start of a batch has the leader epoch of the batch before it.
            if unknown.offset > max(position, batch.base_offset):
                position, leader_epoch = unknown.offset, batch.leader_epoch
            break
        position, leader_epoch = max(position, batch.next_offset), batch.leader_epoch
    if foreign:
        offset, error = foreign[0]
        log.error(
            "foreign records in the remote log metadata topic are left out",
            extra={"metadata_partition": fetched.partition, "records": len(foreign), "offset": offset, "error": error},
        )
    return PartitionRead(fetched.partition, events, position, leader_epoch, len(foreign), unknown)


def _read_events(
    buf: Buffer, batch: RecordBatch, position: int, events: list[MetadataEvent], foreign: list[tuple[int, str]]
) -> UnknownRecord | None:
    """Adds the events of one batch up to an unknown record, which it returns.

    Adds to `foreign` the offset of each foreign record, and what is wrong with it."""
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
        # Its checksum is right, so a producer made it so, and none of ours does.
        foreign.append((batch.base_offset, str(error)))
    return None


def _event(record: Record, in_transaction: bool) -> MetadataEvent | None:
    """None for a record that says nothing to this version."""
    if record.value is None:
        if record.key is None:
            raise RemoteLogMetadataError("a record without key and value")
        key = decode_key(record.key)
        check_known(key)
        _checked(key)
        if not in_transaction and key != nothing_key(key.topic_id_partition):
            raise RemoteLogMetadataError(f"a tombstone of api key {key.api_key} outside of a transaction")
        return MetadataEvent(record.offset, record.timestamp, key, None)
    decoded = decode_value(record.value)
    if decoded is None:
        return None
    if not in_transaction and not isinstance(decoded, _ANYBODYS):
        raise RemoteLogMetadataError(f"a {type(decoded).__name__} outside of a transaction")
    return MetadataEvent(record.offset, record.timestamp, _checked(key_of(decoded)), decoded)


def _checked(key: RecordKey) -> RecordKey:
    if len(key.name) > _MAX_NAME_BYTES:
        raise RemoteLogMetadataError(f"a key of api key {key.api_key} with a name of {len(key.name)} bytes")
    return key
