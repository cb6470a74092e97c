"""`ExtentSource`: the source of chunks that are not in memory. It verifies every chunk before it returns it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from protocol.errors import CorruptBatchError
from protocol.records.record_batch import crc32c, verify_batches
from tiers.errors import CorruptSegmentError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.reader.chunk_cache import Extent
from tiers.reader.segment_reads import SegmentReads
from tiers.segment.indexes.segment_index import Chunk, SegmentIndex


class StoredExtent(NamedTuple):
    """An extent and the stored bytes of its chunks: `stored` holds the log bytes, or the encrypted ones."""

    extent: Extent
    stored: Sequence[memoryview]


class ExtentSource(Protocol):
    async def fetch(
        self, segment: RemoteLogSegmentMetadata, index: SegmentIndex, first_number: int, end_number: int
    ) -> StoredExtent:
        """Returns chunks from `first_number` on, below `end_number`, up to the first that is missing or damaged.

        This is one attempt. It returns at least one chunk. Raises `CorruptSegmentError` when the first chunk is
        damaged, and any `RemoteStorageError`."""


class StoreExtents:
    """An `ExtentSource` that reads all chunks by one ranged GET."""

    def __init__(self, reads: SegmentReads) -> None:
        self._reads = reads

    async def fetch(
        self, segment: RemoteLogSegmentMetadata, index: SegmentIndex, first_number: int, end_number: int
    ) -> StoredExtent:
        run = index.chunks()[first_number:end_number]
        start = run[0].stored_position
        end = run[-1].stored_position + run[-1].stored_bytes - 1
        data = (await self._reads.fetch_log_segment(segment, start, end)).toreadonly()
        positions = [chunk.stored_position - start for chunk in run]
        stored = [data[at : at + chunk.stored_bytes] for at, chunk in zip(positions, run, strict=True)]
        found = open_extent(segment, index, first_number, stored, len(data))
        if found is None:
            raise CorruptSegmentError(
                f"segment {segment.segment_id.id} of {segment.topic_id_partition}: "
                f"chunk {first_number} at {start} does not match its checksum"
            )
        return found


def open_extent(
    segment: RemoteLogSegmentMetadata,
    index: SegmentIndex,
    first_number: int,
    stored: Sequence[memoryview],
    size_bytes: int,
) -> StoredExtent | None:
    """Decrypts and verifies the chunks. Returns those before the first damaged one; None when the first is damaged.

    `size_bytes` is the memory that the views in `stored` keep alive.
    """
    chunks: list[memoryview] = []
    for number, stored_bytes in enumerate(stored, first_number):
        view = _log_bytes(index, number, stored_bytes)
        if view is None or not _is_intact(view, index.chunks()[number]):
            break
        chunks.append(view)
    if not chunks:
        return None
    return StoredExtent(Extent(segment.segment_id.id, first_number, tuple(chunks), size_bytes), stored[: len(chunks)])


def _log_bytes(index: SegmentIndex, number: int, stored: memoryview) -> memoryview | None:
    try:
        return index.open_chunk(number, stored)
    except CorruptSegmentError:
        return None


def _is_intact(view: memoryview, chunk: Chunk) -> bool:
    if len(view) != chunk.log_bytes:
        return False
    if chunk.crc32c is not None:
        return crc32c(view, 0, len(view)) == chunk.crc32c
    try:
        batches = verify_batches(view)
    except CorruptBatchError:
        return False
    return bool(batches) and batches[-1].end == len(view)
