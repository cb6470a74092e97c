"""`ChunkFetcher` returns the chunks and the index of a remote segment, from the caches or by few ranged GETs.

One GET reads adjacent missing chunks, at least `min_get_bytes` and at most `max_get_bytes`. It reads a larger chunk
alone. A call is one attempt; the reader retries.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress

from tiers.errors import ReaderQueueFullError, RemoteLogError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.reader.chunk_cache import ChunkCache, Extent, IndexCache
from tiers.reader.extent_source import ExtentSource, IndexedSegment
from tiers.reader.fetcher_pool import READ_AHEAD_CONNECTION_ID, FetcherPool, Flight
from tiers.reader.local_index_cache import LocalIndexes
from tiers.segment.indexes.segment_index import SegmentIndex
from tiers.storage.circuit_breaker import CircuitBreakers
from tiers.storage.locations import decode_location
from tiers.storage.remote_storage_manager import SegmentReads

MIB = 1024 * 1024

_INDEX_SIZE_ESTIMATE_BYTES = 256 * 1024


class ChunkFetcher:
    def __init__(
        self,
        store: SegmentReads,
        breakers: CircuitBreakers,
        extents: ExtentSource,
        decode_indexes: Callable[[bytes, RemoteLogSegmentMetadata], SegmentIndex],
        *,
        chunk_cache: ChunkCache,
        index_cache: IndexCache,
        chunk_pool: FetcherPool[Extent],
        index_pool: FetcherPool[SegmentIndex],
        local_indexes: LocalIndexes | None = None,
        share: Callable[[Extent], Extent] = lambda extent: extent,
        min_get_bytes: int = 4 * MIB,
        max_get_bytes: int = 8 * MIB,
    ) -> None:
        self._store = store
        self._breakers = breakers
        self._extents = extents
        self._decode_indexes = decode_indexes
        self._chunk_cache = chunk_cache
        self._index_cache = index_cache
        self._chunk_pool = chunk_pool
        self._index_pool = index_pool
        self._local_indexes = local_indexes
        self._share = share
        self._min_get_bytes = min_get_bytes
        self._max_get_bytes = max_get_bytes

    async def index(self, segment: RemoteLogSegmentMetadata, connection_id: int) -> SegmentIndex:
        cached = self._index_cache.get(segment.segment_id.id)
        if cached is not None:
            return cached
        return await self.start_index(segment, connection_id).wait()

    def index_if_cached(self, segment: RemoteLogSegmentMetadata) -> SegmentIndex | None:
        """Returns the index if it is cached, else None. Never waits.

        For a missing index it starts a download if the pool has an idle slot.
        """
        cached = self._index_cache.get(segment.segment_id.id)
        if cached is None and self._index_pool.has_idle_slot:
            with suppress(RemoteLogError):  # it is optional: the read that needs the index reports the error
                self.start_index(segment, READ_AHEAD_CONNECTION_ID)
        return cached

    def start_index(self, segment: RemoteLogSegmentMetadata, connection_id: int) -> Flight[SegmentIndex]:
        uuid = segment.segment_id.id
        flight = self._index_pool.flight(uuid)
        if flight is not None:
            return flight

        async def download() -> SegmentIndex:
            local = self._local_indexes
            if local is not None and (found := await local.get(segment)) is not None:
                self._index_cache.put(uuid, *found)
                return found[0]
            with self._breakers.of(decode_location(segment.custom_metadata)[0]):
                raw = await self._store.fetch_indexes(segment)
            index = self._decode_indexes(raw, segment)
            self._index_cache.put(uuid, index, len(raw))
            if local is not None:
                await local.put(segment, raw)
            return index

        return self._index_pool.start([uuid], _INDEX_SIZE_ESTIMATE_BYTES, connection_id, download)

    async def chunks(
        self,
        segment: IndexedSegment,
        first_number: int,
        wanted_log_bytes: int,
        connection_id: int,
    ) -> list[memoryview]:
        """Returns chunks from `first_number` on, at least one, until they hold `wanted_log_bytes` or the segment ends.

        It waits only for the first chunk. It returns the following chunks if they have arrived by then; the others
        arrive for the next read. So an error in a later chunk never delays the first one.
        """
        all_chunks = segment.chunks
        end_number = first_number + 1
        planned_bytes = all_chunks[first_number].log_bytes
        while end_number < len(all_chunks) and planned_bytes < wanted_log_bytes:
            planned_bytes += all_chunks[end_number].log_bytes
            end_number += 1
        # All GETs start before the first await, so they run concurrently.
        self._start_missing(segment, first_number, end_number, connection_id)
        first = self._chunk_cache.get(segment.key(first_number))
        if first is None:
            first = await self._wait_for(segment, first_number, end_number, connection_id)
        return [first, *self.cached_chunks(segment, first_number + 1, wanted_log_bytes - len(first))]

    def cached_chunks(self, segment: IndexedSegment, first_number: int, wanted_log_bytes: int) -> list[memoryview]:
        """Returns the wanted chunks that are cached now, up to the first one that is not."""
        views: list[memoryview] = []
        for number in range(first_number, len(segment.chunks)):
            view = self._chunk_cache.get(segment.key(number)) if wanted_log_bytes > 0 else None
            if view is None:
                break
            views.append(view)
            wanted_log_bytes -= len(view)
        return views

    async def _wait_for(
        self,
        segment: IndexedSegment,
        number: int,
        end_number: int,
        connection_id: int,
    ) -> memoryview:
        """Waits for the chunk `number`.

        The flight for it may end before that chunk, because a later chunk of the run was damaged. The next round then
        starts a flight that begins with it, and that flight brings the chunk or raises.
        """
        key = segment.key(number)
        while True:
            flight = self._chunk_pool.flight(key)
            if flight is None:
                view = self._chunk_cache.get(key)
                if view is not None:
                    return view
                flight = self._start_run(segment, number, end_number, connection_id)
            extent = await flight.wait()
            place = number - extent.first_number
            if place < len(extent.chunks):
                return extent.chunks[place]

    def _start_missing(
        self,
        segment: IndexedSegment,
        first_number: int,
        end_number: int,
        connection_id: int,
    ) -> None:
        number = first_number
        while number < end_number:
            if not self._is_missing(segment, number):
                number += 1
                continue
            try:
                flight = self._start_run(segment, number, end_number, connection_id)
            except ReaderQueueFullError:
                if number == first_number:
                    raise
                return
            number += len(flight.keys)

    def read_ahead(self, segment: IndexedSegment, first_number: int, window_bytes: int) -> int:
        """Starts GETs for the missing chunks of the next `window_bytes`, while slots are idle. Never waits.

        Returns the number of bytes of the window that lie beyond this segment; 0 when no slot was idle.
        """
        all_chunks = segment.chunks
        number = first_number
        while number < len(all_chunks) and window_bytes > 0:
            if self._is_missing(segment, number):
                if not self._chunk_pool.has_idle_slot:
                    return 0
                self._start_run(segment, number, len(all_chunks), READ_AHEAD_CONNECTION_ID)
            window_bytes -= all_chunks[number].log_bytes
            number += 1
        return max(window_bytes, 0)

    def _is_missing(self, segment: IndexedSegment, number: int) -> bool:
        key = segment.key(number)
        return key not in self._chunk_cache and self._chunk_pool.flight(key) is None

    def _start_run(
        self,
        segment: IndexedSegment,
        number: int,
        wanted_end: int,
        connection_id: int,
    ) -> Flight[Extent]:
        """Starts one GET from the missing chunk `number` on.

        It reads up to `wanted_end` or `min_get_bytes`, whichever is more, but at most `max_get_bytes` and only up to
        the next chunk that is cached or in flight.
        """
        all_chunks = segment.chunks
        size_bytes = all_chunks[number].stored_bytes
        end = number + 1
        while end < len(all_chunks) and (end < wanted_end or size_bytes < self._min_get_bytes):
            if size_bytes + all_chunks[end].stored_bytes > self._max_get_bytes or not self._is_missing(segment, end):
                break
            size_bytes += all_chunks[end].stored_bytes
            end += 1

        async def download() -> Extent:
            extent = self._share(await self._extents.fetch(segment, number, end))
            self._chunk_cache.put(extent)
            return extent

        return self._chunk_pool.start([segment.key(n) for n in range(number, end)], size_bytes, connection_id, download)
