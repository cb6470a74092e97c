"""`copy_tiles`: the executor's part of an offload: reads a run of one partition's tiles, builds and stores the
segments, reads them back and reports them.

* The driver has announced each attempt at each tile in one plan, with the uuid under which the attempt stores its
  objects. A task writes under no other name, and writes nothing but objects. Only the driver commits.
* Each attempt has its own uuid. Spark may repeat a task (its executor died, or seemed to) and may run it twice at the
  same time (speculation). Two attempts never write the same object, and Spark takes one of the results. An attempt for
  which the plan has no name writes nothing and returns `lost`.
* The tiles of a task follow each other: leader epochs, open transactions and producers carry over to the next tile. If
  one tile stops, the tiles after it are not copied.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import StrEnum
from functools import partial

from pipeline.config import PipelineConfig
from pipeline.offload.plan import part_of_tile
from pipeline.spark.job import attempt
from pipeline.spark.scratch import scratch_folder
from pipeline.worker import worker
from protocol.errors import CorruptBatchError, ErrorCode
from tiers.access.open_tier import open_key_ring
from tiers.broker.client import monotonic_ms, wall_clock_ms
from tiers.errors import BrokerError, CustomMetadataTooLargeError, LogDivergedError, OffsetGapError, RemoteLogError
from tiers.log.broker_log import BrokerLogSource
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import LogRead, LogSource
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.segment_builder import BuiltSegment, SegmentBuilder, SegmentOverflowError
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.tasks.copy.segment_copy import SegmentContinuation, append_records, started, write_objects
from tiers.tasks.copy.spool import Spool
from tiers.verify.read_back import read_back

FETCH_BYTES = 4 << 20
VERIFY_BYTES = 8 << 20
_ONE_BATCH = 1
_SPOOL_BYTES = 1 << 62
_SPOOL_THREADS = 2


@dataclass(frozen=True, slots=True)
class Tile:
    """The offsets [lo, hi). A batch begins at each end. The segment is announced, and its objects are named, by
    them."""

    segment_id: RemoteLogSegmentId
    lo: int
    hi: int


@dataclass(frozen=True, slots=True)
class OffloadTask:
    config: PipelineConfig
    cluster_id: str
    """The id with which a store is opened."""
    partition: TopicIdPartition
    plan: CopyPlan
    continuation: SegmentContinuation
    max_segment_bytes: int
    """A larger tile was estimated too badly. The task gives it up, and the driver plans it again."""
    bytes_per_second: int | None = None
    facts: bytes = b""
    """The facts of the partition as of the announcement of the plan."""

    def tiles(self, attempt: int) -> list[Tile]:
        plan = self.plan
        return [Tile(plan.segment_id(number, attempt), lo, hi) for number, (lo, hi) in enumerate(plan.tiles)]


class Stop(StrEnum):
    LOST = "lost"
    FAILED = "failed"
    TOO_LARGE = "too large"
    LONG_HOLE = "long hole"
    POISONED = "poisoned"
    DIVERGED = "diverged"


@dataclass(frozen=True, slots=True)
class Stopped:
    """Why the tiles from `tile` on were not copied."""

    tile: int
    why: Stop
    message: str = ""
    offset: int = -1
    """Where the log is permanently unreadable, or has a hole that is too long for a segment."""
    bytes_per_offset: float = 0.0
    custom_metadata: bytes | None = None
    """What the store returned for objects that do not count."""


@dataclass(frozen=True, slots=True)
class CopiedTile:
    """A copied tile. `segment` is complete for the metadata."""

    tile: int
    segment: RemoteLogSegmentMetadata
    missing_offsets: int


@dataclass(frozen=True, slots=True)
class OffloadResult:
    copied: tuple[CopiedTile, ...] = ()
    stopped: Stopped | None = None
    attempt: int = 0
    """The attempt that returned this result. Attempts with a lower number were started too."""
    cpu_s: float = 0.0
    wall_s: float = 0.0


class StopError(Exception):
    def __init__(self, stopped: Stopped) -> None:
        super().__init__(stopped.message)
        self.stopped = stopped


def copy_tiles(task: OffloadTask) -> OffloadResult:
    """Runs on an executor. All errors of this partition are in the result."""
    number = attempt()
    if number >= task.plan.attempts:
        said = f"the task was started {number} times before, on executors that died or were slow"
        return OffloadResult(stopped=Stopped(0, Stop.LOST, said), attempt=number)
    began_s, cpu_began_s = time.monotonic(), time.process_time()
    result = worker().run(_copy_tiles(task, number))
    return replace(result, attempt=number, cpu_s=time.process_time() - cpu_began_s, wall_s=time.monotonic() - began_s)


async def _copy_tiles(task: OffloadTask, attempt: int) -> OffloadResult:
    copied: list[CopiedTile] = []
    number = 0
    try:
        client = await worker().client(task.config)
        storage = await worker().storage(task.config, task.cluster_id)
        with ExitStack() as stack:
            spool = Spool(stack.enter_context(scratch_folder("offload")), _SPOOL_BYTES, _SPOOL_THREADS)
            stack.callback(spool.close)
            copier = TileCopier(task, BrokerLogSource(client), storage, spool, open_key_ring(task.config))
            for number, tile in enumerate(task.tiles(attempt)):
                copied.append(await copier.copy(number, tile))
    except StopError as stop:
        return OffloadResult(tuple(copied), replace(stop.stopped, tile=number))
    except (RemoteLogError, OSError) as error:
        return OffloadResult(tuple(copied), Stopped(number, Stop.FAILED, str(error) or repr(error)))
    return OffloadResult(tuple(copied))


class TileCopier:
    def __init__(
        self, task: OffloadTask, source: LogSource, storage: RemoteStorageManager, spool: Spool, key_ring: KeyRing
    ) -> None:
        self._task = task
        self._source = source
        self._storage = storage
        self._spool = spool
        self._key_ring = key_ring
        self._continuation = task.continuation
        self._timeout_ms = task.config.upstream.request_timeout_ms
        self._pace = Pace(task.bytes_per_second, monotonic_ms)
        self._fetch_bytes = FETCH_BYTES

    async def copy(self, number: int, tile: Tile) -> CopiedTile:
        """Copies one tile. Raises `StopError`, and what the store raises."""
        self._fetch_bytes = FETCH_BYTES
        path = self._spool.new_path(self._task.partition)
        carried = self._continuation
        builder = await self._spool.run(lambda: carried.builder(path, tile.lo))
        try:
            await self._fill(builder, tile.hi)
            if builder.next_offset != tile.hi or carried.next_offset != tile.lo:
                # Objects must not be stored under a name with other offsets.
                at = f"from {carried.next_offset} to {builder.next_offset}"
                raise StopError(
                    Stopped(0, Stop.FAILED, f"the log goes {at}, not from {tile.lo} to {tile.hi} as planned")
                )
            built = await self._spool.run(builder.finish)
            segment = await self._store(tile, built)
        finally:
            builder.discard()
        self._continuation = SegmentContinuation.behind(built)
        return CopiedTile(number, segment, built.missing_offsets)

    async def _fill(self, builder: SegmentBuilder, hi: int) -> None:
        """Fills the segment. The first read begins at the segment's base offset, so that the leader reports the aborted
        transactions of exactly this segment. The next read runs while the last answer is appended."""
        offset = builder.base_offset
        read = await self._read(offset)
        while True:
            records, next_offset, is_whole = part_of_tile(read.records, hi)
            if not records:
                return  # no more batches up to the last stable offset or `hi`
            append = partial(self._append, builder, records, read)
            if is_whole or next_offset >= read.last_stable_offset:
                await append()
                return
            offset = next_offset
            _, read = await _both(append(), self._read(offset))

    async def _append(self, builder: SegmentBuilder, records: bytes, read: LogRead) -> None:
        size_bytes = builder.size_bytes + len(records)
        is_too_large = builder.size_bytes > 0 and size_bytes > self._task.max_segment_bytes
        try:
            if not is_too_large:
                await append_records(
                    builder,
                    records,
                    read.aborted_transactions,
                    self._spool,
                    self._source,
                    self._task.partition,
                    self._timeout_ms,
                )
        except SegmentOverflowError as overflow:
            raise StopError(Stopped(0, Stop.LONG_HOLE, str(overflow), offset=overflow.next_offset)) from overflow
        except CorruptBatchError as error:
            raise StopError(Stopped(0, Stop.POISONED, str(error), offset=builder.next_offset)) from error
        except LogDivergedError as error:
            raise StopError(Stopped(0, Stop.DIVERGED, str(error))) from error
        if is_too_large:
            offsets = max(1, builder.next_offset - builder.base_offset)
            density = max(builder.size_bytes, len(records)) / offsets
            raise StopError(Stopped(0, Stop.TOO_LARGE, f"more than {size_bytes} bytes", bytes_per_offset=density))

    async def _read(self, offset: int) -> LogRead:
        partition = self._task.partition
        await self._pace.wait()
        try:
            read = await self._source.read(partition, offset, self._fetch_bytes, self._timeout_ms)
        except (LogDivergedError, OffsetGapError) as error:
            raise StopError(Stopped(0, Stop.DIVERGED, str(error))) from error
        except BrokerError as error:
            if error.code != ErrorCode.CORRUPT_MESSAGE:
                raise
            if self._fetch_bytes == _ONE_BATCH:
                raise StopError(Stopped(0, Stop.POISONED, str(error), offset=offset)) from error
            # One of the batches is damaged. Those before it are good, and it may lie beyond this tile, so the task
            # continues with one batch per read.
            self._fetch_bytes = _ONE_BATCH
            return await self._read(offset)
        self._pace.moved(len(read.records))
        return read

    async def _store(self, tile: Tile, built: BuiltSegment) -> RemoteLogSegmentMetadata:
        segment = started(built, tile.segment_id, -1, wall_clock_ms(), self._task.plan.copy_epoch)
        custom_metadata = await write_objects(
            self._storage, self._spool, self._key_ring, built.with_facts(self._task.facts), segment
        )
        segment = replace(segment, custom_metadata=custom_metadata)
        try:
            limit_bytes = self._task.config.remote_log.custom_metadata_max_bytes
            if custom_metadata is not None and len(custom_metadata) > limit_bytes:
                raise CustomMetadataTooLargeError(
                    f"the store returned {len(custom_metadata)} bytes of custom metadata; the limit is {limit_bytes}"
                )
            await read_back(self._storage, segment, VERIFY_BYTES, self._key_ring)
        except RemoteLogError as error:
            raise StopError(Stopped(0, Stop.FAILED, str(error), custom_metadata=custom_metadata)) from error
        return segment


async def _both(
    first: Coroutine[object, object, None], second: Coroutine[object, object, LogRead]
) -> tuple[None, LogRead]:
    """Runs both at once. Raises the first failure alone."""
    try:
        async with asyncio.TaskGroup() as group:
            one, other = group.create_task(first), group.create_task(second)
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return one.result(), other.result()


class Pace:
    """Limits the bytes per second that a task reads. Time without reads gives no credit for later.

    `bytes_per_second` None means no limit."""

    def __init__(self, bytes_per_second: int | None, clock_ms: Callable[[], int]) -> None:
        self._bytes_per_second = bytes_per_second
        self._clock_ms = clock_ms
        self._free_at_ms = 0.0

    def moved(self, size_bytes: int) -> None:
        if self._bytes_per_second is not None:
            took_ms = size_bytes * 1000 / self._bytes_per_second
            self._free_at_ms = max(self._free_at_ms, self._clock_ms()) + took_ms

    def pause_ms(self) -> float:
        return max(0.0, self._free_at_ms - self._clock_ms())

    async def wait(self) -> None:
        if pause_ms := self.pause_ms():
            await asyncio.sleep(pause_ms / 1000)
