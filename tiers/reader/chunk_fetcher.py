"""`ChunkFetcher` returns the chunks and the index of a remote segment, from the caches or by few ranged GETs.

One GET reads adjacent missing chunks, at most `max_get_bytes`. It reads a larger chunk alone. The GET that a read waits
for has at most `first_get_bytes`, so that it ends soon. The other chunks that the read asks for come by another GET at
the same time. A GET that reads ahead has a quarter of the window, and at least `min_get_bytes`.

A call is one attempt; the reader retries.
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
_GETS_PER_WINDOW = 4
"""The GETs of a window are in flight together, so that a short window arrives soon."""


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
        first_get_bytes: int = MIB,
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
        self._first_get_bytes = first_get_bytes
        self._share = share
        self._min_get_bytes = min_get_bytes
        self.downloaded_index_bytes = 0
        self._max_get_bytes = max_get_bytes

    async def index(self, segment: RemoteLogSegmentMetadata, connection_id: int) -> SegmentIndex:
        cached = self.cached_index(segment)
        return await self.start_index(segment, connection_id).wait() if cached is None else cached

    def cached_index(self, segment: RemoteLogSegmentMetadata) -> SegmentIndex | None:
        return self._index_cache.get(segment.segment_id.id)

    def index_if_cached(self, segment: RemoteLogSegmentMetadata) -> SegmentIndex | None:
        """Returns the index if it is cached, else None. Never waits.

        For a missing index it starts a download if the pool has an idle slot.
        """
        cached = self.cached_index(segment)
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
            self.downloaded_index_bytes += len(raw)
            index = self._decode_indexes(raw, segment)
            self._index_cache.put(uuid, index, len(raw))
            if local is not None:
                await local.put(segment, raw)
            return index

        return self._index_pool.start([uuid], _INDEX_SIZE_ESTIMATE_BYTES, connection_id, download)

    def has_chunk(self, segment: IndexedSegment, number: int) -> bool:
        """Whether the chunk is cached. Counts neither as a use nor as a hit."""
        return segment.key(number) in self._chunk_cache

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
        begun = self._end_of_known(segment, first_number)
        if begun is None:
            begun = self._end_of_get(segment, first_number, end_number, self._first_get_bytes)
            self._start_get(segment, first_number, begun, connection_id)
        with suppress(ReaderQueueFullError):  # the read needs only the first chunk
            self._start_missing(segment, begun, end_number, connection_id)
        first = self._chunk_cache.get(segment.key(first_number))
        if first is None:
            first = await self._wait_for(segment, first_number, connection_id)
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

    async def _wait_for(self, segment: IndexedSegment, number: int, connection_id: int) -> memoryview:
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
                flight = self._start_get(segment, number, number + 1, connection_id)
            extent = await flight.wait()
            place = number - extent.first_number
            if place < len(extent.chunks):
                return extent.chunks[place]

    def _start_missing(self, segment: IndexedSegment, first_number: int, end_number: int, connection_id: int) -> None:
        number = first_number
        while number < end_number:
            end = self._end_of_known(segment, number)
            if end is None:
                end = self._end_of_get(segment, number, end_number)
                self._start_get(segment, number, end, connection_id)
            number = end

    def read_ahead(self, segment: IndexedSegment, first_number: int, window_bytes: int) -> int:
        """Starts GETs for the missing chunks of the next `window_bytes`, while slots are idle. Never waits.

        The last GET may reach beyond the window. Returns the number of bytes of the window that lie beyond this
        segment; 0 when no slot was idle.
        """
        all_chunks = segment.chunks
        get_bytes = max(window_bytes // _GETS_PER_WINDOW, self._min_get_bytes)
        number = first_number
        while number < len(all_chunks) and window_bytes > 0:
            end = self._end_of_known(segment, number)
            if end is None:
                if not self._chunk_pool.has_idle_slot:
                    return 0
                end = self._end_of_get(segment, number, len(all_chunks), get_bytes)
                self._start_get(segment, number, end, READ_AHEAD_CONNECTION_ID)
            last = all_chunks[end - 1]
            window_bytes -= last.stored_position + last.stored_bytes - all_chunks[number].stored_position
            number = end
        return max(window_bytes, 0)

    def _end_of_known(self, segment: IndexedSegment, number: int) -> int | None:
        """Returns the number after the last chunk of the cached extent, or of the flight, that has this chunk.

        None: the chunk is missing."""
        key = segment.key(number)
        end = self._chunk_cache.end_number(key)
        if end is None and (flight := self._chunk_pool.flight(key)) is not None:
            end = number + len(flight.keys) - flight.keys.index(key)
        return end

    def _end_of_get(self, segment: IndexedSegment, number: int, end_number: int, get_bytes: int | None = None) -> int:
        """Returns the number after the last chunk of a GET that begins with the missing chunk `number`.

        The GET reads at most `get_bytes` and `max_get_bytes`, but at least one chunk. It ends before the next chunk
        that is not missing.
        """
        get_bytes = min(get_bytes or self._max_get_bytes, self._max_get_bytes)
        all_chunks = segment.chunks
        size_bytes = all_chunks[number].stored_bytes
        end = number + 1
        while end < end_number and self._end_of_known(segment, end) is None:
            size_bytes += all_chunks[end].stored_bytes
            if size_bytes > get_bytes:
                break
            end += 1
        return end

    def _start_get(self, segment: IndexedSegment, number: int, end: int, connection_id: int) -> Flight[Extent]:
        """Starts one GET of the missing chunks `[number, end)`."""

        async def download() -> Extent:
            extent = self._share(await self._extents.fetch(segment, number, end))
            self._chunk_cache.put(extent)
            return extent

        keys = [segment.key(each) for each in range(number, end)]
        size_bytes = sum(chunk.stored_bytes for chunk in segment.chunks[number:end])
        return self._chunk_pool.start(keys, size_bytes, connection_id, download)
