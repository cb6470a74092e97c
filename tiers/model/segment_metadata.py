"""What the metadata topic says of a remote log segment (KIP-405, KIP-917): the events and the folded value."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from uuid import UUID

from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, OffsetAndEpoch
from tiers.model.segment_state import RemoteLogSegmentState, RemotePartitionDeleteState


@dataclass(frozen=True, slots=True)
class LeaderEpochEntry:
    """Leader epoch `epoch` begins at `start_offset`; the first of a segment is clipped to the segment's start."""

    epoch: int
    start_offset: int


@dataclass(frozen=True, slots=True)
class RemoteLogSegmentMetadata:
    """One segment. `end_offset` is inclusive. `segment_leader_epochs` is ascending and not empty."""

    segment_id: RemoteLogSegmentId
    start_offset: int
    end_offset: int
    broker_id: int
    max_timestamp_ms: int
    event_timestamp_ms: int
    segment_leader_epochs: tuple[LeaderEpochEntry, ...]
    segment_size_bytes: int
    state: RemoteLogSegmentState
    custom_metadata: bytes | None = None
    txn_index_empty: bool = False
    clamped_to: int | None = None
    """Known of what is finished: the last offset that a clamp left of it; None when none cuts it."""

    def __reduce__(self) -> tuple[Callable[..., RemoteLogSegmentMetadata], tuple[object, ...]]:
        """Flat: tasks carry thousands of these, and pickle takes ten times as long over nested values."""
        partition = self.topic_id_partition
        return _segment_metadata, (
            *(partition.topic_id.bytes, partition.partition, partition.topic, self.segment_id.id.bytes),
            *(self.start_offset, self.end_offset, self.broker_id, self.max_timestamp_ms, self.event_timestamp_ms),
            *(self.segment_size_bytes, self.state.value, self.custom_metadata, self.txn_index_empty, self.clamped_to),
            *(number for entry in self.segment_leader_epochs for number in (entry.epoch, entry.start_offset)),
        )

    @property
    def valid_end_offset(self) -> int:
        """Inclusive end of what may be served; below `start_offset` when all of it was cut off."""
        return self.end_offset if self.clamped_to is None else self.clamped_to

    @property
    def is_cut_off(self) -> bool:
        """Nothing of it may be served any more."""
        return self.valid_end_offset < self.start_offset

    @property
    def retained_bytes(self) -> int:
        """What retention by size may count on: of a segment that is cut nobody says how much is left, so nothing."""
        return self.segment_size_bytes if self.clamped_to is None else 0

    @property
    def topic_id_partition(self) -> TopicIdPartition:
        return self.segment_id.topic_id_partition

    def with_update(self, update: RemoteLogSegmentMetadataUpdate) -> RemoteLogSegmentMetadata:
        return replace(
            self,
            state=update.state,
            broker_id=update.broker_id,
            event_timestamp_ms=update.event_timestamp_ms,
            custom_metadata=update.custom_metadata if update.custom_metadata is not None else self.custom_metadata,
        )


def _segment_metadata(
    topic_id: bytes,
    partition: int,
    topic: str,
    uuid: bytes,
    start_offset: int,
    end_offset: int,
    broker_id: int,
    max_timestamp_ms: int,
    event_timestamp_ms: int,
    size_bytes: int,
    state: int,
    custom_metadata: bytes | None,
    txn_index_empty: bool,
    clamped_to: int | None,
    *epochs: int,
) -> RemoteLogSegmentMetadata:
    return RemoteLogSegmentMetadata(
        RemoteLogSegmentId(TopicIdPartition(UUID(bytes=topic_id), partition, topic), UUID(bytes=uuid)),
        start_offset,
        end_offset,
        broker_id,
        max_timestamp_ms,
        event_timestamp_ms,
        tuple(map(LeaderEpochEntry, epochs[::2], epochs[1::2])),
        size_bytes,
        RemoteLogSegmentState(state),
        custom_metadata,
        txn_index_empty,
        clamped_to,
    )


