"""What a read_committed Fetch of a metadata partition says: its committed records as `MetadataEvent`s.

The broker sends aborted records too and names their transactions (semantics 7): a producer's records are dropped from
its aborted transaction's first offset up to the marker that ended it. A record that cannot be read was not written by
this project: it is dropped and counted, for waiting for it would stop everything.
"""

from __future__ import annotations

import heapq
import logging
from collections.abc import Sequence

from protocol.errors import ErrorCode
from protocol.primitives import INT16, Buffer
from protocol.records.record_batch import RecordBatch, verify_batches
from protocol.records.record_reader import Record, read_records
from tiers.broker.fetch import FetchedPartition
from tiers.errors import BrokerError, RemoteLogMetadataError
from tiers.metadata.serde import decode_key, decode_value, key_of
from tiers.metadata.state_replay import MetadataEvent, PartitionRead

log = logging.getLogger(__name__)

_ABORT_MARKER = 0


def read_committed(fetched: FetchedPartition, position: int) -> PartitionRead:
    """The events from `position` on. Raises `BrokerError` for the partition's error, `CorruptBatchError`."""
    if fetched.error != ErrorCode.NONE:
        raise BrokerError(f"metadata partition {fetched.partition}", fetched.error, retriable=True)
    to_abort = [(aborted.first_offset, aborted.producer_id) for aborted in fetched.aborted_transactions]
    heapq.heapify(to_abort)
    aborting: set[int] = set()
    events: list[MetadataEvent] = []
    for batch in verify_batches(fetched.records):
        while to_abort and to_abort[0][0] <= batch.last_offset:
            aborting.add(heapq.heappop(to_abort)[1])
        if batch.is_control:
            if _is_abort_marker(fetched.records, batch):
                aborting.discard(batch.producer_id)
        elif not (batch.is_transactional and batch.producer_id in aborting):
            events += _events(fetched.partition, fetched.records, batch, position)
        position = max(position, batch.next_offset)
    return PartitionRead(fetched.partition, events, position)


def _is_abort_marker(buf: Buffer, batch: RecordBatch) -> bool:
    key = next(read_records(buf, batch)).key
    return key is not None and INT16.unpack_from(key, 2)[0] == _ABORT_MARKER


def _events(metadata_partition: int, buf: Buffer, batch: RecordBatch, position: int) -> Sequence[MetadataEvent]:
    events = []
    for record in read_records(buf, batch):
        if record.offset < position:
            continue
        try:
            event = _event(record)
        except RemoteLogMetadataError as error:
            log.error(
                "a remote log metadata record cannot be read and is left out",
                extra={"metadata_partition": metadata_partition, "offset": record.offset, "error": str(error)},
            )
            continue
        if event is not None:
            events.append(event)
    return events


def _event(record: Record) -> MetadataEvent | None:
    if record.value is None:
        if record.key is None:
            return None
        return MetadataEvent(record.offset, record.timestamp, decode_key(record.key), None)
    decoded = decode_value(record.value)
    if decoded is None:
        return None
    return MetadataEvent(record.offset, record.timestamp, key_of(decoded), decoded)
