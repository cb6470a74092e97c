"""`ChunkFetcher` returns the chunks and the index of a remote segment, from the caches or by few ranged GETs.

One GET reads adjacent missing chunks, at most `max_get_bytes`. It reads a larger chunk alone. The GET that the first
read of a stream waits for has at most `first_get_bytes`, so that it ends soon. The other chunks that the read asks for
come by another GET at the same time. When a stream goes on, all its GETs are long: those that read ahead, and the one
that a read waits for because no slot was idle to read ahead. So the slots bring much, however many streams share them.

A read of an index or of chunks is repeated until the deadline of its caller.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left, bisect_right
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, Self, TypeVar
from uuid import UUID

from cachetools import LRUCache

from tiers.backoff import Backoff
from tiers.config.settings import RemoteLogConfig
from tiers.errors import (
    CorruptSegmentError,
    ReaderQueueFullError,
    RemoteLogError,
    RemoteReadTimeoutError,
    RemoteResourceNotFoundError,
)
from tiers.metadata.metadata_log import FreshMetadata
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.reader.chunk_cache import ChunkCache, ChunkKey, DiskChunkCache, Extent
from tiers.reader.fetcher_pool import READ_AHEAD_CONNECTION_ID, FetcherPool, Flight, HedgedReads
from tiers.reader.local_index_cache import LocalIndexes
from tiers.segment.indexes.indexes_object import SegmentCiphers, decode_indexes_object
from tiers.segment.indexes.segment_index import Chunk, SegmentIndex
from tiers.storage.circuit_breaker import CircuitBreaker, CircuitBreakers
from tiers.storage.locations import decode_location
from tiers.storage.remote_storage_manager import SegmentReads

T = TypeVar("T")

MIB = 1024 * 1024

READ_BACKOFF = Backoff(base_ms=50, cap_ms=1000)
"""The pause of a read. It is also at most half of the time that is left."""
_INDEX_SIZE_ESTIMATE_BYTES = 256 * 1024
_METADATA_RELOAD_TIMEOUT_MS = 1000
_INDEX_CACHE_BYTES = 64 * MIB
"""The size of the decoded segment indexes in memory."""


@dataclass(frozen=True, slots=True)
class RemoteLogReaderSettings:
    """The settings of the reader: those of the file, and those that only code sets."""

    remote_log: RemoteLogConfig = field(default_factory=RemoteLogConfig)
    first_get_bytes: int = MIB
    max_get_bytes: int = 8 * MIB
    read_ahead_max_window_bytes: int = 64 * MIB
    read_ahead_bytes: int = 512 * MIB
    """The data that is downloaded before clients ask for it, at most two thirds of the cache of record data.

    The default suffices for 64 consumers that read at once at the speed of the store."""
    max_bytes_in_flight: int = 128 * MIB
    """The total size of all running downloads."""


@dataclass(frozen=True, slots=True)
class Caller:
    """Who waits for a call, and until when. `deadline_ms` is a time of the reader's clock."""

    deadline_ms: int
    connection_id: int


class SegmentDeletedError(RemoteLogError):
    """The metadata says that the segment was deleted during the read. The caller must look up the offset again."""


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


