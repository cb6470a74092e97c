"""The memory caches of the read path: verified chunks and decoded indexes, both LRU by bytes.

The chunk cache holds and evicts extents. An extent is the run of adjacent chunks that one GET read. Their views share
one buffer, so only the eviction of a whole extent releases memory, and the counted bytes are the bytes in use.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple
from uuid import UUID

from cachetools import LRUCache

from tiers.segment.indexes.segment_index import SegmentIndex


class ChunkKey(NamedTuple):
    """The key of a chunk. `segment` is the uuid of the copy attempt, so a key always stands for the same bytes."""

    segment: UUID
    number: int


@dataclass(frozen=True, slots=True)
class Extent:
    """The chunks `[first_number, first_number + len(chunks))` of one segment: log bytes with verified checksums."""

    segment: UUID
    first_number: int
    chunks: tuple[memoryview, ...]
    size_bytes: int

    @property
    def key(self) -> ChunkKey:
        """The key of the first chunk."""
        return ChunkKey(self.segment, self.first_number)

    @property
    def end_number(self) -> int:
        return self.first_number + len(self.chunks)

    def chunk_keys(self) -> list[ChunkKey]:
        return [ChunkKey(self.segment, self.first_number + i) for i in range(len(self.chunks))]


class _ExtentCache(LRUCache[ChunkKey, Extent]):
    """An LRU cache that calls `on_evicted` for each evicted extent. The key is that of the extent's first chunk."""

    def __init__(self, max_bytes: int, on_evicted: Callable[[Extent], None]) -> None:
        super().__init__(max_bytes, getsizeof=lambda extent: extent.size_bytes)
        self._on_evicted = on_evicted

    def popitem(self) -> tuple[ChunkKey, Extent]:
        key, extent = super().popitem()
        self._on_evicted(extent)
        return key, extent


class ChunkCache:
    """The cache of verified chunks. A view that `get` returned stays valid after the eviction of its extent."""

    def __init__(self, max_bytes: int) -> None:
        self._extents = _ExtentCache(max_bytes, self._forget)
        self._extent_of: dict[ChunkKey, Extent] = {}
        self.hits = 0
        self.misses = 0

    @property
    def size_bytes(self) -> int:
        return int(self._extents.currsize)

    def __contains__(self, key: ChunkKey) -> bool:
        """Returns whether the chunk is cached. Counts neither as a use nor as a hit."""
        return key in self._extent_of

    def end_number(self, key: ChunkKey) -> int | None:
        """Returns the number after the last chunk of the extent that has this chunk; None when it is not cached.

        Counts neither as a use nor as a hit."""
        extent = self._extent_of.get(key)
        return None if extent is None else extent.end_number

    def get(self, key: ChunkKey) -> memoryview | None:
        extent = self._extent_of.get(key)
        if extent is None:
            self.misses += 1
            return None
        self.hits += 1
        self._extents[extent.key]  # it was used
        return extent.chunks[key.number - extent.first_number]

    def put(self, extent: Extent) -> None:
        """Caches the extent unless it is larger than the whole cache. None of its chunks may be cached already."""
        if extent.size_bytes > self._extents.maxsize:
            return
        self._extents[extent.key] = extent
        for key in extent.chunk_keys():
            self._extent_of[key] = extent

    def _forget(self, extent: Extent) -> None:
        for key in extent.chunk_keys():
            self._extent_of.pop(key, None)


class IndexCache:
    """The cache of decoded indexes by segment uuid. The size of an entry is the size of the stored object."""

    def __init__(self, max_bytes: int) -> None:
        self._indexes: LRUCache[UUID, tuple[SegmentIndex, int]] = LRUCache(max_bytes, getsizeof=lambda entry: entry[1])

    @property
    def size_bytes(self) -> int:
        return int(self._indexes.currsize)

    def get(self, segment: UUID) -> SegmentIndex | None:
        entry = self._indexes.get(segment)
        return None if entry is None else entry[0]

    def put(self, segment: UUID, index: SegmentIndex, size_bytes: int) -> None:
        if size_bytes <= self._indexes.maxsize:
            self._indexes[segment] = (index, size_bytes)
