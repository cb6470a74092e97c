"""`verify_segment`: reads a stored segment back, whole, and names everything in it that is not what it was.

Every chunk is held against its checksum, every record batch in it against its CRC and its place, the indexes object
against its own checksums and against the segment's record. One damaged chunk does not hide another one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass, replace
from typing import TypeVar

from protocol.errors import CorruptBatchError
from protocol.records.record_batch import crc32c, verify_batches
from tiers.errors import CorruptSegmentError, EncryptionKeyError, RemoteResourceNotFoundError, RemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes_object import IndexesObject, SegmentCiphers, decode_indexes_object
from tiers.segment.segment_index import Chunk, SegmentIndex
from tiers.storage.remote_storage_manager import RemoteStorageManager

T = TypeVar("T")

_ATTEMPTS = 5
_BACKOFF_MS = 100
DEFAULT_RUN_BYTES = 8 << 20


@dataclass(frozen=True, slots=True)
class Damage:
    """Offsets are inclusive. `position` is where it begins in the stored `.log`; None: it is not in there."""

    first_offset: int
    last_offset: int
    position: int | None
    what: str


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

    def whole(what: str, position: int | None = None) -> list[Damage]:
        return [Damage(segment.start_offset, segment.end_offset, position, what)]

    try:
        data = await persistently(lambda: storage.fetch_indexes(segment), pause_ms)
    except RemoteResourceNotFoundError:
        return whole("the .indexes object is missing")
    try:
        stored = decode_indexes_object(data, segment)
        index = stored.remote_log_index(ciphers)
    except (CorruptSegmentError, EncryptionKeyError) as error:
        return whole(f"the .indexes object: {error}")
    damages = [*_differences(stored, segment)]
    number = 0
    for run in chunk_runs(index.chunks(), run_bytes):
        first, last = run[0].stored_position, run[-1].stored_position + run[-1].stored_bytes - 1
        try:
            view = await persistently(_range(storage, segment, first, last), pause_ms)
        except RemoteResourceNotFoundError:
            return [*damages, *whole("the .log object is missing", 0)]
        for chunk in run:
            start = chunk.stored_position - first
            trouble = _trouble(index, number, chunk, view[start : start + chunk.stored_bytes])
            if trouble is not None:
                damages.append(Damage(chunk.first_offset, chunk.last_offset, chunk.stored_position, trouble))
            on_read(chunk.log_bytes)
            number += 1
    return damages


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


def _trouble(index: SegmentIndex, number: int, chunk: Chunk, stored: memoryview) -> str | None:
    if len(stored) != chunk.stored_bytes:
        return f"the .log object has {len(stored)} of the chunk's {chunk.stored_bytes} bytes"
    try:
        log_bytes = index.open_chunk(number, stored)
    except CorruptSegmentError:
        return "the chunk is not what was encrypted"
    if len(log_bytes) != chunk.log_bytes:
        return f"{len(log_bytes)} log bytes, not {chunk.log_bytes}"
    if chunk.crc32c is not None and crc32c(log_bytes, 0, len(log_bytes)) != chunk.crc32c:
        return "the chunk's checksum differs"
    try:
        batches = verify_batches(log_bytes, chunk.first_offset)
    except CorruptBatchError as error:
        return str(error)
    if not batches or batches[-1].end != len(log_bytes) or batches[-1].last_offset != chunk.last_offset:
        return "the chunk does not end with the record batch that its index entry names"
    return None


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
