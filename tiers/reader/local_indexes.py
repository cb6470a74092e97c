"""`LocalIndexes`: the local index files for an event loop. They are an aid: a stuck disk costs a GET."""

from __future__ import annotations

from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.reader.local_index_cache import LocalIndexCache
from tiers.segment.segment_index import SegmentIndex
from tiers.storage.blocking_calls import BlockingCalls

DEADLINE_MS = 1_000


class LocalIndexes:
    """Its own thread works on the files; a few more, while calls are stuck in the disk."""

    def __init__(self, cache: LocalIndexCache, deadline_ms: int = DEADLINE_MS) -> None:
        self.cache = cache
        self.hits = 0
        self.misses = 0
        self._deadline_s = deadline_ms / 1000
        self._calls = BlockingCalls("local-indexes", 1)

    async def get(self, segment: RemoteLogSegmentMetadata) -> tuple[SegmentIndex, int] | None:
        """The index, and how many bytes it takes."""
        try:
            found = await self._calls.run(lambda _: self.cache.get(segment), self._deadline_s)
        except TimeoutError:
            found = None
        self.hits += found is not None
        self.misses += found is None
        return found

    async def put(self, segment: RemoteLogSegmentMetadata, raw: bytes) -> None:
        """`raw`: the stored object, which was decoded without an error."""
        try:
            await self._calls.run(lambda _: self.cache.put(segment, raw), self._deadline_s)
        except TimeoutError:
            return

    def close(self) -> None:
        self._calls.close()
