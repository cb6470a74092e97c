"""`RangeReader`: reads the ranges of one task in order as raw batches, while data moves between the tiers.

A local range that was trimmed meanwhile is in the remote tier by then. A segment that is gone was merged or replaced.
In both cases the reader plans the rest of the range again with fresh metadata, from the first offset that it has not
yielded yet. So no record is lost, and none is yielded twice. If neither tier has an offset, it is lost, and
`failOnDataLoss` decides what happens.

A segment takes two round trips: one for its indexes, and one for its log. So the reader asks for the first batches of
the next ranges ahead, as far as `AHEAD_BYTES` allow.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import aclosing
from functools import partial
from typing import NamedTuple

import pyarrow as pa

from pipeline.decode.arrow_records import decode_batches
from pipeline.decode.record_columns import RecordColumns
from pipeline.source.local_read import OffsetOutOfRangeError, read_local_range
from pipeline.source.options import ReadOptions
from pipeline.source.read_plan import LocalRange, MissingOffsets, ReadRange, RemoteRange
from pipeline.source.remote_read import GET_BYTES, GETS_AT_ONCE, RawBatches, read_remote_range
from pipeline.source.tiered_log import client_config, open_log, report_data_loss
from pipeline.spark.task_call import freeze_loaded_objects
from pipeline.worker import worker
from tiers.access.open_tier import RemoteTierError, open_key_ring
from tiers.bounded_gather import in_order
from tiers.errors import CorruptSegmentError, RemoteResourceNotFoundError

logger = logging.getLogger(__name__)

AHEAD_BYTES = GETS_AT_ONCE * GET_BYTES
"""What the ranges ahead may hold in memory. One range holds no more either."""
_PLANS_WITHOUT_PROGRESS = 2


class RangeBatches(NamedTuple):
    """Raw batches of `range`, which may be the rest of a planned range."""

    range: ReadRange
    raw: RawBatches


class _Begun(NamedTuple):
    """A range whose first batches have arrived, or whose first request has failed."""

    range: ReadRange
    rest: AsyncGenerator[RawBatches]
    first: RawBatches | None = None
    failure: Exception | None = None

    async def batches(self) -> AsyncGenerator[RawBatches]:
        if self.failure is not None:
            raise self.failure
        if self.first is not None:
            yield self.first
        async for raw in self.rest:
            yield raw


class RangeReader:
    """Reads ranges for a task. `cluster_id` is the one in the store's object keys."""

    def __init__(self, options: ReadOptions, cluster_id: str, min_timestamp_ms: int | None = None) -> None:
        self._options = options
        self._cluster_id = cluster_id
        self._min_timestamp_ms = min_timestamp_ms
        self.lost: list[MissingOffsets] = []
        """The ranges that were lost after the last planning, if `failOnDataLoss` is false."""

    def read(self, ranges: Sequence[ReadRange], columns: RecordColumns) -> Iterator[pa.RecordBatch]:
        """Yields the records. Raises `DataLossError`, `CorruptBatchError`, and errors of stores and brokers."""
        for one, raw in worker().iterate(self.raw_batches(ranges)):
            yield from decode_batches(
                raw.data,
                topic=one.partition.topic,
                partition=one.partition.partition,
                first_offset=one.first_offset,
                end_offset=one.end_offset,
                columns=columns,
                aborted=raw.aborted,
                is_committed_only=self._options.is_committed_only,
                min_timestamp_ms=self._min_timestamp_ms,
            )
        freeze_loaded_objects()

    async def raw_batches(self, ranges: Sequence[ReadRange]) -> AsyncGenerator[RangeBatches]:
        opened: set[AsyncGenerator[RawBatches]] = set()
        calls = ((min(one.size_bytes, AHEAD_BYTES), partial(self._begin, one, opened)) for one in ranges)
        try:
            async with aclosing(in_order(calls, AHEAD_BYTES)) as all_begun:
                async for begun in all_begun:
                    async with aclosing(self._batches_of(begun, opened)) as found:
                        async for batches in found:
                            yield batches
        finally:
            for each in opened:
                await each.aclose()

    async def _batches_of(self, begun: _Begun, opened: set[AsyncGenerator[RawBatches]]) -> AsyncGenerator[RangeBatches]:
        """Yields the batches of a planned range, whose rest may be planned anew."""
        waiting: deque[ReadRange] = deque()
        fruitless = 0
        while True:
            one = begun.range
            position = one.first_offset
            try:
                async with aclosing(begun.batches()) as batches:
                    async for raw in batches:
                        yield RangeBatches(one, raw)
                        position = max(position, raw.next_offset)
            except CorruptSegmentError as error:
                raise CorruptSegmentError(f"{one.partition}: {error}") from error
            except (RemoteResourceNotFoundError, OffsetOutOfRangeError) as error:
                fruitless = fruitless + 1 if position == one.first_offset else 1
                if position <= one.end_offset:
                    rest = await self._planned_anew(one, position, error, fruitless)
                    waiting.extendleft(reversed(rest))
            await begun.rest.aclose()
            opened.discard(begun.rest)
            if not waiting:
                return
            begun = await self._begin(waiting.popleft(), opened)

    async def _begin(self, one: ReadRange, opened: set[AsyncGenerator[RawBatches]]) -> _Begun:
        """Asks for the first batches of a range. `opened` gets what the caller must close."""
        rest = self._open(one)
        opened.add(rest)
        try:
            return _Begun(one, rest, first=await anext(rest, None))
        except Exception as error:  # raised when it is the turn of the range
            return _Begun(one, rest, failure=error)

    async def _open(self, one: ReadRange) -> AsyncGenerator[RawBatches]:
        config = self._options.config
        if isinstance(one, LocalRange):
            batches = read_local_range(
                await worker().client(client_config(self._options)),
                one.partition,
                one.first_offset,
                one.end_offset,
                is_committed_only=self._options.is_committed_only,
                timeout_ms=self._options.poll_timeout_ms,
            )
        elif config is None:
            raise RemoteTierError("no store is configured for this reader")
        else:
            batches = read_remote_range(
                await worker().storage(config, self._cluster_id),
                one.segment,
                open_key_ring(config),
                one.first_offset,
                one.end_offset,
                min_timestamp_ms=self._min_timestamp_ms,
            )
        async with aclosing(batches):
            async for raw in batches:
                yield raw

    async def _planned_anew(self, one: ReadRange, position: int, error: Exception, fruitless: int) -> list[ReadRange]:
        """Plans the rest of `one` from `position` on again, with the current metadata. Raises `DataLossError`."""
        logger.info("a range is planned again: %s", error, extra={"partition": str(one.partition), "offset": position})
        async with open_log(self._options) as log:
            bounds = (await log.bounds([one.partition]))[one.partition]
            pieces = log.ranges(one.partition, bounds, position, min(one.end_offset, bounds.end - 1))
        if one.end_offset >= bounds.end:
            start = max(position, bounds.end)
            self._lose(start, one, f"{one.partition} ends at {bounds.end}: {start} to {one.end_offset} is gone")
        rest: list[ReadRange] = []
        for piece in pieces:
            offsets = f"{piece.first_offset} to {piece.end_offset}"
            if isinstance(piece, MissingOffsets):
                self._lose(piece.first_offset, piece, f"{piece.partition}: {offsets} is gone")
            elif _is_same(piece, one) and fruitless >= _PLANS_WITHOUT_PROGRESS:
                self._lose(piece.first_offset, piece, f"{error}; {offsets} cannot be read")
            else:
                rest.append(piece)
        return rest

    def _lose(self, first_offset: int, piece: ReadRange | MissingOffsets, what: str) -> None:
        """Notes the offsets from `first_offset` to the end of `piece`. Raises `DataLossError`."""
        report_data_loss(self._options, what)
        self.lost.append(MissingOffsets(piece.partition, first_offset, piece.end_offset))


def _is_same(piece: ReadRange, failed: ReadRange) -> bool:
    """Whether the metadata or the leader still names the source that just failed, so that another attempt is futile."""
    if isinstance(piece, RemoteRange):
        return isinstance(failed, RemoteRange) and piece.segment.segment_id == failed.segment.segment_id
    return isinstance(failed, LocalRange)
