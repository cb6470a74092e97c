"""`LocalIndexes` makes `LocalIndexCache` usable on an event loop. If the disk hangs, the reader falls back to a GET."""

from __future__ import annotations

from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.reader.local_index_cache import LocalIndexCache
from tiers.segment.indexes.segment_index import SegmentIndex
from tiers.storage.blocking_calls import BlockingCalls

DEADLINE_MS = 1_000


class LocalIndexes:
    """The local index files, used in an own thread. It adds a few threads while calls hang in the disk."""

    def __init__(self, cache: LocalIndexCache, deadline_ms: int = DEADLINE_MS) -> None:
        self.cache = cache
        self.hits = 0
        self.misses = 0
        self._deadline_s = deadline_ms / 1000
        self._calls = BlockingCalls("local-indexes", 1)

    async def get(self, segment: RemoteLogSegmentMetadata) -> tuple[SegmentIndex, int] | None:
        """Returns the index and its size in bytes; None when it is not in the files or the deadline passes."""
        try:
            found = await self._calls.run(lambda _: self.cache.get(segment), self._deadline_s)
        except TimeoutError:
            found = None
        self.hits += found is not None
        self.misses += found is None
        return found

    async def put(self, segment: RemoteLogSegmentMetadata, raw: bytes) -> None:
        """Caches `raw`, the stored object. `raw` must be intact."""
        try:
            await self._calls.run(lambda _: self.cache.put(segment, raw), self._deadline_s)
        except TimeoutError:
            return

    def close(self) -> None:
        self._calls.close()
