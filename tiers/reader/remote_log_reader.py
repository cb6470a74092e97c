"""`RemoteLogReader` reads record batches of the remote tier by offset, byte for byte as the broker had them.

offset -> segment (RLMM) -> index -> chunks (caches, or ranged GETs through bounded pools) -> slices at whole batches.

The answers follow docs/semantics.md 3.3.

* The returned views are read-only and share the cache's buffers. The reader copies only small slices of large buffers,
  because a client that reads its answer slowly must not keep many times its size in memory.
* The reader retries retriable errors until the deadline (`RetriedRead`). If the metadata says that the segment was
  deleted meanwhile, it looks up the segment again.
* It never serves offsets above a segment's `valid_end_offset`, because a CUT cut them off.
* If a call is cancelled, its downloads continue and fill the caches for the next call.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Self
from uuid import UUID

from protocol.records.record_batch import CODEC_ZSTD, iterate_batches
from tiers.config.settings import RemoteLogConfig
from tiers.errors import (
    CorruptSegmentError,
    OffsetBelowLogStartError,
    OffsetGapError,
    RemoteLogError,
)
from tiers.metadata.metadata_log import FreshMetadata
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.quota import RemoteFetchQuotas
from tiers.reader.chunk_cache import ChunkCache, Extent, IndexCache
from tiers.reader.chunk_fetcher import MIB, ChunkFetcher
from tiers.reader.collected_batches import CollectedBatches
from tiers.reader.disk_chunk_cache import DiskChunkCache
from tiers.reader.extent_source import ExtentSource, IndexedSegment
from tiers.reader.fetcher_pool import FetcherPool
from tiers.reader.hedged_reads import HedgedReads, HedgeSettings
from tiers.reader.local_index_cache import LocalIndexes
from tiers.reader.read_accounts import ReadAccounts
from tiers.reader.read_ahead import ReadAhead
from tiers.reader.remote_log_offset_reader import RemoteLogOffsetReader
from tiers.reader.retry import RetriedRead, SegmentDeletedError
from tiers.segment.indexes.indexes_object import SegmentCiphers, decode_indexes_object
from tiers.segment.indexes.segment_index import SegmentIndex
from tiers.storage.circuit_breaker import CircuitBreakers
from tiers.storage.remote_storage_manager import SegmentReads

READ_COMMITTED = 1


@dataclass(frozen=True, slots=True)
class RemoteLogReaderSettings:
    """The settings of the reader: those of the file, and those that only code sets."""

    remote_log: RemoteLogConfig = field(default_factory=RemoteLogConfig)
    download_timeout_ms: int = 30_000
    first_get_bytes: int = MIB
    min_get_bytes: int = 4 * MIB
    max_get_bytes: int = 8 * MIB
    read_ahead_max_window_bytes: int = 64 * MIB


@dataclass(frozen=True, slots=True)
class RemoteReadRequest:
    """A read of up to `max_bytes` of batches, from the one that holds `offset` on.

    With `min_one_message` the answer has the first batch, whatever its size (KIP-74). `deadline_ms` is a time of the
    reader's clock. The pools are fair across `connection_id`s, and quotas apply to `client_id`. `trace` names the work
    that the read is part of (`tiers.tracing.Span.context`); "" if there is no trace.
    """

    partition: TopicIdPartition
    offset: int
    max_bytes: int
    min_one_message: bool
    isolation_level: int
    deadline_ms: int
    connection_id: int
    client_id: str = ""
    trace: str = ""

    @property
    def is_read_committed(self) -> bool:
        return self.isolation_level == READ_COMMITTED

    def is_part_of(self, other: RemoteReadRequest) -> bool:
        """Whether the result of this read is a valid result of `other`, which may ask for more records.

        The deadline, the client, the log start and the trace may differ."""
        return (
            (self.partition, self.offset, self.isolation_level)
            == (other.partition, other.offset, other.isolation_level)
            and self.max_bytes <= other.max_bytes
            and self.min_one_message >= other.min_one_message
        )


@dataclass(frozen=True, slots=True)
class RemoteRead:
    """The result of a read: whole batches.

    `records` is empty only if the first batch exceeds `max_bytes`, or if a fetch quota is used up. `first_offset` is
    the base offset of the first batch, which may be below the requested offset. `next_offset` is an upper bound of the
    offset after the last returned batch. `aborted_transactions` is None under read_uncommitted. Otherwise it holds the
    aborted transactions that Fetch must emit: in ascending order of first offsets, without duplicates, and without
    those whose marker lies before the first batch (docs/semantics.md 7). `segment_id` is the segment of the first
    record; None if no segment was read. `is_cache_hit`: the chunk of the first record was in memory.
    """

    records: list[memoryview]
    size_bytes: int
    first_offset: int
    next_offset: int
    aborted_transactions: tuple[AbortedTransaction, ...] | None
    segment_id: UUID | None = None
    is_cache_hit: bool = False

    @property
    def has_zstd(self) -> bool:
        return any(batch.codec == CODEC_ZSTD for view in self.records for batch in iterate_batches(view))


def monotonic_ms() -> int:
    return time.monotonic_ns() // 1_000_000


def decode_index(raw: bytes, segment: RemoteLogSegmentMetadata, ciphers: SegmentCiphers | None = None) -> SegmentIndex:
    """Returns the remote log index of an `.indexes` object. `ciphers` opens encrypted segments."""
    return decode_indexes_object(raw, segment).remote_log_index(ciphers)


class RemoteLogReader:
    """The reader, an asynchronous context manager. It owns its pools; the caller owns the storage manager."""

    def __init__(
        self,
        rlmm: FreshMetadata,
        storage: SegmentReads,
        settings: RemoteLogReaderSettings | None = None,
        *,
        clock_ms: Callable[[], int] = monotonic_ms,
        jitter: Callable[[], float] = random.random,
        decode_indexes: Callable[[bytes, RemoteLogSegmentMetadata], SegmentIndex] = decode_index,
        quotas: RemoteFetchQuotas | None = None,
        local_indexes: LocalIndexes | None = None,
        disk_chunks: DiskChunkCache | None = None,
        share: Callable[[Extent], Extent] = lambda extent: extent,
    ) -> None:
        """The reader closes `local_indexes` and `disk_chunks`; both are optional caches on disk.

        `share` moves the chunks of a download to where the cache keeps them."""
        settings = settings or RemoteLogReaderSettings()
        remote_log = settings.remote_log
        self._rlmm = rlmm
        self._retried = RetriedRead(rlmm, clock_ms, jitter)
        self.quotas = quotas or RemoteFetchQuotas(clock_ms)
        self.accounts = ReadAccounts(clock_ms)
        self.chunk_cache = ChunkCache(remote_log.chunk_cache_bytes)
        self.index_cache = IndexCache(remote_log.index_cache_bytes)
        self.chunk_pool: FetcherPool[Extent] = FetcherPool(
            threads=remote_log.reader_threads,
            max_pending_tasks=remote_log.reader_max_pending_tasks,
            max_bytes_in_flight=remote_log.reader_max_bytes_in_flight,
            download_timeout_ms=settings.download_timeout_ms,
        )
        self.index_pool: FetcherPool[SegmentIndex] = FetcherPool(
            threads=remote_log.reader_threads,
            max_pending_tasks=remote_log.reader_max_pending_tasks,
            max_bytes_in_flight=remote_log.reader_max_bytes_in_flight,
            download_timeout_ms=settings.download_timeout_ms,
        )
        self.local_indexes = local_indexes
        self.disk_chunks = disk_chunks
        self.breakers = CircuitBreakers(clock_ms)
        self.hedged_reads = HedgedReads(
            storage, self.chunk_pool, HedgeSettings(remote_log.reader_hedge_max_percent), clock_ms
        )
        self._fetcher = ChunkFetcher(
            storage,
            self.breakers,
            ExtentSource(self.hedged_reads, self.breakers, disk_chunks),
            decode_indexes,
            chunk_cache=self.chunk_cache,
            index_cache=self.index_cache,
            chunk_pool=self.chunk_pool,
            index_pool=self.index_pool,
            local_indexes=local_indexes,
            first_get_bytes=settings.first_get_bytes,
            share=share,
            min_get_bytes=settings.min_get_bytes,
            max_get_bytes=settings.max_get_bytes,
        )
        self.read_ahead = ReadAhead(
            clock_ms,
            budget_bytes=min(remote_log.read_ahead_bytes, remote_log.chunk_cache_bytes // 2),
            first_window_bytes=settings.min_get_bytes,
            max_window_bytes=settings.read_ahead_max_window_bytes,
        )
        self.offsets = RemoteLogOffsetReader(rlmm.state, self)
        self._stack = AsyncExitStack()

    async def __aenter__(self) -> Self:
        if self.local_indexes is not None:
            self._stack.callback(self.local_indexes.close)
        if self.disk_chunks is not None:
            await self._stack.enter_async_context(self.disk_chunks)
        await self._stack.enter_async_context(self.index_pool)
        await self._stack.enter_async_context(self.chunk_pool)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.__aexit__(kind, error, trace)

    @property
    def downloaded_bytes(self) -> Mapping[str, int]:
        """The bytes that came from the store, by pool."""
        return {"chunk": self.hedged_reads.downloaded_bytes, "index": self._fetcher.downloaded_index_bytes}

    async def read(self, request: RemoteReadRequest) -> RemoteRead:
        """Reads what `request` asks for.

        When a fetch quota is used up, the result is empty, without an error (KIP-956). A read never crosses a gap,
        which may have taken the marker that ends a transaction. The client would take what the producer committed later
        for aborted. A CUT may have cut off the marker, too, also at the end of a segment that it does not cut. So a
        read_committed read goes on into the next segment only if both name the same open aborted transactions. Raises
        `OffsetBelowLogStartError`, `OffsetGapError` when no segment holds the offset, `RemoteReadTimeoutError` at the
        deadline, and any `RemoteLogError` that is not retriable.
        """
        while True:
            segment = self.segment_for(request.partition, request.offset)
            topic = segment.topic_id_partition.topic
            portion = self.quotas.reserve(topic, request.client_id, max(1, request.max_bytes))
            if portion is None:
                self.accounts.note_throttled(request.client_id, topic)
                return RemoteRead([], 0, request.offset, request.offset, () if request.is_read_committed else None)
            try:
                with portion:
                    read = await self._read_from(segment, request)
                    portion.used_bytes = read.size_bytes
                self.accounts.note_read(request.client_id, topic, read.size_bytes, is_cache_hit=read.is_cache_hit)
                return read
            except SegmentDeletedError:
                continue

    def segment_for(self, partition: TopicIdPartition, offset: int) -> RemoteLogSegmentMetadata:
        """Returns the segment that holds `offset`. Raises `OffsetBelowLogStartError` or `OffsetGapError`."""
        log_start_offset = self._rlmm.state.log_start_offset(partition)
        if log_start_offset is None or offset < log_start_offset:
            raise OffsetBelowLogStartError(f"offset {offset} of {partition} is below its log start {log_start_offset}")
        segment = self._rlmm.state.remote_log_segment_metadata(partition, offset)
        if segment is None:
            raise OffsetGapError(f"no remote segment of {partition} holds offset {offset}")
        return segment

    async def index(self, segment: RemoteLogSegmentMetadata, *, deadline_ms: int, connection_id: int) -> SegmentIndex:
        return await self._retried.run(segment, lambda: self._fetcher.index(segment, connection_id), deadline_ms)

    async def chunk(
        self,
        segment: RemoteLogSegmentMetadata,
        index: SegmentIndex,
        number: int,
        *,
        deadline_ms: int,
        connection_id: int,
    ) -> memoryview:
        """Returns one verified chunk."""

        async def attempt() -> memoryview:
            return (await self._fetcher.chunks(IndexedSegment(segment, index), number, 1, connection_id))[0]

        return await self._retried.run(segment, attempt, deadline_ms)

    async def leader_epochs(
        self, partition: TopicIdPartition, *, deadline_ms: int, connection_id: int
    ) -> tuple[LeaderEpochEntry, ...]:
        """Returns every leader epoch that the remote tier knows, ascending; empty when it has no readable segment."""
        while True:
            end_offset = self._rlmm.state.remote_end_offset(partition)
            segment = (
                None if end_offset is None else self._rlmm.state.remote_log_segment_metadata(partition, end_offset)
            )
            if end_offset is None or segment is None:
                return ()
            try:
                index = await self.index(segment, deadline_ms=deadline_ms, connection_id=connection_id)
            except SegmentDeletedError:
                continue
            # The index of a segment that is cut also has epochs of the offsets that were cut off.
            return tuple(entry for entry in index.leader_epochs() if entry.start_offset <= end_offset)

    async def _read_from(self, metadata: RemoteLogSegmentMetadata, request: RemoteReadRequest) -> RemoteRead:
        collected = CollectedBatches(request.offset, request.max_bytes, request.min_one_message)
        deadline_ms, connection_id = request.deadline_ms, request.connection_id
        index = self._fetcher.cached_index(metadata)
        if index is None:
            index = await self.index(metadata, deadline_ms=deadline_ms, connection_id=connection_id)
        segment = IndexedSegment(metadata, index)
        number = index.chunk_number_for_offset(request.offset)
        if number is None:
            raise CorruptSegmentError(f"the index of segment {metadata.segment_id.id} ends before its last offset")
        # The first chunk may lie partly before the offset. So this asks for as many bytes more as that chunk has.
        wanted_bytes = request.max_bytes + segment.chunks[number].log_bytes
        attempt = partial(self._fetcher.chunks, segment, number, wanted_bytes, connection_id)
        has_first = self._fetcher.has_chunk(segment, number)
        views = await (attempt() if has_first else self._retried.run(metadata, attempt, deadline_ms))
        end_number = segment.end_number
        while True:
            for view in views:
                if number == end_number:
                    break
                collected.take(view, segment.chunks[number].last_offset, segment.metadata.valid_end_offset)
                if collected.is_full:
                    break
                number += 1
            if request.is_read_committed and collected.records:
                collected.aborted += segment.index.aborted_transactions(
                    collected.first_offset, collected.next_offset - 1
                )
            if collected.is_full or number < end_number:
                break
            # From the next segment it takes only cached chunks: an error there must not delay the batches of this one.
            following = self._following(segment)
            if following is None:
                break
            if request.is_read_committed and collected.records and not segment.is_continued_by(following):
                break
            segment, number = following, 0
            end_number = segment.end_number
            views = self._fetcher.cached_chunks(segment, 0, collected.remaining_bytes)
        had_to_wait = not (has_first and collected.is_full)
        self._prefetch(segment, number, request, collected.next_offset, had_to_wait=had_to_wait)
        return RemoteRead(
            collected.records,
            collected.size_bytes,
            collected.first_offset,
            collected.next_offset,
            collected.aborted_transactions() if request.is_read_committed else None,
            metadata.segment_id.id,
            has_first,
        )

    def _following(self, segment: IndexedSegment) -> IndexedSegment | None:
        """Returns the segment that begins exactly after this one; None when there is none, or its index is not cached.

        A segment that begins earlier is not returned, because the caller continues at its first chunk.
        """
        next_offset = segment.metadata.valid_end_offset + 1
        following = self._rlmm.state.remote_log_segment_metadata(segment.metadata.topic_id_partition, next_offset)
        if following is None or following.start_offset != next_offset:
            return None
        index = self._fetcher.index_if_cached(following)
        return None if index is None else IndexedSegment(following, index)

    def _prefetch(
        self,
        segment: IndexedSegment,
        number: int,
        request: RemoteReadRequest,
        next_offset: int,
        *,
        had_to_wait: bool,
    ) -> None:
        stream = (request.connection_id, segment.metadata.topic_id_partition)
        window_bytes = self.read_ahead.window_bytes(stream, request.offset, next_offset, had_to_wait=had_to_wait)
        try:
            while window_bytes > 0:
                if segment.metadata.cut_at is None:
                    window_bytes = self._fetcher.read_ahead(segment, number, window_bytes)
                if window_bytes <= 0:
                    return
                following = self._following(segment)
                if following is None:
                    return
                segment, number = following, 0
        except RemoteLogError:
            return  # reading ahead is optional: the read that needs the bytes reports the error
