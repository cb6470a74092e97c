"""`CopyPlan`: one record that announces many copies, namely every possible attempt for each tile.

A driver that copies on other machines does not know in advance which attempts will run: Spark repeats a task whose
executor died, and may run a task twice at the same time. So the plan determines the uuid of each attempt, and its
record stands for a COPY_SEGMENT_STARTED of each. The metadata thus knows the names of all objects that an attempt may
store, and the owner can delete them even if the driver or an executor died. A tombstone ends the plan. By then, every
attempt either has its own record, or never began, or its objects are deleted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from uuid import UUID, uuid5

from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import (
    LeaderEpochEntry,
    OwnMetadataRecord,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentState,
)

NOT_MEASURED_BYTES = 0
"""The size of a segment that only a plan announces, because it has not been read yet. A real segment is never empty."""
MAX_SEGMENTS = 100_000
"""The most attempts that one plan may announce. It bounds the memory that a malicious record can take."""


@dataclass(frozen=True, slots=True)
class CopyPlan(OwnMetadataRecord):
    """A plan.

    Tile n has the offsets [`bounds[n]`, `bounds[n + 1]`), which are whole batches. `leader_epoch` is the epoch of the
    log before the first tile. The driver has compared the log of the leader of `copy_epoch`. Raises `ValueError` for
    invalid values."""

    plan_id: UUID
    attempts: int
    leader_epoch: int
    copy_epoch: int
    bounds: tuple[int, ...]

    def __post_init__(self) -> None:
        is_ascending = all(lo < hi for lo, hi in zip(self.bounds, self.bounds[1:], strict=False))
        if len(self.bounds) < 2 or self.bounds[0] < 0 or not is_ascending or self.leader_epoch < 0:
            raise ValueError(f"plan {self.plan_id} has no tiles, invalid bounds or no leader epoch")
        if not 0 < self.attempts * (len(self.bounds) - 1) <= MAX_SEGMENTS:
            raise ValueError(
                f"plan {self.plan_id} has {self.attempts} attempts for {len(self.bounds) - 1} tiles, which is none "
                "or too many"
            )

    @property
    def tiles(self) -> list[tuple[int, int]]:
        return list(zip(self.bounds, self.bounds[1:], strict=False))

    def segment_id(self, tile: int, attempt: int) -> RemoteLogSegmentId:
        partition = self.topic_id_partition
        name = f"{partition.topic_id}/{partition.partition}/{self.bounds[tile]}/{attempt}"
        return RemoteLogSegmentId(partition, uuid5(self.plan_id, name))

    def segment_ids(self) -> list[RemoteLogSegmentId]:
        """Returns the ids of all attempts for all tiles."""
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
                    copy_epoch=self.copy_epoch,
                )
