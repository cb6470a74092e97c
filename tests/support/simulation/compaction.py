"""The log cleaner of a broker, for a log of transactions (docs/semantics.md 7).

It keeps the last committed record of each key, and no record of an aborted transaction. The first run that meets a
tombstone or a marker gives it a horizon; a run after the horizon removes it, a marker only if no record of its producer
is left before it. Offsets never change: a batch keeps its first and its last offset, and an empty batch goes.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

import google_crc32c

from protocol.records.record_batch import iterate_batches
from protocol.records.record_reader import Record, read_records
from tests.support.fakes.record_batches import build_batch
from tests.support.simulation.replica_log import ABORT, Batch, ReplicaLog

DELETE_RETENTION_MS = 12_000
"""How long the metadata topic keeps tombstones. Some faults last longer than half of it."""
_BASE_SEQUENCE_AT = 53


def compact(log: ReplicaLog, end: int, now_ms: int, delete_retention_ms: int) -> None:
    """Cleans the batches below `end`, which is at most the last stable offset."""
    cleaned = [one for one in log.batches if one.next_offset <= end]
    aborted = {
        one.base_offset
        for one in cleaned
        if any(
            one.producer_id == each.producer_id and each.first_offset <= one.base_offset < each.marker_offset
            for each in log.aborted
        )
    }
    records = {one.base_offset: _records(one) for one in cleaned if not one.ends and one.base_offset not in aborted}
    last = {each.key: each.offset for found in records.values() for each in found}
    kept: list[Batch] = []
    for batch in cleaned:
        if batch.ends:
            if not _is_over(log, batch.base_offset, now_ms, delete_retention_ms) or any(
                one.producer_id == batch.producer_id for one in kept
            ):
                kept.append(batch)
            elif batch.ends == ABORT:
                log.aborted = [one for one in log.aborted if one.marker_offset != batch.base_offset]
            continue
        found = records.get(batch.base_offset, ())
        left = tuple(
            one
            for one in found
            if last[one.key] == one.offset
            and (one.value is not None or not _is_over(log, one.offset, now_ms, delete_retention_ms))
        )
        if left == found and found:
            kept.append(batch)
        elif left:
            kept.append(batch._replace(data=_rewritten(batch, left)))
    log.batches = [*kept, *log.batches[len(cleaned) :]]


def _is_over(log: ReplicaLog, offset: int, now_ms: int, delete_retention_ms: int) -> bool:
    return log.delete_horizons_ms.setdefault(offset, now_ms + delete_retention_ms) <= now_ms


def _records(batch: Batch) -> Sequence[Record]:
    return _records_of(batch.data)


@lru_cache(maxsize=4_096)
def _records_of(data: bytes) -> Sequence[Record]:
    """Decodes a batch once, however often the cleaners of its replicas look at it."""
    (view,) = iterate_batches(data)
    return tuple(read_records(data, view))


def _rewritten(batch: Batch, records: Sequence[Record]) -> bytes:
    (view,) = iterate_batches(batch.data)
    data = bytearray(
        build_batch(
            batch.base_offset,
            records,
            last_offset=batch.next_offset - 1,
            leader_epoch=batch.leader_epoch,
            log_append_time_ms=batch.timestamp_ms,
            producer_id=view.producer_id,
            producer_epoch=view.producer_epoch,
            transactional=view.is_transactional,
        )
    )
    struct.pack_into(">i", data, _BASE_SEQUENCE_AT, view.base_sequence)
    struct.pack_into(">I", data, 17, google_crc32c.value(bytes(data[21:])))
    return bytes(data)
