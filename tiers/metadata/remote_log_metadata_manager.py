"""`RemoteLogMetadataManager` (KIP-405): the interface to strongly consistent metadata of remote segments.

Third parties may add an implementation: `remote.log.metadata.manager.class.name` names an entry point of the group
`tidegate.remote_log_metadata_manager`, or `module:Class` (`MetadataManagerFactory`). The shortest way is a
`MetadataRecordLog` with `RecordLogMetadataManager` over it. `docs/examples/sqlite-metadata` is a complete example.
`tests/contract/test_remote_log_metadata_manager.py` tests the interface, but no test of one process can show fencing
and durability.

A manager must guarantee:

* Strong consistency. A write returns after this process's reads show it, so a process reads its own writes. All
  processes see the records of a partition in the same order. A write of several records appears as a whole or not at
  all.
* Ownership. At most one process owns a partition at a time. `owns` is true only when the owner's reads show every
  record of earlier owners, and when its ownership was confirmed less than 2 s ago.
* Fencing. A write by a process that lost the ownership raises `OwnershipLostError`, and no reader ever sees it, however
  long the process was suspended before. The writes that need no ownership say so.
* Freshness. `ensure_fresh` and `is_fresh` limit the age of an answer: the reads show every record that was acknowledged
  to any process up to that age ago (docs/design.md, safety rule 1). A manager that cannot tell is not fresh. Callers
  then answer an error that clients retry.
* Durability. A record that a write acknowledged survives the crash of every process and machine. The owner trims the
  broker's copy on its word. If records were lost anyway, `confirms` denies a position beyond them, and a manager that
  notices the loss raises an alarm (`status`) and is neither fresh nor owner. A manager never begins with empty metadata
  in the place of lost metadata: it asks `MetadataManagerContext.refusal_to_create` first.
* Order. Concurrent writes of a process to one partition take effect one after the other, each with the knowledge of
  the earlier ones.
* Reads are local and synchronous. They need no I/O that may block the event loop for long.

A manager may assume:

* One event loop calls it. `open` comes first and `close` last. The folder of its state belongs to this process.
* After an error or a cancellation of a write, the caller does not know whether the write happened. It looks at the
  metadata again before it continues, so the manager need not undo anything.
* Every segment id is used once, and each call concerns one user partition.

Rules for all implementations:

* `start_offset` and `end_offset` are inclusive. Only COPY_SEGMENT_FINISHED segments answer offset look-ups.
* A CUT voids, from its offset on, the segments that were copied in an earlier leader epoch, wherever their records
  stand. A void offset is answered by another segment or by none. `valid_end_offset` says how far a segment may be read.
* Every process reads the metadata of every partition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol
from uuid import UUID

from tiers.metadata.tenure import Tenure
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, OffsetAndEpoch
from tiers.model.segment_metadata import (
    Cut,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
    TierMarkerUpdate,
    TopicDeletionUpdate,
)
from tiers.model.segment_state import RemotePartitionDeleteState
from tiers.model.stored_segment import CoverSize, StoredSegment


class MetadataPosition(NamedTuple):
    """A position in a metadata partition: the next offset, and the leader epoch of the last batch before it.

    If the metadata is not in a topic, `topic_id` identifies the log that has it."""

    topic_id: UUID
    leader_epoch: int
    next_offset: int


@dataclass(frozen=True, slots=True)
class MetadataStatus:
    """The manager's status for operators."""

    alarm: str | None
    """The trouble that an operator must end; None without any. While there is trouble, nothing is written."""
    freshness_age_ms: int | None
    """The age of the metadata partition that is furthest behind; None: not all partitions were read yet."""
    owned_partitions: frozenset[int]
    """The metadata partitions that this process owns."""
    events_read: int
    foreign_records_read: int
    clock_skew_ms: int | None


