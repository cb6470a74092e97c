"""`SegmentVerification`: a stored segment is read back, whole, and everything in it named that is not what it was.

Every chunk is held against its checksum, every record batch in it against its CRC and its place, the indexes object
against its own checksums, against the segment's record and, in the same pass, against what the log gives. One damaged
chunk does not hide another one; but of what is damaged nobody asks whether its indexes are up to date.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import NamedTuple, TypeVar

from protocol.errors import CorruptBatchError
from protocol.records.record_batch import RecordBatch, crc32c, verify_batches
from tiers.errors import CorruptSegmentError, EncryptionKeyError, RemoteResourceNotFoundError, RemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes_object import IndexesObject, SegmentCiphers, decode_indexes_object
from tiers.segment.rebuilt_indexes import RebuiltIndexes
from tiers.segment.remote_log_index import RemoteLogIndex
from tiers.segment.segment_index import Chunk
from tiers.storage.remote_storage_manager import RemoteStorageManager

T = TypeVar("T")

_ATTEMPTS = 5
_BACKOFF_MS = 100
DEFAULT_RUN_BYTES = 8 << 20


class DamageKind(StrEnum):
    DAMAGED = "damaged"
    MISSING = "missing"
    STALE_INDEX = "stale index"


@dataclass(frozen=True, slots=True)
class Damage:
    """Offsets are inclusive. `position` is where it begins in the stored `.log`; None: it is not in there."""

    first_offset: int
    last_offset: int
    position: int | None
    what: str
    kind: DamageKind = DamageKind.DAMAGED


RecordCheck = Callable[[memoryview, Sequence[RecordBatch]], Iterable[tuple[RecordBatch, str]]]
"""Looks into the batches of a chunk, whose CRCs match, and gives those whose records cannot be read, and why."""


class ChunkRun(NamedTuple):
    """Adjacent chunks, one GET; `first_number` is that of the first of them. Both positions are inclusive."""

    first_number: int
    chunks: list[Chunk]
    start_position: int
    end_position: int


async def persistently(call: Callable[[], Awaitable[T]], pause_ms: int = _BACKOFF_MS) -> T:
    """What may pass is tried again a few times; the last error comes out."""
    for attempt in range(_ATTEMPTS):
        try:
            return await call()
        except RemoteStorageError as error:
            if not error.retriable or attempt == _ATTEMPTS - 1:
                raise
        await asyncio.sleep((pause_ms << attempt) / 1000)
    raise AssertionError("unreachable")


class SegmentVerification:
    """Of one segment whose `.indexes` object is `indexes`: `add` what was read for each of `runs`, then `finish`."""

    def __init__(
        self,
        segment: RemoteLogSegmentMetadata,
        indexes: bytes | memoryview,
        ciphers: SegmentCiphers | None,
        check_records: RecordCheck | None = None,
    ) -> None:
        self.segment = segment
        self.rebuilt = RebuiltIndexes(segment)
        self._check_records = check_records
        self.damages: list[Damage] = []
        self._stored: IndexesObject | None = None
        self._index: RemoteLogIndex | None = None
        try:
            self._stored = decode_indexes_object(indexes, segment)
            self._index = self._stored.remote_log_index(ciphers)
        except (CorruptSegmentError, EncryptionKeyError) as error:
            self.damages.append(whole_segment(segment, f"the .indexes object: {error}"))
            return
        self.damages += _differences(self._stored, segment)

    def runs(self, run_bytes: int = DEFAULT_RUN_BYTES) -> Iterator[ChunkRun]:
        """None where the indexes cannot be read: then nobody knows what the log must be."""
        if self._index is None:
            return
        number = 0
        for chunks in chunk_runs(self._index.chunks(), run_bytes):
            last = chunks[-1].stored_position + chunks[-1].stored_bytes - 1
            # One byte more than there should be, of the last: an object that is too long shows it.
            is_last = number + len(chunks) == len(self._index.chunks())
            yield ChunkRun(number, chunks, chunks[0].stored_position, last + is_last)
            number += len(chunks)

    def add(self, run: ChunkRun, stored: memoryview) -> None:
        """Of every run, in order; `stored` is what the store gave for its positions."""
        for number, chunk in enumerate(run.chunks, run.first_number):
            start = chunk.stored_position - run.start_position
            trouble = self._trouble(number, chunk, stored[start : start + chunk.stored_bytes])
            if trouble is not None:
                self.rebuilt.skip_chunk(chunk)
                self.damages.append(Damage(chunk.first_offset, chunk.last_offset, chunk.stored_position, trouble))
        last = run.chunks[-1]
        end = last.stored_position + last.stored_bytes
        if len(stored) > end - run.start_position:
            what = f"the .log object goes on after its last chunk, at {end}"
            self.damages.append(Damage(last.last_offset, last.last_offset, end, what))

    def miss_log(self) -> None:
        self.damages.append(missing_object(self.segment, ".log", 0))

    def finish(self) -> list[Damage]:
        if self._stored is not None and not self.damages:
            for what in self.rebuilt.differences(self._stored):
                self.damages.append(whole_segment(self.segment, what, DamageKind.STALE_INDEX))
        return self.damages

    def _trouble(self, number: int, chunk: Chunk, stored: memoryview) -> str | None:
        assert self._index is not None
        if len(stored) != chunk.stored_bytes:
            return f"the .log object has {len(stored)} of the chunk's {chunk.stored_bytes} bytes"
        try:
            log_bytes = self._index.open_chunk(number, stored)
        except CorruptSegmentError:
            return "the chunk is not what was encrypted"
        if len(log_bytes) != chunk.log_bytes:
            return f"{len(log_bytes)} log bytes, not {chunk.log_bytes}"
        crc = crc32c(log_bytes, 0, len(log_bytes))
        if chunk.crc32c is not None and crc != chunk.crc32c:
            return "the chunk's checksum differs"
        try:
            batches = verify_batches(log_bytes, chunk.first_offset)
            if not batches or batches[-1].end != len(log_bytes) or batches[-1].last_offset != chunk.last_offset:
                return "the chunk does not end with the record batch that its index entry names"
            trouble = self.rebuilt.add_chunk(chunk, crc, log_bytes, batches)
        except CorruptBatchError as error:
            return str(error)
        if self._check_records is not None:
            for batch, what in self._check_records(log_bytes, batches):
                position = chunk.stored_position + (batch.start if len(log_bytes) == len(stored) else 0)
                self.damages.append(Damage(batch.base_offset, batch.last_offset, position, what))
        return trouble


def whole_segment(
    segment: RemoteLogSegmentMetadata,
    what: str,
    kind: DamageKind = DamageKind.DAMAGED,
    position: int | None = None,
) -> Damage:
    return Damage(segment.start_offset, segment.end_offset, position, what, kind)


def missing_object(segment: RemoteLogSegmentMetadata, suffix: str, position: int | None = None) -> Damage:
    return whole_segment(segment, f"the {suffix} object is missing", DamageKind.MISSING, position)


async def verify_segment(
    storage: RemoteStorageManager,
    segment: RemoteLogSegmentMetadata,
    ciphers: SegmentCiphers | None,
    *,
    run_bytes: int = DEFAULT_RUN_BYTES,
    pause_ms: int = _BACKOFF_MS,
    on_read: Callable[[int], None] = lambda count: None,
) -> list[Damage]:
    """Holds about `run_bytes`, at least a chunk. `on_read` is told of log bytes as they are done.

    Raises `RemoteStorageError` when the store itself cannot be asked."""
    try:
        indexes = await persistently(lambda: storage.fetch_indexes(segment), pause_ms)
    except RemoteResourceNotFoundError:
        return [missing_object(segment, ".indexes")]
    verification = SegmentVerification(segment, indexes, ciphers)
    for run in verification.runs(run_bytes):
        try:
            view = await persistently(_range(storage, segment, run.start_position, run.end_position), pause_ms)
        except RemoteResourceNotFoundError:
            verification.miss_log()
            break
        verification.add(run, view)
        on_read(sum(chunk.log_bytes for chunk in run.chunks))
    return verification.finish()


def _range(
    storage: RemoteStorageManager, segment: RemoteLogSegmentMetadata, first: int, last: int
) -> Callable[[], Awaitable[memoryview]]:
    return lambda: storage.fetch_log_segment(segment, first, last)


def _differences(stored: IndexesObject, segment: RemoteLogSegmentMetadata) -> Iterator[Damage]:
    """Between the record, whose state and times move on, and what was written with the segment."""
    written = stored.metadata
    expected = replace(
        segment,
        broker_id=written.broker_id,
        event_timestamp_ms=written.event_timestamp_ms,
        state=written.state,
        custom_metadata=written.custom_metadata,
        txn_index_empty=written.txn_index_empty,
        clamped_to=written.clamped_to,
    )
    if expected != written:
        what = "the .indexes object and the segment's record differ in size, leader epochs or timestamp"
        yield Damage(segment.start_offset, segment.end_offset, None, what)


def chunk_runs(chunks: tuple[Chunk, ...], max_bytes: int) -> Iterator[list[Chunk]]:
    """Adjacent chunks, together one GET."""
    run: list[Chunk] = []
    size_bytes = 0
    for chunk in chunks:
        if run and size_bytes + chunk.stored_bytes > max_bytes:
            yield run
            run, size_bytes = [], 0
        run.append(chunk)
        size_bytes += chunk.stored_bytes
    if run:
        yield run
