"""`read_remote_range`: reads the record batches of a part of one segment directly from the store, in whole chunks.

The `.indexes` object has the positions of the chunks. Adjacent chunks are read with one ranged GET, and a few GETs run
while the caller decodes earlier chunks. Every chunk is compared with its checksum before it is yielded. The error of a
failed GET is raised after all chunks before it were yielded.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator
from contextlib import aclosing
from typing import NamedTuple

from tiers.bounded_gather import in_order
from tiers.errors import CorruptSegmentError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import SegmentCiphers, decode_indexes_object
from tiers.segment.indexes.segment_index import AbortedTransactionRange, Chunk, SegmentIndex
from tiers.storage.remote_storage_manager import SegmentReads
from tiers.storage.retries import with_retries
from tiers.verify.read_back import chunk_runs

GET_BYTES = 8 << 20
GETS_AT_ONCE = 3


class RawBatches(NamedTuple):
    """Whole record batches with the aborted transactions that overlap them. `next_offset` follows the last batch."""

    data: memoryview
    aborted: tuple[AbortedTransactionRange, ...]
    next_offset: int


class _Numbered(NamedTuple):
    number: int
    chunk: Chunk


async def read_remote_range(
    storage: SegmentReads,
    segment: RemoteLogSegmentMetadata,
    key_ring: SegmentCiphers | None,
    first_offset: int,
    end_offset: int,
    *,
    min_timestamp_ms: int | None = None,
    get_bytes: int = GET_BYTES,
    gets_at_once: int = GETS_AT_ONCE,
) -> AsyncGenerator[RawBatches]:
    """Yields the chunks that hold any of `[first_offset, end_offset]` (inclusive). The first and the last batches may
    lie outside the range. Chunks whose latest record is before `min_timestamp_ms` are not fetched. The reader holds up
    to `gets_at_once * get_bytes` in memory.

    Raises `RemoteResourceNotFoundError` if an object is gone, `CorruptSegmentError` if the bytes are not those that
    were stored, `EncryptionKeyError`, and `RemoteStorageError` if the store fails for longer than a few attempts."""
    stored = decode_indexes_object(await with_retries(lambda: storage.fetch_indexes(segment)), segment)
    index = stored.remote_log_index(key_ring)
    runs = _runs(index, first_offset, end_offset, min_timestamp_ms, get_bytes)
    calls = ((1, _get(storage, segment, run)) for run in runs)
    async with aclosing(in_order(calls, gets_at_once)) as fetched:
        async for run, view in fetched:
            for batches in _opened(index, run, view):
                yield batches


def _runs(
    index: SegmentIndex, first_offset: int, end_offset: int, min_timestamp_ms: int | None, get_bytes: int
) -> Iterator[list[_Numbered]]:
    """Yields runs of adjacent wanted chunks."""
    neighbours: list[_Numbered] = []
    for number, chunk in enumerate(index.chunks()):
        is_wanted = chunk.last_offset >= first_offset and chunk.first_offset <= end_offset
        if is_wanted and (min_timestamp_ms is None or not 0 <= chunk.max_timestamp_ms < min_timestamp_ms):
            neighbours.append(_Numbered(number, chunk))
            continue
        yield from _gets(neighbours, get_bytes)
        neighbours = []
    yield from _gets(neighbours, get_bytes)


def _gets(neighbours: list[_Numbered], get_bytes: int) -> Iterator[list[_Numbered]]:
    for run in chunk_runs([each.chunk for each in neighbours], get_bytes):
        yield neighbours[run.first_number : run.first_number + len(run.chunks)]


def _get(
    storage: SegmentReads, segment: RemoteLogSegmentMetadata, run: list[_Numbered]
) -> Callable[[], Awaitable[tuple[list[_Numbered], memoryview]]]:
    first, last = run[0].chunk, run[-1].chunk
    end_position = last.stored_position + last.stored_bytes - 1

    async def get() -> tuple[list[_Numbered], memoryview]:
        return run, await with_retries(lambda: storage.fetch_log_segment(segment, first.stored_position, end_position))

    return get


def _opened(index: SegmentIndex, run: list[_Numbered], view: memoryview) -> Iterator[RawBatches]:
    """Yields one `RawBatches` if the stored bytes are the log's own bytes, else one per chunk. Chunks before a damaged
    one are yielded first."""
    start = run[0].chunk.stored_position
    opened: list[memoryview] = []
    is_plain = True
    damage: CorruptSegmentError | None = None
    for number, chunk in run:
        piece = view[chunk.stored_position - start :][: chunk.stored_bytes]
        try:
            log_bytes = index.open_chunk(number, piece)
        except CorruptSegmentError as error:
            damage = error
            break
        opened.append(log_bytes)
        is_plain = is_plain and log_bytes is piece
    whole = run[: len(opened)]
    if whole and is_plain:
        last = whole[-1].chunk
        end = last.stored_position + last.stored_bytes - start
        yield _batches(index, view[:end], whole[0].chunk, last)
    else:
        for (_, chunk), log_bytes in zip(whole, opened, strict=True):
            yield _batches(index, log_bytes, chunk, chunk)
    if damage is not None:
        raise damage


def _batches(index: SegmentIndex, log_bytes: memoryview, first: Chunk, last: Chunk) -> RawBatches:
    aborted = index.aborted_transactions(first.first_offset, last.last_offset)
    return RawBatches(log_bytes, tuple(aborted), last.last_offset + 1)
