"""`RemoteLogMetadataManager` (KIP-405): strongly consistent metadata of remote segments. Third parties may add one.

Reads are local and synchronous (the materialised state), writes go to the metadata topic. Rules:

* A write returns after this process's own read_committed reader has seen it: read your writes.
* A write by a process that lost the partition's ownership raises `OwnershipLostError` and is not visible to anybody.
* Offsets: `start_offset` and `end_offset` are inclusive. Only COPY_SEGMENT_FINISHED segments answer offset look-ups.
* A clamp cuts what was finished before it: above its end nothing of that answers an offset look-up, and a segment that
  sticks out of it says how far it may be read (`valid_end_offset`). What was finished later is not affected.
* Every process reads every metadata partition; `ensure_fresh` says how old the answer may be (DESIGN, safety rule 1).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import NamedTuple, Protocol
from uuid import UUID

from tiers.metadata.stored_segment import StoredSegment
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, OffsetAndEpoch
from tiers.model.segment_metadata import (
    RemoteLogClampUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
)
from tiers.model.segment_state import RemotePartitionDeleteState


class MetadataPosition(NamedTuple):
    """How far a metadata partition was read: the next offset, and the leader epoch of the last batch before it."""

    topic_id: UUID
    leader_epoch: int
    next_offset: int


class RemoteLogMetadataReader(Protocol):
    """The reading half: what followers, handlers and the reader need."""

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        """Returns once the partition's metadata was read to its high watermark at most `max_age_ms` ago.

        Raises `RemoteLogMetadataNotReadyError` after `timeout_ms`. Returns at once when it is fresh already.
        """

    def is_fresh(self, partition: TopicIdPartition, max_age_ms: int) -> bool:
        """The same question without waiting."""

    def is_final(self) -> bool:
        """Whether the metadata topic is gone: nothing that is known can change any more, and nothing is ever fresh.

        What was written last may be missing, so only what is known to be there may be relied on."""

    def remote_log_segment_metadata(
        self, partition: TopicIdPartition, offset: int, leader_epoch: int | None = None
    ) -> RemoteLogSegmentMetadata | None:
        """The readable segment that holds `offset` (of that leader epoch, if given), else None."""

    def next_segment(self, partition: TopicIdPartition, offset: int) -> RemoteLogSegmentMetadata | None:
        """The readable segment that holds `offset`, else the first one above it, else None."""

    def remote_log_segment_metadata_by_id(self, segment_id: RemoteLogSegmentId) -> RemoteLogSegmentMetadata | None:
        """The segment in whatever state, None when unknown or DELETE_SEGMENT_FINISHED."""

    def list_remote_log_segments(
        self, partition: TopicIdPartition, min_offset: int = 0
    ) -> Iterator[RemoteLogSegmentMetadata]:
        """Segments in the states 0, 1 and 2 with `end_offset` >= `min_offset`, by ascending start offset."""

    def stored_segments(self, partition: TopicIdPartition, min_offset: int = 0) -> Iterator[StoredSegment]:
        """As `list_remote_log_segments`, for who looks at a few fields of very many."""

    def answering_segments(self, partition: TopicIdPartition, offset: int = 0) -> Iterator[StoredSegment]:
        """`next_segment` of `offset`, then of the offset behind that one's valid end, and so on to the remote end.

        What changes on the way may be seen or not. Nothing may be awaited between two of them that must fit."""

    def earliest_offset(self, partition: TopicIdPartition) -> int | None:
        """The start offset of the first readable segment, None when there is none."""

    def remote_end_offset(self, partition: TopicIdPartition) -> int | None:
        """The inclusive end of the last readable segment (Ry), None when there is none."""

    def highest_offset_for_epoch(self, partition: TopicIdPartition, leader_epoch: int) -> int | None:
        """The highest end offset that was ever COPY_SEGMENT_FINISHED in `leader_epoch`; only a clamp lowers it."""

    def log_start_offset(self, partition: TopicIdPartition) -> int | None:
        """The offset of the highest of `log_starts`, or `earliest_offset` if there is none. A leader may deny it."""

    def log_starts(self, partition: TopicIdPartition) -> list[LogStart]:
        """Every recorded log start whose reason deletes records, the highest first.

        A remote segment that begins in a later leader epoch below a log start denies that log start. The list leaves
        such log starts out."""

    def local_log_start(self, partition: TopicIdPartition) -> OffsetAndEpoch | None:
        """The end of the last trim that was begun; None before the first. The local log may start below it."""

    def gaps(self, partition: TopicIdPartition) -> list[LogGap]:
        """The recorded gaps, by ascending offset. They do not overlap."""

    def gap_at(self, partition: TopicIdPartition, offset: int) -> LogGap | None:
        """The recorded gap that holds `offset`."""

    def is_accepted(self, partition: TopicIdPartition) -> bool:
        """Whether an operator accepts the records that the metadata and the brokers know as all that is left."""

    def is_topic_deleted(self, topic_id: UUID) -> bool:
        """Whether the deletion of the topic is proved: a proxy relayed it, or an operator said so."""

    def deleted_topic_ids(self) -> set[UUID]:
        """The ids of all topics for which `is_topic_deleted` is true."""

    def missing_topics(self) -> Mapping[UUID, int]:
        """The topics that are recorded as missing, each with the time (ms, by the brokers' clock) of its record."""

    def remote_partition_delete_state(self, partition: TopicIdPartition) -> RemotePartitionDeleteState | None:
        """How far the deletion of the whole partition has come, None when it was never asked for."""

    def is_quarantine_deletion_asked(self, segment_id: RemoteLogSegmentId) -> bool:
        """Whether an operator wants this segment, which was cut off, deleted."""

    def copy_plans(self, partition: TopicIdPartition) -> list[CopyPlan]:
        """Those that have not ended."""

    def topic_tier_config(self, topic_id: UUID) -> Mapping[str, str]:
        """The tier settings that the topic was given through a proxy, by Kafka's names; empty when it was given none.

        How fresh they are, its partition 0 tells."""

    def topics_with_tier_config(self) -> list[TopicIdPartition]:
        """Partition 0 of every topic that was given tier settings."""

    def is_known(self, partition: TopicIdPartition) -> bool:
        """Whether any metadata of this partition is known."""

    def is_tiered(self, topic_id: UUID) -> bool:
        """Whether any metadata of this topic is known."""

    def partitions(self) -> list[TopicIdPartition]:
        """Every user partition with metadata."""


class RemoteLogMetadataManager(RemoteLogMetadataReader, Protocol):
    """The writing half: the owner's tasks, and any proxy for the log start offset."""

    async def add_remote_log_segment_metadata(self, metadata: RemoteLogSegmentMetadata) -> None:
        """Writes a new segment; its state must be COPY_SEGMENT_STARTED."""

    async def update_remote_log_segment_metadata(self, update: RemoteLogSegmentMetadataUpdate) -> None:
        """Moves a known segment to a later state; `InvalidTransitionError` when it cannot move there."""

    async def put_copy_plan(self, plan: CopyPlan) -> None:
        """Announces, in one record, every segment that the plan names: each is COPY_SEGMENT_STARTED from now on."""

    async def end_copy_plan(self, plan: CopyPlan) -> None:
        """Forgets what of the plan nobody announced or deleted by its own name: it has no objects.

        `InvalidTransitionError` while a deletion of any of it has not ended, for that needs its announcement."""

    async def put_remote_partition_delete_metadata(self, metadata: RemotePartitionDeleteMetadata) -> None:
        """Moves the deletion of a partition forward."""

    async def put_remote_log_clamp(self, clamp: RemoteLogClampUpdate) -> None:
        """Cuts every segment that is finished by now at the clamp's end. Its writer is filled in."""

    async def ask_for_quarantine_deletion(self, segment_id: RemoteLogSegmentId) -> None:
        """Tells the owner to delete a segment that was cut off. Needs no ownership."""

    async def put_local_log_start(self, partition: TopicIdPartition, start: OffsetAndEpoch) -> None:
        """Records that the local log is about to be trimmed to `start`."""

    async def put_log_start(
        self,
        partition: TopicIdPartition,
        start: LogStart,
        timeout_ms: int | None = None,
        denied: Collection[LogStart] = (),
    ) -> None:
        """Records where the log starts, unless a higher log start is recorded already. Needs no ownership.

        `denied` has the recorded log starts that the leader of `start` does not confirm; they do not count. A
        transaction of a killed process holds the record back until the coordinator ends that transaction, some 20 s
        later. A caller that can wait so long passes `timeout_ms`. None: the timeout of every other write."""

    async def put_log_gap(self, partition: TopicIdPartition, gap: LogGap, leader_epoch: int) -> None:
        """Records a gap. It replaces a recorded gap with the same first offset."""

    async def end_log_gap(self, partition: TopicIdPartition, gap: LogGap) -> None:
        """Removes the record of a gap, for example when the gap lies below the log start."""

    async def accept(self, partition: TopicIdPartition) -> None:
        """Records that an operator accepts the partition: see `is_accepted`. Needs no ownership."""

    async def end_acceptance(self, partition: TopicIdPartition) -> None:
        """Removes the operator's acceptance, when the owner has gone on and does not need it any more."""

    async def put_topic_deletion(self, topic_id: UUID, topic: str) -> None:
        """Records that the topic was deleted. Needs no ownership."""

    async def end_topic_deletion(self, topic_id: UUID) -> None:
        """Removes the record of the deletion, when the tier has nothing of the topic, or a broker knows the topic."""

    async def put_topic_missing(self, topic_id: UUID, topic: str, *, is_missing: bool) -> None:
        """Records that no broker knows the topic from now on, or that a broker knows it again."""

    def position(self, partition: TopicIdPartition) -> MetadataPosition:
        """How far this process has read the metadata partition of `partition`."""

    async def confirms(self, partition: TopicIdPartition, position: MetadataPosition, timeout_ms: int) -> bool:
        """Whether the metadata topic has the id in `position`, and its log still reaches and continues that position.

        Raises `RemoteLogError` when the leader does not answer."""

    async def change_topic_tier_config(
        self,
        topic_id: UUID,
        topic: str,
        changes: Mapping[str, str | None],
        check: Callable[[Mapping[str, str]], None] = lambda before: None,
    ) -> None:
        """Sets keys of the topic's tier settings, None unsets. Needs no ownership.

        Changes happen one after the other, whoever makes them: `check` is given what the topic has right before, and
        what it raises comes out and changes nothing."""

    def owns(self, partition: TopicIdPartition) -> bool:
        """Whether this process is the owner now: caught up, not fenced, its membership confirmed less than 2 s ago."""

    def seen_at_ms(self, segment_id: RemoteLogSegmentId) -> int | None:
        """When (monotonic clock, ms) this process's reader saw the segment become COPY_SEGMENT_FINISHED; None: not yet.

        A segment read from the saved state counts as seen when the state was opened."""

    async def clock_skew_ms(self, partition: TopicIdPartition, anew: bool = False) -> int:
        """How far the clock of `event_timestamp_ms` is ahead of ours, as measured when a record was written; `anew`: by
        one that is written now."""

    async def open(self) -> None: ...

    async def close(self) -> None: ...