class ChunkFetcher:
    """An asynchronous context manager. It closes `local_indexes` and `disk_chunks`; both are optional caches on disk.

    The disk caches are in front of the circuit breakers, so they serve what they have while the store is down. `share`
    moves the chunks of a download to where the cache keeps them. `ciphers` opens encrypted segments."""

    def __init__(
        self,
        rlmm: FreshMetadata,
        store: SegmentReads,
        settings: RemoteLogReaderSettings,
        clock_ms: Callable[[], int],
        ciphers: SegmentCiphers | None,
        local_indexes: LocalIndexes | None,
        disk_chunks: DiskChunkCache | None,
        share: Callable[[Extent], Extent],
    ) -> None:
        remote_log = settings.remote_log
        self._rlmm = rlmm
        self._store = store
        self._settings = settings
        self._clock_ms = clock_ms
        self._ciphers = ciphers
        self._share = share
        self.local_indexes = local_indexes
        self.disk_chunks = disk_chunks
        self.chunk_cache = ChunkCache(remote_log.chunk_cache_bytes)
        self.max_get_bytes = min(settings.max_get_bytes, remote_log.chunk_cache_bytes // 3)
        """A small cache has room for the GET of a stream, for the one before it, and for another stream's."""
        self.index_cache: LRUCache[UUID, tuple[SegmentIndex, int]]
        self.index_cache = LRUCache(_INDEX_CACHE_BYTES, getsizeof=itemgetter(1))
        """The decoded indexes by segment uuid, each with the size of the stored object."""
        self.chunk_pool: FetcherPool[Extent] = _pool(settings)
        self.index_pool: FetcherPool[SegmentIndex] = _pool(settings)
        self.breakers = CircuitBreakers(clock_ms)
        self.hedged_reads = HedgedReads(store, self.chunk_pool, clock_ms)
        self.downloaded_index_bytes = 0
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self.local_indexes is not None:
            self._stack.callback(self.local_indexes.close)
        if self.disk_chunks is not None:
            await self._stack.enter_async_context(self.disk_chunks)
        await self._stack.enter_async_context(self.index_pool)
        await self._stack.enter_async_context(self.chunk_pool)
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._stack.aclose()

    async def index(self, segment: RemoteLogSegmentMetadata, caller: Caller) -> SegmentIndex:
        return await self._retried(segment, lambda: self.index_once(segment, caller.connection_id), caller)

    async def index_once(self, segment: RemoteLogSegmentMetadata, connection_id: int) -> SegmentIndex:
        cached = self.index_cache.get(segment.segment_id.id)
        return await self._start_index(segment, connection_id).wait() if cached is None else cached[0]

    def index_if_cached(self, segment: RemoteLogSegmentMetadata) -> SegmentIndex | None:
        """Returns the index if it is cached, else None. Never waits.

        For a missing index it starts a download if the pool has an idle slot.
        """
        cached = self.index_cache.get(segment.segment_id.id)
        if cached is None and self.index_pool.has_idle_slot:
            with suppress(RemoteLogError):  # it is optional: the read that needs the index reports the error
                self._start_index(segment, READ_AHEAD_CONNECTION_ID)
        return None if cached is None else cached[0]

    def _start_index(self, segment: RemoteLogSegmentMetadata, connection_id: int) -> Flight[SegmentIndex]:
        uuid = segment.segment_id.id
        flight = self.index_pool.flight(uuid)
        if flight is not None:
            return flight

        async def download() -> SegmentIndex:
            local = self.local_indexes
            found = None if local is None else await local.get(segment)
            if found is None:
                with self._breaker(segment):
                    raw = await self._store.fetch_indexes(segment)
                self.downloaded_index_bytes += len(raw)
                found = decode_indexes_object(raw, segment).remote_log_index(self._ciphers), len(raw)
                if local is not None:
                    await local.put(segment, raw)
            if found[1] <= self.index_cache.maxsize:
                self.index_cache[uuid] = found
            return found[0]

        return self.index_pool.start([uuid], _INDEX_SIZE_ESTIMATE_BYTES, connection_id, download)

    def _breaker(self, segment: RemoteLogSegmentMetadata) -> CircuitBreaker:
        return self.breakers.of(decode_location(segment.custom_metadata)[0])

    async def chunks(
        self, segment: IndexedSegment, first_number: int, wanted_log_bytes: int, caller: Caller, window_bytes: int = 0
    ) -> list[memoryview]:
        """Returns chunks from `first_number` on, at least one, until they hold `wanted_log_bytes` or the segment ends.

        `window_bytes` is the stream's window; 0 if this read begins a stream. Otherwise the GETs may reach beyond what
        is wanted, because the stream will ask for that next.

        It waits only for the first chunk. It returns the following chunks if they have arrived by then; the others
        arrive for the next read. So an error in a later chunk never delays the first one.
        """
        connection_id = caller.connection_id
        first_get_bytes = self.max_get_bytes if window_bytes else self._settings.first_get_bytes
        all_chunks = segment.chunks
        end_number = first_number + 1
        planned_bytes = all_chunks[first_number].log_bytes
        while end_number < len(all_chunks) and planned_bytes < wanted_log_bytes:
            planned_bytes += all_chunks[end_number].log_bytes
            end_number += 1

        async def attempt() -> list[memoryview]:
            # All GETs start before the first await, so they run concurrently.
            last_end = len(all_chunks) if window_bytes else end_number
            for number, end in self._missing(segment, first_number, first_number + 1, last_end, first_get_bytes):
                self._start_get(segment, number, end, connection_id)
            with suppress(ReaderQueueFullError):  # the read needs only the first chunk
                for number, end in self._missing(segment, first_number, end_number, last_end, self.max_get_bytes):
                    self._start_get(segment, number, end, connection_id)
            first = self.chunk_cache.get(segment.key(first_number))
            if first is None:
                first = await self._wait_for(segment, first_number, connection_id)
            return [first, *self.cached_chunks(segment, first_number + 1, wanted_log_bytes - len(first))]

        return await self._retried(segment.metadata, attempt, caller)

    def cached_chunks(self, segment: IndexedSegment, first_number: int, wanted_log_bytes: int) -> list[memoryview]:
        """Returns the wanted chunks that are cached now, up to the first one that is not."""
        views: list[memoryview] = []
        for number in range(first_number, len(segment.chunks)):
            view = self.chunk_cache.get(segment.key(number)) if wanted_log_bytes > 0 else None
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
            flight = self.chunk_pool.flight(key)
            if flight is None:
                view = self.chunk_cache.get(key)
                if view is not None:
                    return view
                flight = self._start_get(segment, number, number + 1, connection_id)
            extent = await flight.wait()
            place = number - extent.first_number
            if place < len(extent.chunks):
                return extent.chunks[place]

    def read_ahead(self, segment: IndexedSegment, first_number: int, window_bytes: int) -> int:
        """Starts GETs for the missing chunks of the next `window_bytes`, while slots are idle. Never waits.

        The last GET may reach beyond the window. Returns the number of bytes of the window that lie beyond this
        segment; 0 when no slot was idle.
        """
        chunks = segment.chunks
        begin = end_of_segment = chunks[-1].stored_position + chunks[-1].stored_bytes
        if first_number < len(chunks):
            begin = chunks[first_number].stored_position
        window_end = bisect_left(chunks, begin + window_bytes, key=lambda chunk: chunk.stored_position)
        for number, end in self._missing(segment, first_number, window_end, len(chunks), self.max_get_bytes):
            if not self.chunk_pool.has_idle_slot:
                return 0
            self._start_get(segment, number, end, READ_AHEAD_CONNECTION_ID)
        return max(window_bytes - (end_of_segment - begin), 0)

    def _missing(
        self, segment: IndexedSegment, number: int, end_number: int, last_end: int, get_bytes: int
    ) -> Iterator[tuple[int, int]]:
        """Yields the GETs for the missing chunks of `[number, end_number)`; the last one may reach to `last_end`.

        A GET reads at most `get_bytes` and `max_get_bytes`, but at least one chunk. It ends before the next chunk that
        is not missing.
        """
        all_chunks = segment.chunks
        get_bytes = min(get_bytes, self.max_get_bytes)
        while number < end_number:
            end = self._end_of_known(segment, number)
            if end is None:
                size_bytes = all_chunks[number].stored_bytes
                end = number + 1
                while end < last_end and self._end_of_known(segment, end) is None:
                    size_bytes += all_chunks[end].stored_bytes
                    if size_bytes > get_bytes:
                        break
                    end += 1
                yield number, end
            number = end

    def _end_of_known(self, segment: IndexedSegment, number: int) -> int | None:
        """Returns the number after the last chunk of the cached extent, or of the flight, that has this chunk.

        None: the chunk is missing."""
        key = segment.key(number)
        end = self.chunk_cache.end_number(key)
        if end is None and (flight := self.chunk_pool.flight(key)) is not None:
            end = number + len(flight.keys) - flight.keys.index(key)
        return end

    def _start_get(self, segment: IndexedSegment, number: int, end: int, connection_id: int) -> Flight[Extent]:
        """Starts one GET of the missing chunks `[number, end)`."""

        async def download() -> Extent:
            extent = self._share(await self._fetch(segment, number, end))
            self.chunk_cache.put(extent)
            return extent

        keys = [segment.key(each) for each in range(number, end)]
        size_bytes = sum(chunk.stored_bytes for chunk in segment.chunks[number:end])
        return self.chunk_pool.start(keys, size_bytes, connection_id, download)

    async def _fetch(self, segment: IndexedSegment, number: int, end: int) -> Extent:
        """Reads chunks from `number` on, below `end`, up to the first that is missing or damaged, from disk or store.

        Returns at least one chunk. If the disk has only a part of them, it returns that part: a GET must not delay it.
        Raises `CorruptSegmentError` when the first chunk is damaged, `CircuitOpenError`, and any `RemoteStorageError`.
        """
        disk, metadata = self.disk_chunks, segment.metadata
        keys = [segment.key(each) for each in range(number, end)]
        if disk is not None and (on_disk := await disk.get(keys)):
            if chunks := _opened(segment, number, on_disk):
                return Extent(metadata.segment_id.id, number, chunks, sum(map(len, on_disk)))
            disk.forget(keys[:1])
        run = segment.chunks[number:end]
        start = run[0].stored_position
        with self._breaker(metadata):
            last = run[-1].stored_position + run[-1].stored_bytes - 1
            data = (await self.hedged_reads.fetch(metadata, start, last)).toreadonly()
        positions = [chunk.stored_position - start for chunk in run]
        stored = [data[at : at + chunk.stored_bytes] for at, chunk in zip(positions, run, strict=True)]
        chunks = _opened(segment, number, stored)
        if not chunks:
            raise CorruptSegmentError(
                f"segment {metadata.segment_id.id} of {metadata.topic_id_partition}: "
                f"chunk {number} at {start} does not match its checksum"
            )
        if disk is not None:
            disk.put(keys[0], stored[: len(chunks)])
        return Extent(metadata.segment_id.id, number, chunks, len(data))

    async def _retried(
        self, segment: RemoteLogSegmentMetadata, attempt: Callable[[], Awaitable[T]], caller: Caller
    ) -> T:
        """Returns the result of the first attempt that succeeds. It occupies no slot of a pool between the attempts.

        * It retries retriable errors with backoff. If the store does not find a FINISHED segment, it retries as well,
          because stores may be eventually consistent, unless the metadata says that the segment was deleted meanwhile.
          Then it raises `SegmentDeletedError`.
        * After a checksum mismatch it reads once more. A second mismatch is an error.
        * At the deadline it raises `RemoteReadTimeoutError`.
        """
        failures = 0
        is_reread = False
        cause: Exception | None = None
        while (remaining_ms := caller.deadline_ms - self._clock_ms()) > 0:
            try:
                async with asyncio.timeout(remaining_ms / 1000):
                    return await attempt()
            except TimeoutError:
                break
            except CorruptSegmentError:
                if is_reread:
                    raise
                is_reread = True
                continue
            except RemoteLogError as error:
                if not error.retriable:
                    raise
                cause = error
            failures += 1
            if isinstance(cause, RemoteResourceNotFoundError):
                await self._raise_if_deleted(segment, caller.deadline_ms)
            pause_ms = min(READ_BACKOFF.pause_ms(failures), (caller.deadline_ms - self._clock_ms()) / 2)
            await asyncio.sleep(max(pause_ms, 1) / 1000)
        raise RemoteReadTimeoutError(f"the deadline of a read of {segment.topic_id_partition} passed", cause) from cause

    async def _raise_if_deleted(self, segment: RemoteLogSegmentMetadata, deadline_ms: int) -> None:
        """Raises `SegmentDeletedError` when fresh metadata says that the segment is no longer readable."""
        timeout_ms = min(_METADATA_RELOAD_TIMEOUT_MS, deadline_ms - self._clock_ms())
        try:
            await self._rlmm.ensure_fresh(segment.topic_id_partition, 0, max(timeout_ms, 1))
        except RemoteLogError:
            return  # without fresh metadata a retry is always safe
        known = self._rlmm.state.remote_log_segment_metadata_by_id(segment.segment_id)
        if known is None or known.state is not RemoteLogSegmentState.COPY_SEGMENT_FINISHED:
            raise SegmentDeletedError(f"segment {segment.segment_id.id} was deleted")


def _pool(settings: RemoteLogReaderSettings) -> FetcherPool[Any]:
    return FetcherPool(
        threads=settings.remote_log.reader_threads,
        max_pending_tasks=settings.remote_log.reader_max_pending_tasks,
        max_bytes_in_flight=settings.max_bytes_in_flight,
    )


def _opened(segment: IndexedSegment, first_number: int, stored: Sequence[memoryview]) -> tuple[memoryview, ...]:
    """Decrypts and verifies the chunks. Returns those before the first damaged one."""
    chunks: list[memoryview] = []
    for number, stored_bytes in enumerate(stored, first_number):
        try:
            chunks.append(segment.index.open_chunk(number, stored_bytes))
        except CorruptSegmentError:
            break
    return tuple(chunks)
