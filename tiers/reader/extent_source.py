"""`ExtentSource` reads the chunks that are not in memory, and verifies every chunk before it returns it."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

from protocol.records.record_batch import crc32c
from tiers.errors import CorruptSegmentError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.reader.chunk_cache import ChunkKey, Extent
from tiers.reader.disk_chunk_cache import DiskChunkCache
from tiers.reader.hedged_reads import HedgedReads
from tiers.segment.indexes.segment_index import Chunk, SegmentIndex
from tiers.storage.circuit_breaker import CircuitBreakers
from tiers.storage.locations import decode_location


@dataclass(frozen=True, slots=True)
class IndexedSegment:
    """A remote segment whose index is decoded, so that its chunks can be read."""

    metadata: RemoteLogSegmentMetadata
    index: SegmentIndex

    @property
    def chunks(self) -> Sequence[Chunk]:
        return self.index.chunks()

    def key(self, number: int) -> ChunkKey:
        return ChunkKey(self.metadata.segment_id.id, number)

    @property
    def end_number(self) -> int:
        """The number after the last chunk with offsets up to `valid_end_offset`."""
        if self.metadata.cut_at is None:
            return len(self.chunks)
        return bisect_right(self.chunks, self.metadata.valid_end_offset, key=lambda chunk: chunk.first_offset)

    def is_continued_by(self, following: IndexedSegment) -> bool:
        """Whether this segment and the one that begins directly after it name the same open aborted transactions.

        They do in one history, since a segment has every aborted transaction that overlaps it. Behind a CUT, another
        log may have ended a transaction otherwise (docs/semantics.md 7)."""
        end, start = self.metadata.valid_end_offset, following.metadata.start_offset
        before = self.index.aborted_transactions(end, end)
        behind = following.index.aborted_transactions(start, start)
        return {(one.producer_id, one.first_offset) for one in before if one.last_offset > end} == {
            (one.producer_id, one.first_offset) for one in behind if one.first_offset < start
        }


class ExtentSource:
    """Reads chunks from the disk cache if there is one, else by one ranged GET, which it then caches on the disk.

    The disk cache is in front of the circuit breaker, so it serves its chunks while the store is down."""

    def __init__(self, gets: HedgedReads, breakers: CircuitBreakers, disk: DiskChunkCache | None) -> None:
        self._gets = gets
        self._breakers = breakers
        self._disk = disk

    async def fetch(self, segment: IndexedSegment, first_number: int, end_number: int) -> Extent:
        """Returns chunks from `first_number` on, below `end_number`, up to the first that is missing or damaged.

        This is one attempt. It returns at least one chunk. If the disk has only a part of them, it returns that part: a
        GET must not delay it. Raises `CorruptSegmentError` when the first chunk is damaged, `CircuitOpenError`, and any
        `RemoteStorageError`."""
        disk = self._disk
        keys = [segment.key(number) for number in range(first_number, end_number)]
        if disk is not None and (on_disk := await disk.get(keys)):
            found = _open_extent(segment, first_number, on_disk, sum(map(len, on_disk)))
            if found is not None:
                return found
            disk.forget(keys[:1])
        run = segment.chunks[first_number:end_number]
        start = run[0].stored_position
        end = run[-1].stored_position + run[-1].stored_bytes - 1
        with self._breakers.of(decode_location(segment.metadata.custom_metadata)[0]):
            data = (await self._gets.fetch_log_segment(segment.metadata, start, end)).toreadonly()
        positions = [chunk.stored_position - start for chunk in run]
        stored = [data[at : at + chunk.stored_bytes] for at, chunk in zip(positions, run, strict=True)]
        fetched = _open_extent(segment, first_number, stored, len(data))
        if fetched is None:
            raise CorruptSegmentError(
                f"segment {segment.metadata.segment_id.id} of {segment.metadata.topic_id_partition}: "
                f"chunk {first_number} at {start} does not match its checksum"
            )
        if disk is not None:
            disk.put(keys[0], stored[: len(fetched.chunks)])
        return fetched


def _open_extent(
    segment: IndexedSegment, first_number: int, stored: Sequence[memoryview], size_bytes: int
) -> Extent | None:
    """Decrypts and verifies the chunks. Returns those before the first damaged one; None when the first is damaged.

    `size_bytes` is the memory that the views in `stored` keep alive.
    """
    chunks: list[memoryview] = []
    for number, stored_bytes in enumerate(stored, first_number):
        view = _log_bytes(segment.index, number, stored_bytes)
        if view is None or not _is_intact(view, segment.chunks[number]):
            break
        chunks.append(view)
    if not chunks:
        return None
    return Extent(segment.metadata.segment_id.id, first_number, tuple(chunks), size_bytes)


def _log_bytes(index: SegmentIndex, number: int, stored: memoryview) -> memoryview | None:
    try:
        return index.open_chunk(number, stored)
    except CorruptSegmentError:
        return None


def _is_intact(view: memoryview, chunk: Chunk) -> bool:
    return len(view) == chunk.log_bytes and crc32c(view, 0, len(view)) == chunk.crc32c
