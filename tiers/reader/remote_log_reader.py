"""`RemoteLogReader` reads record batches of the remote tier by offset, byte for byte as the broker had them.

offset -> segment (RLMM) -> index -> chunks (caches, or ranged GETs through bounded pools) -> slices at whole batches.

The answers follow docs/semantics.md 3.3.

* The returned views are read-only and share the cache's buffers. The reader copies only small slices of large buffers,
  because a client that reads its answer slowly must not keep many times its size in memory.
* The reader retries until the deadline. If the metadata says that the segment was deleted meanwhile, it looks up the
  segment again.
* It never serves offsets above a segment's `valid_end_offset`, because a CUT cut them off.
* If a call is cancelled, its downloads continue and fill the caches for the next call.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import takewhile
from typing import Self
from uuid import UUID

from protocol.records.record_batch import CODEC_ZSTD, cut_at_batches, iterate_batches, skip_to_offset
from tiers.broker.client import monotonic_ms
from tiers.errors import CorruptSegmentError, OffsetBelowLogStartError, OffsetGapError, RemoteLogError
from tiers.metadata.metadata_log import FreshMetadata
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.quota import RemoteFetchQuotas
from tiers.reader.chunk_cache import DiskChunkCache, Extent
from tiers.reader.chunk_fetcher import (
    Caller,
    ChunkFetcher,
    IndexedSegment,
    RemoteLogReaderSettings,
    SegmentDeletedError,
)
from tiers.reader.local_index_cache import LocalIndexes
from tiers.reader.read_accounts import ReadAccounts
from tiers.reader.remote_log_offset_reader import RemoteLogOffsetReader
from tiers.segment.indexes.indexes_object import SegmentCiphers
from tiers.segment.indexes.segment_index import AbortedTransactionRange, overlapping
from tiers.storage.remote_storage_manager import SegmentReads
from tiers.tracing import in_trace

READ_COMMITTED = 1
IDLE_MS = 10_000
_MAX_STREAMS = 4096
PINNED_RATIO = 16
"""A view may keep a buffer of at most this many times its own size in memory; a smaller view is copied.