class RemoteLogMetadataReader(Protocol):
    """The reading half of the interface, for followers, request handlers and the remote log reader."""

    async def ensure_fresh(self, partition: TopicIdPartition, max_age_ms: int, timeout_ms: int) -> None:
        """Waits until the partition's metadata was read to its high watermark at most `max_age_ms` ago.

        Returns at once when it is fresh already. Raises `RemoteLogMetadataNotReadyError` after `timeout_ms`."""

    def is_fresh(self, partition: TopicIdPartition, max_age_ms: int) -> bool:
        """Returns whether the metadata is that fresh, without waiting."""

    def is_final(self) -> bool:
        """Returns whether the metadata topic is gone, so that the known metadata is the last and nothing gets fresh.

        The last records may be missing. So a caller may rely only on what the metadata contains, not on what it
        lacks."""

    def remote_log_segment_metadata(self, partition: TopicIdPartition, offset: int) -> RemoteLogSegmentMetadata | None:
        """Returns the readable segment that holds `offset`; None without one."""

    def next_segment(self, partition: TopicIdPartition, offset: int) -> RemoteLogSegmentMetadata | None:
        """Returns the readable segment that holds `offset`, else the first one above it, else None."""

    def remote_log_segment_metadata_by_id(self, segment_id: RemoteLogSegmentId) -> RemoteLogSegmentMetadata | None:
        """Returns the segment in any state; None when it is unknown or DELETE_SEGMENT_FINISHED."""

    def list_remote_log_segments(
        self, partition: TopicIdPartition, min_offset: int = 0
    ) -> Iterator[RemoteLogSegmentMetadata]:
        """Yields segments in the states 0, 1 and 2 with `end_offset` >= `min_offset`, by ascending start offset."""

    def stored_segments(self, partition: TopicIdPartition, min_offset: int = 0) -> Iterator[StoredSegment]:
        """Yields the same segments as `list_remote_log_segments`, for callers that need few fields of many segments."""

    def answering_segments(self, partition: TopicIdPartition, offset: int = 0) -> Iterator[StoredSegment]:
        """Yields `next_segment` of `offset`, then of the offset after its valid end, and so on to the remote end.

        The iterator may or may not show changes that happen meanwhile. A caller that needs two segments of the same
        state must not await anything between them."""

    def answered_offsets(self, partition: TopicIdPartition, offset: int = 0) -> Iterator[tuple[int, int]]:
        """Yields the runs of offsets that readable segments have, each as its first and its next offset, in order.

        The first run has `offset`, or lies above it. It takes a quarter of the time of `answering_segments`. The
        iterator may or may not show changes that happen meanwhile."""

    def segments_apart(self, partition: TopicIdPartition) -> list[StoredSegment]:
        """Returns the segments in the states 0, 1 and 2 that are not whole, by ascending start offset.

        A readable segment is *whole* if it answers alone for all of its offsets. So these are the attempts, the begun
        deletions, and what CUTs and later copies have replaced, wholly or in part."""

    def cover_size(self, partition: TopicIdPartition) -> CoverSize:
        """Returns the sums over the readable segments, without a look at each of them."""

    def earliest_offset(self, partition: TopicIdPartition) -> int | None:
        """Returns the start offset of the first readable segment; None when there is none."""

    def remote_end_offset(self, partition: TopicIdPartition) -> int | None:
        """Returns the inclusive end of the last readable segment (Ry); None when there is none."""

    def cuts(self, partition: TopicIdPartition) -> Sequence[Cut]:
        """Returns the CUTs, by leader epoch and offset."""

    def log_start_offset(self, partition: TopicIdPartition) -> int | None:
        """Returns the highest offset of `log_starts`, or `earliest_offset` without any."""

    def log_starts(self, partition: TopicIdPartition) -> list[LogStart]:
        """Returns every recorded log start whose reason deletes records, the highest first.

        The list leaves out a log start of another history than the segments: the last readable record below it cannot
        be of its history (`LogStart.may_follow`)."""

    def recorded_log_starts(self, partition: TopicIdPartition) -> list[LogStart]:
        """Returns every recorded log start: also those that an owner only saw, and those of other histories."""

    def local_log_start(self, partition: TopicIdPartition) -> OffsetAndEpoch | None:
        """Returns the end of the last trim that began; None before the first. The local log may start below it."""

    def gaps(self, partition: TopicIdPartition) -> list[LogGap]:
        """Returns the recorded gaps, by ascending offset. They do not overlap."""

    def gap_at(self, partition: TopicIdPartition, offset: int) -> LogGap | None:
        """Returns the recorded gap that holds `offset`; None without one."""

    def tier_marker(self, location: str) -> TierMarkerUpdate | None:
        """Returns the recorded marker of a location of the store; None without one.

        It is as fresh as the metadata of `TIER_PARTITION`."""

    def topic_deletions(self) -> Mapping[UUID, TopicDeletionUpdate]:
        """Returns the last recorded deletion of each topic that has one, with the time (ms) of the brokers' clock."""

    def missing_topics(self) -> Mapping[UUID, int]:
        """Returns the topics recorded as missing, each with the time (ms, by the brokers' clock) of its record."""

    def remote_partition_delete_state(self, partition: TopicIdPartition) -> RemotePartitionDeleteState | None:
        """Returns the state of the deletion of the whole partition; None when no deletion was requested."""

    def deleted_segments(
        self, partition: TopicIdPartition | None = None, until_ms: int | None = None
    ) -> list[RemoteLogSegmentMetadata]:
        """Returns the segments that are DELETE_SEGMENT_FINISHED and not forgotten yet, of one partition or of all.

        `event_timestamp_ms` is the time (by the brokers' clock) of that record, at most `until_ms` if it is given."""

    def copy_plans(self, partition: TopicIdPartition) -> list[CopyPlan]:
        """Returns the copy plans that have not ended."""

    def topic_tier_config(self, topic_id: UUID) -> Mapping[str, str]:
        """Returns the tier settings that were set for the topic through a proxy, by Kafka's names, or an empty mapping.

        They are as fresh as the metadata of the topic's partition 0."""

    def topics_with_tier_config(self) -> list[TopicIdPartition]:
        """Returns partition 0 of every topic with tier settings of its own."""

    def is_known(self, partition: TopicIdPartition) -> bool:
        """Returns whether any metadata of this partition is known."""

    def is_tiered(self, topic_id: UUID) -> bool:
        """Returns whether any metadata of this topic is known."""

    def partitions(self) -> list[TopicIdPartition]:
        """Returns every user partition with metadata."""


