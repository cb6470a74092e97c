"""Reads a copy back and compares it. A copy counts only if the store returns every chunk and all indexes unchanged.

Only the store knows where the stored bytes lie, since they need not be the log's bytes. Nothing else may differ. A
store may lose a copy later, so `check_stored` looks once more before the broker's records are trimmed.
"""

from __future__ import annotations

from dataclasses import replace

from protocol.records.record_batch import crc32c
from tiers.errors import CorruptSegmentError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import SegmentCiphers, decode_indexes_object
from tiers.segment.indexes.segment_index import Chunk
from tiers.segment.segment_builder import BuiltSegment
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.verify.segment_verification import chunk_runs


async def verify_copied_segment(
    storage: RemoteStorageManager,
    metadata: RemoteLogSegmentMetadata,
    built: BuiltSegment,
    max_bytes: int,
    ciphers: SegmentCiphers | None = None,
) -> None:
    """Raises `CorruptSegmentError` when the stored segment differs. Holds up to `max_bytes`, or one larger chunk."""
    stored = decode_indexes_object(await storage.fetch_indexes(metadata), metadata)
    if replace(stored.metadata, custom_metadata=metadata.custom_metadata) != metadata:
        raise CorruptSegmentError(f"segment {metadata.segment_id.id}: the stored metadata belongs to something else")
    if replace(stored.indexes, remote_log_index=b"") != replace(built.indexes, remote_log_index=b""):
        raise CorruptSegmentError(
            f"segment {metadata.segment_id.id}: the stored indexes differ from those that were written"
        )
    index = stored.remote_log_index(ciphers)
    chunks = index.chunks()
    if [_log_of(chunk) for chunk in chunks] != [_log_of(chunk) for chunk in built.chunks]:
        raise CorruptSegmentError(
            f"segment {metadata.segment_id.id}: the stored index differs from the one that was written"
        )
    number = 0
    for run in chunk_runs(chunks, max_bytes):
        first, last = run[0].stored_position, run[-1].stored_position + run[-1].stored_bytes - 1
        data = await storage.fetch_log_segment(metadata, first, last)
        if len(data) != last - first + 1:
            raise CorruptSegmentError(
                f"segment {metadata.segment_id.id}: the store returned {len(data)} bytes for {first} to {last}"
            )
        for chunk in run:
            start = chunk.stored_position - first
            log_bytes = index.open_chunk(number, data[start : start + chunk.stored_bytes])
            number += 1
            if crc32c(log_bytes, 0, len(log_bytes)) != chunk.crc32c:
                raise CorruptSegmentError(
                    f"segment {metadata.segment_id.id}: the CRC at {chunk.stored_position} differs"
                )


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


def _log_of(chunk: Chunk) -> tuple[int, int, int, int | None]:
    return chunk.first_offset, chunk.last_offset, chunk.log_bytes, chunk.crc32c
