"""`SegmentVerification` reads a whole stored segment and reports every difference from what was written.

It compares every chunk with its checksum, every record batch with its CRC and its place, and the indexes object with
its own checksums and with the segment's record. A damaged chunk does not hide another one.

In the same pass it makes the indexes from the log again and compares them, unless anything is damaged:

* The borders of the chunks come from the stored index.
* In a hole, and before its first batch of magic 2, a log names no leader epoch. There the epochs of the segment's
  record count, and those of the stored indexes before the segment.
* Only the neighbouring segments know of an aborted transaction that began earlier and wrote nothing here, or that ends
  later. So the stored ones count as reported: the log shows which of them end here.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from protocol.errors import CorruptBatchError
from protocol.records.record_batch import RecordBatch, verify_batches
from tiers.bounded_gather import in_order
from tiers.errors import (
    CorruptSegmentError,
    EncryptionKeyError,
    LogDivergedError,
    RemoteResourceNotFoundError,
    RemoteStorageError,
)
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import IndexesObject, SegmentCiphers, decode_indexes_object
from tiers.segment.indexes.segment_index import Chunk, SegmentIndex
from tiers.segment.leader_epochs import UnknownEpochStartError, clipped
from tiers.segment.segment_builder import Carried, IndexBuilder, SegmentOverflowError
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.storage.retries import FIRST_PAUSE_MS, with_retries
from tiers.verify.read_back import ChunkRun, chunk_runs

DEFAULT_RUN_BYTES = 8 << 20
_ANY_BYTES = 1 << 62


class DamageKind(StrEnum):
    DAMAGED = "damaged"
    MISSING = "missing"
    STALE_INDEX = "stale index"


@dataclass(frozen=True, slots=True)
class Damage:
    """A damage. The offsets are inclusive. `position` is its start in the stored `.log`; None: it is not in the log."""

    first_offset: int
    last_offset: int
    position: int | None
    what: str
    kind: DamageKind = DamageKind.DAMAGED


RecordCheck = Callable[[memoryview, Sequence[RecordBatch]], Iterable[tuple[RecordBatch, str]]]
"""Checks the batches of a chunk, whose CRCs match. Returns each batch with unreadable records, and why."""


class SegmentVerification:
    """Verifies one segment with the object `indexes`. The caller calls `add` for each of `runs`, then `finish`.

    `batches`, `records` and `missing_offsets` count what the log has, and the offsets that it lacks, which is no error.
    A compressed wrapper of magic 0 or 1 counts as one record."""

    def __init__(
        self,
        segment: RemoteLogSegmentMetadata,
        indexes: bytes | memoryview,
        ciphers: SegmentCiphers | None,
        check_records: RecordCheck | None = None,
    ) -> None:
        self.segment = segment
        self.batches = 0
        self.records = 0
        self.damages: list[Damage] = []
        self._check_records = check_records
        self._stored: IndexesObject | None = None
        self._index: SegmentIndex | None = None
        self._builder = IndexBuilder(segment.start_offset, chunk_bytes=_ANY_BYTES)
        self._reported: list[AbortedTransaction] = []
        self._has_other_epochs = False
        try:
            stored = self._stored = decode_indexes_object(indexes, segment)
            self._index = stored.remote_log_index(ciphers)
        except (CorruptSegmentError, EncryptionKeyError) as error:
            self.damages.append(whole_segment(segment, f"the .indexes object: {error}"))
            return
        self.damages += _differences(stored, segment)
        self._builder = IndexBuilder(segment.start_offset, Carried(stored.epochs_before()), _ANY_BYTES)
        self._reported = [
            AbortedTransaction(one.producer_id, one.first_offset) for one in stored.indexes.aborted_transactions
        ]

    @property
    def missing_offsets(self) -> int:
        return self._builder.missing_offsets

    def runs(self, run_bytes: int = DEFAULT_RUN_BYTES) -> Iterator[ChunkRun]:
        """Yields the reads that the caller must make. Yields none if the indexes are unreadable."""
        chunks = () if self._index is None else self._index.chunks()
        for run in chunk_runs(chunks, run_bytes):
            # The last read asks for one byte more than expected, which shows an object that is too long.
            is_last = run.chunks[-1] is chunks[-1]
            yield run._replace(end_position=run.end_position + is_last)

    def add(self, run: ChunkRun, stored: memoryview) -> None:
        """Verifies one run. The caller passes every run in order; `stored` is what the store returned for it."""
        for number, chunk in enumerate(run.chunks, run.first_number):
            start = chunk.stored_position - run.start_position
            trouble = self._trouble(number, chunk, stored[start : start + chunk.stored_bytes])
            if trouble is not None:
                self._builder.next_offset = max(self._builder.next_offset, chunk.last_offset + 1)
                self.damages.append(Damage(chunk.first_offset, chunk.last_offset, chunk.stored_position, trouble))
        last = run.chunks[-1]
        end = last.stored_position + last.stored_bytes
        if len(stored) > end - run.start_position:
            what = f"the .log object continues after the end of its last chunk, at {end}"
            self.damages.append(Damage(last.last_offset, last.last_offset, end, what))

    def miss_log(self) -> None:
        self.damages.append(missing_object(self.segment, ".log", 0))

    def finish(self) -> list[Damage]:
        if self._stored is not None and not self.damages:
            self.damages += [
                whole_segment(self.segment, f"{what} the log", DamageKind.STALE_INDEX)
                for what in self._stale(self._stored)
            ]
        return self.damages

    def _stale(self, stored: IndexesObject) -> Iterator[str]:
        """Yields a message per difference between the stored and the rebuilt indexes."""
        if self._has_other_epochs:
            yield "the leader epochs do not match"
            return
        indexes, rebuilt = stored.indexes, self._builder.indexes()
        if rebuilt.offset_index != indexes.offset_index:
            yield "the offset index does not match"
        if rebuilt.time_index != indexes.time_index:
            yield "the time index does not match"
        if rebuilt.remote_log_index != indexes.remote_log_index:
            yield "the remote log index does not match"
        if self._builder.max_timestamp_ms != self.segment.max_timestamp_ms:
            yield "the segment's latest timestamp does not match"
        start = self.segment.start_offset
        epochs = clipped(rebuilt.leader_epochs, start)
        if epochs != self.segment.segment_leader_epochs or epochs != clipped(indexes.leader_epochs, start):
            yield "the leader epochs do not match"
        if rebuilt.aborted_transactions != indexes.aborted_transactions:
            yield "the aborted transactions do not match"

    def _trouble(self, number: int, chunk: Chunk, stored: memoryview) -> str | None:
        assert self._index is not None
        try:
            log_bytes = self._index.open_chunk(number, stored)
            batches = verify_batches(log_bytes, chunk.first_offset)
            if not batches or batches[-1].end != len(log_bytes) or batches[-1].last_offset != chunk.last_offset:
                return "the chunk does not end with the record batch that its index entry names"
            self._rebuild(chunk, log_bytes, batches)
        except (CorruptSegmentError, CorruptBatchError, SegmentOverflowError) as error:
            return str(error)
        if self._check_records is not None:
            for batch, what in self._check_records(log_bytes, batches):
                position = chunk.stored_position + (batch.start if len(log_bytes) == len(stored) else 0)
                self.damages.append(Damage(batch.base_offset, batch.last_offset, position, what))
        return None

    def _rebuild(self, chunk: Chunk, log_bytes: memoryview, batches: Sequence[RecordBatch]) -> None:
        """Adds a chunk to the rebuilt indexes. Raises `CorruptBatchError`."""
        self.batches += len(batches)
        self.records += sum(1 if one.magic < 2 else one.records_count for one in batches if not one.is_control)
        if self._has_other_epochs:
            return
        try:
            checked = self._builder.checked(log_bytes, batches, self.segment.segment_leader_epochs)
        except (LogDivergedError, UnknownEpochStartError):
            self._has_other_epochs = True
            return
        self._builder.take(log_bytes, checked, self._reported)
        self._builder.end_chunk(chunk)


def whole_segment(
    segment: RemoteLogSegmentMetadata,
    what: str,
    kind: DamageKind = DamageKind.DAMAGED,
    position: int | None = None,
) -> Damage:
    return Damage(segment.start_offset, segment.end_offset, position, what, kind)


def missing_object(segment: RemoteLogSegmentMetadata, suffix: str, position: int | None = None) -> Damage:
    return whole_segment(segment, f"the {suffix} object is missing", DamageKind.MISSING, position)


@dataclass(frozen=True, slots=True)
class SegmentVerdict:
    """The result of one segment. `missing_offsets` is the number of offsets that its log lacks; compaction and
    transactions leave such gaps."""

    damages: tuple[Damage, ...]
    batches: int = 0
    records: int = 0
    log_bytes: int = 0
    missing_offsets: int = 0


async def verify_segment(
    storage: RemoteStorageManager,
    segment: RemoteLogSegmentMetadata,
    ciphers: SegmentCiphers | None,
    check_records: RecordCheck | None = None,
    *,
    run_bytes: int = DEFAULT_RUN_BYTES,
    gets_at_once: int = 1,
    pause_ms: int = FIRST_PAUSE_MS,
    on_read: Callable[[int], None] = lambda count: None,
    until_failure: list[Damage] | None = None,
) -> SegmentVerdict:
    """Verifies a stored segment. Holds up to `gets_at_once` times `run_bytes`, or that number of larger chunks.

    `on_read` is called with the number of log bytes after each read. Raises `RemoteStorageError` when the store does
    not answer. `until_failure` gets the damages that were found before that."""
    try:
        indexes = await with_retries(lambda: storage.fetch_indexes(segment), pause_ms)
    except RemoteResourceNotFoundError:
        return SegmentVerdict((missing_object(segment, ".indexes"),))
    verification = SegmentVerification(segment, indexes, ciphers, check_records)

    async def read(run: ChunkRun) -> tuple[ChunkRun, memoryview]:
        fetch = partial(storage.fetch_log_segment, segment, run.start_position, run.end_position)
        return run, await with_retries(fetch, pause_ms)

    log_bytes = 0
    try:
        calls = ((1, partial(read, run)) for run in verification.runs(run_bytes))
        async with aclosing(in_order(calls, gets_at_once)) as fetched:
            async for run, view in fetched:
                await asyncio.to_thread(verification.add, run, view)
                read_bytes = sum(chunk.log_bytes for chunk in run.chunks)
                log_bytes += read_bytes
                on_read(read_bytes)
    except RemoteResourceNotFoundError:
        verification.miss_log()
    except RemoteStorageError:
        if until_failure is not None:
            until_failure += verification.damages
        raise
    damages = await asyncio.to_thread(verification.finish)
    return SegmentVerdict(
        tuple(damages), verification.batches, verification.records, log_bytes, verification.missing_offsets
    )


def _differences(stored: IndexesObject, segment: RemoteLogSegmentMetadata) -> Iterator[Damage]:
    """Yields the differences between the segment's record and the metadata written with the segment.

    The record's state and times change later, so they are not compared."""
    written = stored.metadata
    expected = replace(
        segment,
        broker_id=written.broker_id,
        event_timestamp_ms=written.event_timestamp_ms,
        state=written.state,
        custom_metadata=written.custom_metadata,
        txn_index_empty=written.txn_index_empty,
        cut_at=written.cut_at,
    )
    if expected != written:
        what = "the .indexes object and the segment's record differ in size, leader epochs or timestamp"
        yield Damage(segment.start_offset, segment.end_offset, None, what)
