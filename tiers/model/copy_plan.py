"""`CopyPlan`: one record that announces many copies: of each tile, every attempt that may be made at it.

Who copies on other machines does not know before which attempt begins: Spark repeats a task whose executor died, and
may run one twice at a time. So the uuid of an attempt follows from the plan, and the record stands for a
COPY_SEGMENT_STARTED of each: what any of them stored has a name that the metadata knows, and is deleted by it, whoever
died. The end of a plan is its tombstone: what was not announced again under its own name by then was never begun, or
its objects are gone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID, uuid5

from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState

NOT_MEASURED_BYTES = 0
"""The size of what a plan alone announces: nobody has read it yet. A real segment is never empty."""
MAX_SEGMENTS = 100_000
"""What a plan may announce. Whoever may write to the topic may say anything."""


@dataclass(frozen=True, slots=True)
class CopyPlan:
    """Our own record type. Tile n has the offsets [`bounds[n]`, `bounds[n + 1]`), whole batches; `leader_epoch` is that
    of the log before the first. Raises `ValueError` of what is no plan."""

    topic_id_partition: TopicIdPartition
    writer: str
    event_timestamp_ms: int
    plan_id: UUID
    attempts: int
    leader_epoch: int
    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        is_ascending = all(lo < hi for lo, hi in zip(self.bounds, self.bounds[1:], strict=False))
        if len(self.bounds) < 2 or self.bounds[0] < 0 or not is_ascending or self.leader_epoch < 0:
            raise ValueError(f"plan {self.plan_id} has no tiles")
        if not 0 < self.attempts * (len(self.bounds) - 1) <= MAX_SEGMENTS:
            raise ValueError(f"plan {self.plan_id} has {self.attempts} attempts at {len(self.bounds) - 1} tiles")

    @property
    def tiles(self) -> list[tuple[int, int]]:
        return list(zip(self.bounds, self.bounds[1:], strict=False))

    def segment_id(self, tile: int, attempt: int) -> RemoteLogSegmentId:
        partition = self.topic_id_partition
        name = f"{partition.topic_id}/{partition.partition}/{self.bounds[tile]}/{attempt}"
        return RemoteLogSegmentId(partition, uuid5(self.plan_id, name))

    def segment_ids(self) -> list[RemoteLogSegmentId]:
        """Of all attempts at all tiles."""
        return [self.segment_id(tile, attempt) for tile in range(len(self.tiles)) for attempt in range(self.attempts)]

    def announced(self) -> Iterator[RemoteLogSegmentMetadata]:
        for number, (lo, hi) in enumerate(self.tiles):
            for attempt in range(self.attempts):
                yield RemoteLogSegmentMetadata(
                    segment_id=self.segment_id(number, attempt),
                    start_offset=lo,
                    end_offset=hi - 1,
                    broker_id=-1,
                    max_timestamp_ms=-1,
                    event_timestamp_ms=self.event_timestamp_ms,
                    segment_leader_epochs=(LeaderEpochEntry(self.leader_epoch, lo),),
                    segment_size_bytes=NOT_MEASURED_BYTES,
                    state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
                )