class RemoteLogMetadataManager(RemoteLogMetadataReader, Protocol):
    """The writing half of the interface, for the owner's tasks. Any proxy may write some of the records, as noted."""

    async def add_remote_log_segment_metadata(self, metadata: RemoteLogSegmentMetadata) -> None:
        """Writes a new segment. Its state must be COPY_SEGMENT_STARTED."""

    async def update_remote_log_segment_metadata(self, update: RemoteLogSegmentMetadataUpdate) -> None:
        """Moves a known segment to a later state. Raises `InvalidTransitionError` for a transition that is invalid."""

    async def forget_deleted_segments(self, segments: Sequence[RemoteLogSegmentId]) -> None:
        """Removes every record of segments of one partition that are DELETE_SEGMENT_FINISHED. Their objects are gone.

        `InvalidTransitionError` when a segment has another state, or is forgotten already."""

    async def put_copy_plan(self, plan: CopyPlan) -> None:
        """Announces all segments of the plan in one record. Each is COPY_SEGMENT_STARTED from then on."""

    async def end_copy_plan(self, plan: CopyPlan) -> None:
        """Forgets the plan's segments that were neither announced nor deleted individually: they have no objects.

        Raises `InvalidTransitionError` while the deletion of such a segment has not ended, since it needs the
        announcement."""

    async def put_remote_partition_delete_metadata(self, metadata: RemotePartitionDeleteMetadata) -> None:
        """Moves the deletion of a partition to a later state."""

    async def put_cut(
        self, partition: TopicIdPartition, leader_epoch: int, offset: int, *, is_proved: bool = True
    ) -> None:
        """Records a CUT. It removes no other one: of several in one leader epoch, the lowest decides.

        In the same step, `local_log_start` ends if it lies above `offset` and is of an earlier leader epoch."""

    async def put_named_cut(self, partition: TopicIdPartition, leader_epoch: int, offset: int) -> None:
        """Records a proved CUT at an offset that an operator named, as `put_cut` does. Needs no ownership.

        In the same step, every recorded log start above `offset` ends that was made in an earlier leader epoch: it is
        of the history that is void. The leader may reach that epoch later."""

    async def put_local_log_start(self, partition: TopicIdPartition, start: OffsetAndEpoch) -> None:
        """Records that the local log is about to be trimmed to `start`."""

    async def put_log_start(
        self,
        partition: TopicIdPartition,
        start: LogStart,
        timeout_ms: int | None = None,
        check: Callable[[], None] = lambda: None,
    ) -> None:
        """Records where the log starts. Needs no ownership.

        No record is needed if `log_starts` has one at or above the offset, of the same leader epoch or a later one.

        The record may have to wait for others. So `check` is called right before it is sent. If it raises an error,
        nothing is recorded, and the caller gets the error.

        An open transaction of a killed process delays the record until the coordinator ends that transaction, after
        about 20 s. A caller that can wait that long passes `timeout_ms`. None: the timeout of every other write."""

    async def end_log_start(self, partition: TopicIdPartition, start: LogStart) -> None:
        """Removes the record of a log start that the leader disproves.

        In the same step, `local_log_start` ends if the log start covers it (`LogStart.covers`)."""

    async def put_log_gap(self, partition: TopicIdPartition, gap: LogGap, leader_epoch: int) -> None:
        """Records a gap. It replaces a recorded gap with the same first offset."""

    async def end_log_gap(self, partition: TopicIdPartition, gap: LogGap) -> None:
        """Removes the record of a gap, for example when the gap lies below the log start."""

    async def restore(
        self,
        partition: TopicIdPartition,
        *,
        segments: Sequence[RemoteLogSegmentMetadata] = (),
        cuts: Sequence[Cut] = (),
        gaps: Sequence[LogGap] = (),
        log_starts: Sequence[LogStart] = (),
        local_log_start: OffsetAndEpoch | None = None,
    ) -> None:
        """Records what an operator found that the metadata had lost. Needs no ownership.

        The segments are COPY_SEGMENT_STARTED. Those that the metadata knows are left out."""

    async def put_tier_marker(self, location: str, marker_id: UUID, *, is_confirmed: bool) -> None:
        """Records the marker of a location, unless another id is recorded. Needs no ownership.

        All processes make their changes one after the other."""

    async def put_topic_deletion(self, topic_id: UUID, topic: str, *, is_confirmed: bool) -> None:
        """Records that a client is about to delete the topic, or an operator's word. Needs no ownership."""

    async def end_topic_deletion(self, topic_id: UUID) -> None:
        """Removes the record of the deletion, when the tier has nothing of the topic, or a broker knows the topic."""

    async def put_topic_missing(self, topic_id: UUID, topic: str, *, is_missing: bool) -> None:
        """Records that no broker knows the topic from now on, or that a broker knows it again."""

    def metadata_topic_id(self) -> UUID | None:
        """Returns the id of the metadata topic; None if the metadata is not in a topic of the cluster.

        While no broker knows the metadata topic by this id, the owners delete no missing topic."""

    def position(self, partition: TopicIdPartition) -> MetadataPosition:
        """How far this process has read the metadata partition of `partition`."""

    async def confirms(self, partition: TopicIdPartition, position: MetadataPosition, timeout_ms: int) -> bool:
        """Returns whether the metadata topic has the id in `position`, and its log still reaches that position.

        The log must also have the same history up to there. Raises `RemoteLogError` when the leader does not answer."""

    async def change_topic_tier_config(
        self,
        topic_id: UUID,
        topic: str,
        changes: Mapping[str, str | None],
        check: Callable[[Mapping[str, str]], None] = lambda before: None,
    ) -> None:
        """Sets keys of the topic's tier settings; None removes a key. Needs no ownership.

        All processes make their changes one after the other. `check` is called with the settings right before the
        change. An exception from it reaches the caller, and nothing changes."""

    def owns(self, partition: TopicIdPartition) -> bool:
        """Returns whether this process is the owner now.

        An owner has read all records, is not fenced, and had its membership confirmed less than 2 s ago."""

    def tenure(self, partition: TopicIdPartition) -> Tenure | None:
        """Returns the tenure in which this process owns the partition, or waits to own it again; None: it has ended.

        The value changes when another owner may have written. `begin_in` ties the writes of a task to a tenure."""

    def seen_at_ms(self, segment_id: RemoteLogSegmentId) -> int | None:
        """Returns when (monotonic clock, ms) this process saw the segment become COPY_SEGMENT_FINISHED; None: not yet.

        A segment in the saved state counts as seen when the state was opened."""

    async def clock_skew_ms(self, partition: TopicIdPartition, anew: bool = False) -> int:
        """Returns how far the clock of `event_timestamp_ms` is ahead of this machine's clock.

        The skew is measured when a record is written. With `anew`, a record is written now."""

    def status(self) -> MetadataStatus:
        """Returns the status. It may be called at any time, also before `open` and after `close`."""

    async def open(self) -> None:
        """Raises a `RemoteLogError`. If it is retriable, the caller calls `close`, and then `open` again."""

    async def close(self) -> None:
        """Gives up the ownership. It may be called twice, and after `open` failed."""