@dataclass(frozen=True, slots=True)
class RemoteLogSegmentMetadataUpdate:
    """A later state of a known segment; repeats the custom metadata, for the record before it may be compacted away."""

    segment_id: RemoteLogSegmentId
    broker_id: int
    event_timestamp_ms: int
    state: RemoteLogSegmentState
    custom_metadata: bytes | None = None


@dataclass(frozen=True, slots=True)
class RemotePartitionDeleteMetadata:
    """The deletion of a whole partition: its topic was deleted."""

    topic_id_partition: TopicIdPartition
    broker_id: int
    event_timestamp_ms: int
    state: RemotePartitionDeleteState


@dataclass(frozen=True, slots=True)
class LogStartOffsetUpdate:
    """Our own record type: the log starts at `log_start`.

    Every writer has a record of its own, which its next one replaces. A log start that was only seen belongs to no
    writer."""

    topic_id_partition: TopicIdPartition
    writer: str
    event_timestamp_ms: int
    log_start: LogStart


@dataclass(frozen=True, slots=True)
class TopicTierConfigUpdate:
    """Our own record type: all tier settings that a topic was given through a proxy (semantics 9.4); the last one wins.

    `topic_id_partition` is the topic's partition 0, whose metadata partition carries the record."""

    topic_id_partition: TopicIdPartition
    writer: str
    event_timestamp_ms: int
    config: Mapping[str, str]
    """By Kafka's names; a key that is missing is not set."""


@dataclass(frozen=True, slots=True)
class RemoteLogClampUpdate:
    """Our own record type: of the segments finished before it, nothing above `valid_end_offset` (inclusive) is the
    log's any more; another leader's records took its place. `leader_epoch` is that of the offset."""

    topic_id_partition: TopicIdPartition
    writer: str
    event_timestamp_ms: int
    leader_epoch: int
    valid_end_offset: int


@dataclass(frozen=True, slots=True)
class LocalLogStartUpdate:
    """Our own record type, by the owner before each trim: the local log starts at this offset or is about to.

    A leader that does not confirm this offset was emptied or restored (DESIGN, safety rule 2)."""

    topic_id_partition: TopicIdPartition
    writer: str
    event_timestamp_ms: int
    local_log_start: OffsetAndEpoch


@dataclass(frozen=True, slots=True)
class LogGapUpdate:
    """Our own record type, by the owner: the broker removed the records of `gap` before they were copied.

    A later record with the same first offset replaces this one. A tombstone ends the gap when the log starts behind
    it."""

    topic_id_partition: TopicIdPartition
    writer: str
    event_timestamp_ms: int
    gap: LogGap
    leader_epoch: int
    """The epoch of the leader whose log starts at the gap's end."""


@dataclass(frozen=True, slots=True)
class OperatorAcceptanceUpdate:
    """Our own record type, by an operator's command: the metadata and the brokers know all records that are left.

    The owner stopped the partition because a witness was missing. With this record it goes on, and then ends the
    acceptance by a tombstone."""

    topic_id_partition: TopicIdPartition
    writer: str
    event_timestamp_ms: int


@dataclass(frozen=True, slots=True)
class TopicDeletionUpdate:
    """Our own record type: the topic was deleted, as the brokers answered to DeleteTopics, or as an operator says.

    `topic_id_partition` is the topic's partition 0."""

    topic_id_partition: TopicIdPartition
    writer: str
    event_timestamp_ms: int


@dataclass(frozen=True, slots=True)
class TopicMissingUpdate:
    """Our own record type, by the owner of the topic's partition 0: no broker knows the topic.

    The topic is missing since the broker appended this record. A tombstone ends the record when a broker knows the
    topic again."""

    topic_id_partition: TopicIdPartition
    writer: str
    event_timestamp_ms: int


@dataclass(frozen=True, slots=True)
class QuarantineDeletionUpdate:
    """Our own record type: an operator wants a segment that was cut off deleted. The owner does it."""

    segment_id: RemoteLogSegmentId
    writer: str
    event_timestamp_ms: int