An answer of 1 MiB has parts of two chunks as a rule, and a GET has up to eight chunks."""


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


class CollectedBatches:
    """The batches of a read, from `offset` on and within `max_bytes`.

    With `min_one_message`, the first batch is taken whatever its size."""

    def __init__(self, offset: int, max_bytes: int, min_one_message: bool) -> None:
        self.records: list[memoryview] = []
        self.remaining_bytes = max_bytes
        self.size_bytes = 0
        self.first_offset = offset
        self.next_offset = offset
        self.is_full = False
        self.aborted: list[AbortedTransactionRange] = []
        self._min_one_message = min_one_message

    def take(self, view: memoryview, last_offset: int, valid_end_offset: int) -> None:
        """Takes batches of the next chunk, whose inclusive end is `last_offset`. Skips those above `valid_end_offset`.

        Takes none if the log has no records from the offset to `valid_end_offset`. Raises `OffsetGapError` when the
        first batch may be served only in part.
        """
        start = 0 if self.records else skip_to_offset(view, self.next_offset)
        end = len(view)
        if last_offset > valid_end_offset:
            valid = takewhile(lambda batch: batch.last_offset <= valid_end_offset, iterate_batches(view))
            end = max((batch.end for batch in valid), default=0)
            last_offset = valid_end_offset
            if end <= start and not self.records:
                if next(iterate_batches(view, start)).base_offset > valid_end_offset:
                    return
                raise OffsetGapError(f"the remote log was cut at {valid_end_offset}, inside a batch")
        if end - start > self.remaining_bytes:
            end = min(
                end, cut_at_batches(view, self.remaining_bytes, self._min_one_message and not self.records, start)
            )
            self.is_full = True
        if end > start:
            if not self.records:
                self.first_offset = next(iterate_batches(view, start, end)).base_offset
            taken = view[start:end]
            if len(taken) * PINNED_RATIO < memoryview(view.obj).nbytes:
                taken = memoryview(bytes(taken))
            self.records.append(taken)
            self.size_bytes += len(taken)
            self.remaining_bytes -= len(taken)
            self.next_offset = last_offset + 1

    def aborted_transactions(self) -> tuple[AbortedTransaction, ...]:
        """Returns the aborted transactions that Fetch must emit with the taken batches (docs/semantics.md 7)."""
        ranges = overlapping(self.aborted, self.first_offset, self.next_offset - 1)
        return tuple(AbortedTransaction(one.producer_id, one.first_offset) for one in ranges)


StreamKey = tuple[int, TopicIdPartition]


@dataclass(slots=True)
class _Stream:
    next_offset: int
    used_at_ms: int
    window_bytes: int = 0


class ReadAhead:
    """How far to read ahead of each stream, within one global byte budget. `clock_ms` is monotonic.

    A stream is one connection that reads one partition. Its window is the number of bytes to read ahead. A window
    doubles with each sequential read for which the stream had to wait. So it grows to what the stream reads in the
    time of a download, whatever the latency and the rate of the store are, and a slow client keeps a small window.

    The windows of all streams together never exceed the budget, so that the streams do not evict each other's
    chunks before they are read. If the budget is exhausted, a stream takes the windows of idle streams, and then
    up to half of the largest window. The other stream keeps as much as this one has, and at least the first window.
    """

    def __init__(
        self, clock_ms: Callable[[], int], *, budget_bytes: int, first_window_bytes: int, max_window_bytes: int
    ) -> None:
        self._clock_ms = clock_ms
        self._budget_bytes = budget_bytes
        self._first_window_bytes = first_window_bytes
        self._max_window_bytes = max_window_bytes
        self._streams: OrderedDict[StreamKey, _Stream] = OrderedDict()
        """The stream that read last is the last one."""
        self._holders: dict[StreamKey, _Stream] = {}
        """The streams that have a window: few of all, since the budget bounds them."""
        self.reserved_bytes = 0

    def held_bytes(self, key: StreamKey, offset: int) -> int:
        """Returns the window of a stream that goes on at `offset`; 0 if the read at this offset begins a stream."""
        stream = self._streams.get(key)
        return stream.window_bytes if stream is not None and stream.next_offset == offset else 0

    def window_bytes(self, key: StreamKey, offset: int, next_offset: int, *, had_to_wait: bool) -> int:
        """Returns the number of bytes to read ahead after a read of `[offset, next_offset)`.

        `had_to_wait`: a download was not complete when the stream needed it. A read is sequential if `offset` is at
        most the end of the read before it and `next_offset` at least that end. A client may use only a part of an
        answer and then ask for the rest.
        """
        stream = self._streams.get(key)
        if stream is None:
            self._streams[key] = _Stream(next_offset, self._clock_ms())
            if len(self._streams) > _MAX_STREAMS:
                self._drop_oldest()
            return 0
        self._streams.move_to_end(key)
        stream.used_at_ms = self._clock_ms()
        is_sequential = offset <= stream.next_offset <= next_offset
        stream.next_offset = next_offset
        self.reserved_bytes -= stream.window_bytes
        self._holders.pop(key, None)
        wanted = stream.window_bytes * 2 if had_to_wait else stream.window_bytes
        wanted = min(max(wanted, self._first_window_bytes), self._max_window_bytes) if is_sequential else 0
        stream.window_bytes = min(wanted, self._made_free(wanted, stream))
        self.reserved_bytes += stream.window_bytes
        if stream.window_bytes:
            self._holders[key] = stream
        return stream.window_bytes

    def _made_free(self, wanted: int, stream: _Stream) -> int:
        """Makes room for a window of `stream`, which has reserved nothing now. Returns what is free of the budget."""
        while self.reserved_bytes + wanted > self._budget_bytes:
            oldest = next(iter(self._streams.values()))
            if stream.used_at_ms - oldest.used_at_ms > IDLE_MS:
                self._drop_oldest()
                continue
            largest = max(self._holders.values(), key=lambda each: each.window_bytes, default=stream)
            more_bytes = largest.window_bytes - max(stream.window_bytes, self._first_window_bytes)
            taken_bytes = min(more_bytes, largest.window_bytes // 2)
            if taken_bytes <= 0:
                break
            largest.window_bytes -= taken_bytes
            self.reserved_bytes -= taken_bytes
        return self._budget_bytes - self.reserved_bytes

    def _drop_oldest(self) -> None:
        key, stream = self._streams.popitem(last=False)
        self._holders.pop(key, None)
        self.reserved_bytes -= stream.window_bytes


class RemoteLogReader(RemoteLogOffsetReader):
    """The reader, an asynchronous context manager. It owns its pools; the caller owns the storage manager."""

    def __init__(
        self,
        rlmm: FreshMetadata,
        storage: SegmentReads,
        settings: RemoteLogReaderSettings | None = None,
        *,
        clock_ms: Callable[[], int] = monotonic_ms,
        ciphers: SegmentCiphers | None = None,
        local_indexes: LocalIndexes | None = None,
        disk_chunks: DiskChunkCache | None = None,
        share: Callable[[Extent], Extent] = lambda extent: extent,
    ) -> None:
        """See `ChunkFetcher` for `ciphers`, `local_indexes`, `disk_chunks` and `share`."""
        settings = settings or RemoteLogReaderSettings()
        fetcher = ChunkFetcher(rlmm, storage, settings, clock_ms, ciphers, local_indexes, disk_chunks, share)
        super().__init__(rlmm.state, fetcher)
        self.quotas = RemoteFetchQuotas(clock_ms)
        self.accounts = ReadAccounts(clock_ms)
        self.read_ahead = ReadAhead(
            clock_ms,
            budget_bytes=min(settings.read_ahead_bytes, settings.remote_log.chunk_cache_bytes * 2 // 3),
            first_window_bytes=fetcher.max_get_bytes,
            max_window_bytes=settings.read_ahead_max_window_bytes,
        )

    async def __aenter__(self) -> Self:
        await self.fetcher.__aenter__()
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.fetcher.__aexit__()

    async def read(self, request: RemoteReadRequest) -> RemoteRead:
        """Reads what `request` asks for.

        When a fetch quota is used up, the result is empty, without an error (KIP-956). A read ends at a gap and at a
        CUT, because a transaction's marker may be missing there. The CUT may also lie at the end of a segment that it
        does not cut. So a read_committed read goes on into the next segment only if both name the same open aborted
        transactions. Raises `OffsetBelowLogStartError`, `OffsetGapError` when no segment holds the offset,
        `RemoteReadTimeoutError` at the deadline, and any `RemoteLogError` that is not retriable. If the call is part of
        a trace, so are the downloads that it begins.
        """
        while True:
            segment = self.segment_for(request.partition, request.offset)
            topic = segment.topic_id_partition.topic
            portion = self.quotas.reserve(topic, request.client_id, max(1, request.max_bytes))
            if portion is None:
                self.accounts.note_throttled(request.client_id, topic)
                return RemoteRead([], 0, request.offset, request.offset, () if request.is_read_committed else None)
            try:
                with portion, in_trace(request.trace):
                    read = await self._read_from(segment, request)
                    portion.used_bytes = read.size_bytes
                self.accounts.note_read(request.client_id, topic, read.size_bytes, is_cache_hit=read.is_cache_hit)
                return read
            except SegmentDeletedError:
                continue

    def segment_for(self, partition: TopicIdPartition, offset: int) -> RemoteLogSegmentMetadata:
        """Returns the segment that holds `offset`. Raises `OffsetBelowLogStartError` or `OffsetGapError`."""
        log_start_offset = self._state.log_start_offset(partition)
        if log_start_offset is None or offset < log_start_offset:
            raise OffsetBelowLogStartError(f"offset {offset} of {partition} is below its log start {log_start_offset}")
        segment = self._state.remote_log_segment_metadata(partition, offset)
        if segment is None:
            raise OffsetGapError(f"no remote segment of {partition} holds offset {offset}")
        return segment

    async def leader_epochs(self, partition: TopicIdPartition, caller: Caller) -> tuple[LeaderEpochEntry, ...]:
        """Returns every leader epoch that the remote tier knows, ascending; empty when it has no readable segment."""
        while True:
            end_offset = self._state.remote_end_offset(partition)
            if end_offset is None:
                return ()
            segment = self._state.remote_log_segment_metadata(partition, end_offset)
            if segment is None:
                return ()
            try:
                index = await self.fetcher.index(segment, caller)
            except SegmentDeletedError:
                continue
            # The index of a segment that is cut also has epochs of the offsets that were cut off.
            return tuple(entry for entry in index.leader_epochs() if entry.start_offset <= end_offset)

    async def _read_from(self, metadata: RemoteLogSegmentMetadata, request: RemoteReadRequest) -> RemoteRead:
        collected = CollectedBatches(request.offset, request.max_bytes, request.min_one_message)
        caller = Caller(request.deadline_ms, request.connection_id)
        segment = IndexedSegment(metadata, await self.fetcher.index(metadata, caller))
        number = segment.index.chunk_number_for_offset(request.offset)
        if number is None:
            raise CorruptSegmentError(f"the index of segment {metadata.segment_id.id} ends before its last offset")
        has_first = segment.key(number) in self.fetcher.chunk_cache
        # The first chunk may lie partly before the offset. So this asks for as many bytes more as that chunk has.
        wanted_bytes = request.max_bytes + segment.chunks[number].log_bytes
        stream = (request.connection_id, metadata.topic_id_partition)
        window_bytes = 0 if metadata.cut_at is not None else self.read_ahead.held_bytes(stream, request.offset)
        views = await self.fetcher.chunks(segment, number, wanted_bytes, caller, window_bytes)
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
            views = self.fetcher.cached_chunks(segment, 0, collected.remaining_bytes)
        had_to_wait = not (has_first and collected.is_full)
        next_offset = collected.next_offset
        window_bytes = self.read_ahead.window_bytes(stream, request.offset, next_offset, had_to_wait=had_to_wait)
        self._prefetch(segment, number, window_bytes)
        return RemoteRead(
            collected.records,
            collected.size_bytes,
            collected.first_offset,
            next_offset,
            collected.aborted_transactions() if request.is_read_committed else None,
            metadata.segment_id.id,
            has_first,
        )

    def _following(self, segment: IndexedSegment) -> IndexedSegment | None:
        """Returns the segment that begins exactly after this one; None when there is none, or its index is not cached.

        A segment that begins earlier is not returned, because the caller continues at its first chunk.
        """
        next_offset = segment.metadata.valid_end_offset + 1
        following = self._state.remote_log_segment_metadata(segment.metadata.topic_id_partition, next_offset)
        if following is None or following.start_offset != next_offset:
            return None
        index = self.fetcher.index_if_cached(following)
        return None if index is None else IndexedSegment(following, index)

    def _prefetch(self, segment: IndexedSegment, number: int, window_bytes: int) -> None:
        try:
            while window_bytes > 0:
                if segment.metadata.cut_at is None:
                    window_bytes = self.fetcher.read_ahead(segment, number, window_bytes)
                following = self._following(segment) if window_bytes > 0 else None
                if following is None:
                    return
                segment, number = following, 0
        except RemoteLogError:
            return  # reading ahead is optional: the read that needs the bytes reports the error
