"""Reads a copy back. A copy counts only if the store returns its indexes and every chunk as they were written.

Only the store knows where the stored bytes lie, since they need not be the log's bytes. A store may lose a copy later,
so `check_stored` looks once more before the broker's records are trimmed.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from tiers.errors import CorruptSegmentError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import SegmentCiphers, decode_indexes_object
from tiers.segment.indexes.segment_index import Chunk
from tiers.storage.remote_storage_manager import RemoteStorageManager


class ChunkRun(NamedTuple):
    """Adjacent chunks that one GET reads. `first_number` is the number of the first. Both positions are inclusive."""

    first_number: int
    chunks: Sequence[Chunk]
    start_position: int
    end_position: int


async def read_back(
    storage: RemoteStorageManager,
    segment: RemoteLogSegmentMetadata,
    max_bytes: int,
    ciphers: SegmentCiphers | None = None,
) -> RemoteLogSegmentMetadata:
    """Reads both objects of a segment, and returns the metadata that its `.indexes` object has.

    The `.indexes` object has a checksum of each of its sections and of each chunk, so it needs no other comparison.
    Holds up to `max_bytes`, or one larger chunk. Raises `CorruptSegmentError` when an object is short or has a wrong
    checksum, `LaterFormatError` and `EncryptionKeyError` when this process cannot read it, and the store's errors."""
    stored = decode_indexes_object(await storage.fetch_indexes(segment), segment)
    index = stored.remote_log_index(ciphers)
    for run in chunk_runs(index.chunks(), max_bytes):
        data = await storage.fetch_log_segment(segment, run.start_position, run.end_position)
        for number, chunk in enumerate(run.chunks, run.first_number):
            start = chunk.stored_position - run.start_position
            try:
                index.open_chunk(number, data[start : start + chunk.stored_bytes])
            except CorruptSegmentError as error:
                raise CorruptSegmentError(f"segment {segment.segment_id.id}: {error}") from error
    return stored.metadata


async def check_stored(
    storage: RemoteStorageManager, metadata: RemoteLogSegmentMetadata, ciphers: SegmentCiphers | None = None
) -> None:
    """Checks that the store still has both objects of a copied segment, and that the keys open it.

    Reads the indexes and the last byte of the log: the copy was verified before. Raises `RemoteStorageError`."""
    index = decode_indexes_object(await storage.fetch_indexes(metadata), metadata).remote_log_index(ciphers)
    last = index.chunks()[-1]
    end = last.stored_position + last.stored_bytes - 1
    if len(await storage.fetch_log_segment(metadata, end, end)) != 1:
        raise CorruptSegmentError(f"segment {metadata.segment_id.id}: its log ends before {end}")


def chunk_runs(chunks: Sequence[Chunk], max_bytes: int) -> Iterator[ChunkRun]:
    """Splits chunks into runs of at most `max_bytes`, or of one larger chunk."""
    first = 0
    while first < len(chunks):
        start, end = chunks[first].stored_position, first + 1
        while end < len(chunks) and chunks[end].stored_position + chunks[end].stored_bytes - start <= max_bytes:
            end += 1
        last = chunks[end - 1]
        yield ChunkRun(first, chunks[first:end], start, last.stored_position + last.stored_bytes - 1)
        first = end
