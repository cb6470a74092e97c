"""`scrub_segments`: the task of a scrub: it reads whole segments back and reports what is wrong with each.

The worker's loop reads objects ahead. The task's own thread checks them, in order. The verdict on a segment is the same
as that of `tidegate tier verify`. A deep scrub also decodes every record, with the decoder that readers use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from functools import partial

import numpy as np

from pipeline.config import PipelineConfig
from pipeline.decode.arrow_records import decode_batches
from pipeline.decode.record_columns import RecordColumns
from pipeline.decode.wanted_batches import MAX_OFFSET, CorruptRecordsError
from pipeline.source.remote_read import GETS_AT_ONCE, in_order
from pipeline.spark.worker import worker
from protocol.records.record_batch import RecordBatch
from tiers.access.open_tier import open_key_ring
from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.storage.retries import with_retries
from tiers.verify.read_back import ChunkRun
from tiers.verify.segment_verification import Damage, SegmentVerification, missing_object

_OFFSETS = RecordColumns(("offset",))
_STEPS_AHEAD = 2


@dataclass(frozen=True, slots=True)
class ScrubSetup:
    """The settings that all tasks of a run share."""

    config: PipelineConfig
    cluster_id: str
    is_deep: bool


@dataclass(frozen=True, slots=True)
class SegmentVerdict:
    """The result of one segment. `trouble` is the reason why it was not read to its end; the rest is then unknown.
    `missing_offsets` is the number of offsets that its log lacks; compaction and transactions leave such gaps."""

    segment_id: RemoteLogSegmentId
    damages: tuple[Damage, ...] = ()
    batches: int = 0
    records: int = 0
    log_bytes: int = 0
    missing_offsets: int = 0
    trouble: str | None = None


def scrub_segments(setup: ScrubSetup, segments: Sequence[RemoteLogSegmentMetadata]) -> list[SegmentVerdict]:
    """Returns verdicts in the order of `segments`. Raises `RemoteTierError`, `RemoteLogError` if the store cannot be
    opened."""
    verdicts: list[SegmentVerdict] = []
    for step in worker().iterate(_steps(setup, segments, verdicts.append), _STEPS_AHEAD):
        step()
    return verdicts


async def _steps(
    setup: ScrubSetup, segments: Sequence[RemoteLogSegmentMetadata], judged: Callable[[SegmentVerdict], None]
) -> AsyncGenerator[Callable[[], None]]:
    """Yields the checks of what was read, in order. The task's thread calls them."""
    storage = await worker().storage(setup.config, setup.cluster_id)
    ring = open_key_ring(setup.config)
    for segment in segments:
        scrub = _SegmentScrub(segment, setup.is_deep)
        async with aclosing(scrub.steps(storage, ring if ring.keys else None)) as steps:
            async for step in steps:
                yield step
        yield partial(_end, scrub, judged)


def _end(scrub: _SegmentScrub, judged: Callable[[SegmentVerdict], None]) -> None:
    judged(scrub.verdict())


class _SegmentScrub:
    def __init__(self, segment: RemoteLogSegmentMetadata, is_deep: bool) -> None:
        self._segment = segment
        self._records = RecordsCheck(segment) if is_deep else None
        self._verification: SegmentVerification | None = None
        self._missing: Damage | None = None
        self._trouble: str | None = None
        self._log_bytes = 0

    async def steps(self, storage: RemoteStorageManager, ring: KeyRing | None) -> AsyncGenerator[Callable[[], None]]:
        segment = self._segment
        try:
            indexes = await with_retries(lambda: storage.fetch_indexes(segment))
            verification = self._verification = SegmentVerification(segment, indexes, ring, self._records)
            calls = ((1, _get(storage, segment, run)) for run in verification.runs())
            async with aclosing(in_order(calls, GETS_AT_ONCE)) as fetched:
                async for run, view in fetched:
                    yield partial(self._add, verification, run, view)
        except RemoteResourceNotFoundError:
            if self._verification is None:
                self._missing = missing_object(segment, ".indexes")
            else:
                yield self._verification.miss_log
        except RemoteStorageError as error:
            self._trouble = str(error)

    def _add(self, verification: SegmentVerification, run: ChunkRun, view: memoryview) -> None:
        verification.add(run, view)
        self._log_bytes += sum(chunk.log_bytes for chunk in run.chunks)

    def verdict(self) -> SegmentVerdict:
        verification = self._verification
        if verification is None:
            damages = () if self._missing is None else (self._missing,)
            return SegmentVerdict(self._segment.segment_id, damages, trouble=self._trouble)
        return SegmentVerdict(
            self._segment.segment_id,
            # The end checks need the whole log.
            tuple(verification.damages if self._trouble else verification.finish()),
            verification.batches,
            verification.records if self._records is None else self._records.count,
            self._log_bytes,
            verification.missing_offsets,
            self._trouble,
        )


def _get(
    storage: RemoteStorageManager, segment: RemoteLogSegmentMetadata, run: ChunkRun
) -> Callable[[], Awaitable[tuple[ChunkRun, memoryview]]]:
    async def get() -> tuple[ChunkRun, memoryview]:
        fetch = partial(storage.fetch_log_segment, segment, run.start_position, run.end_position)
        return run, await with_retries(fetch)

    return get


class RecordsCheck:
    """Decodes every record of a chunk's batches. After a batch that cannot be decoded, it continues with the next."""

    def __init__(self, segment: RemoteLogSegmentMetadata) -> None:
        self._partition = segment.topic_id_partition
        self.count = 0

    def __call__(self, log_bytes: memoryview, batches: Sequence[RecordBatch]) -> Iterator[tuple[RecordBatch, str]]:
        number = 0
        while number < len(batches):
            try:
                for first in self._disordered(log_bytes, batches[number:]):
                    yield _holder(batches, first), f"offset {first} comes after a higher one"
                return
            except CorruptRecordsError as error:
                bad = _holder(batches, error.offset)
                yield bad, str(error)
                number = max(number, batches.index(bad)) + 1

    def _disordered(self, data: memoryview, batches: Sequence[RecordBatch]) -> Iterator[int]:
        """Yields offsets that are not above the previous one. Raises `CorruptRecordsError`."""
        last = -1
        for rows in decode_batches(
            data,
            topic=self._partition.topic,
            partition=self._partition.partition,
            first_offset=0,
            end_offset=MAX_OFFSET,
            columns=_OFFSETS,
            is_committed_only=False,
            checked=batches,
        ):
            offsets = rows.column(0).to_numpy()
            self.count += len(offsets)
            if offsets[0] <= last:
                yield int(offsets[0])
            elif not (rises := offsets[1:] > offsets[:-1]).all():
                yield int(offsets[1 + int(np.argmin(rises))])
            last = int(offsets[-1])


def _holder(batches: Sequence[RecordBatch], offset: int) -> RecordBatch:
    """Returns the batch that holds `offset` or begins there."""
    return batches[max(0, bisect_right(batches, offset, key=_base_offset) - 1)]


def _base_offset(batch: RecordBatch) -> int:
    return batch.base_offset
