"""`scrub_segments`: the task of a scrub: it reads whole segments back and reports what is wrong with each.

The verdict on a segment is that of `tidegate tier verify`. A deep scrub also decodes every record, with the decoder
that readers use.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from pipeline.config import PipelineConfig
from pipeline.decode.arrow_records import decode_batches
from pipeline.decode.record_columns import RecordColumns
from pipeline.decode.wanted_batches import MAX_OFFSET, CorruptRecordsError
from pipeline.worker import worker
from protocol.records.record_batch import RecordBatch
from tiers.access.open_tier import open_key_ring
from tiers.bounded_gather import bounded_gather
from tiers.errors import RemoteStorageError
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.verify.segment_verification import Damage, SegmentVerdict, verify_segment

_OFFSETS = RecordColumns(("offset",))
_SEGMENTS_AT_ONCE = 2
_GETS_AT_ONCE = 3


@dataclass(frozen=True, slots=True)
class ScrubSetup:
    """The settings that all tasks of a run share."""

    config: PipelineConfig = field(repr=False)
    cluster_id: str
    is_deep: bool


@dataclass(frozen=True, slots=True)
class ScrubbedSegment:
    """The result of one segment. `trouble` is the reason why it was not read to its end. Then the verdict has only the
    damages that were found before."""

    segment_id: RemoteLogSegmentId
    verdict: SegmentVerdict
    trouble: str | None = None


async def scrub_segments(setup: ScrubSetup, segments: Sequence[RemoteLogSegmentMetadata]) -> list[ScrubbedSegment]:
    """Returns the results in the order of `segments`. Raises `RemoteTierError`, `RemoteLogError` if the store cannot be
    opened."""
    storage = await worker().storage(setup.config, setup.cluster_id)
    ring = open_key_ring(setup.config)

    async def scrub(segment: RemoteLogSegmentMetadata) -> ScrubbedSegment:
        check = RecordsCheck(segment) if setup.is_deep else None
        ciphers = ring if ring.keys else None
        found: list[Damage] = []
        try:
            verdict = await verify_segment(
                storage, segment, ciphers, check, gets_at_once=_GETS_AT_ONCE, until_failure=found
            )
        except RemoteStorageError as error:
            return ScrubbedSegment(segment.segment_id, SegmentVerdict(tuple(found)), str(error))
        return ScrubbedSegment(segment.segment_id, verdict if check is None else replace(verdict, records=check.count))

    return await bounded_gather(segments, scrub, _SEGMENTS_AT_ONCE)


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
