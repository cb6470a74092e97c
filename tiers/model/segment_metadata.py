"""The metadata of remote log segments: the records of the metadata topic and the folded value (KIP-405, KIP-917)."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from operator import attrgetter
from typing import NamedTuple
from uuid import UUID

from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import UNKNOWN_EPOCH, LogGap, LogStart, OffsetAndEpoch


class RemoteLogSegmentState(IntEnum):
    r"""The states of a segment, and of the deletion of a partition (KIP-405, docs/semantics.md 11.2).

        COPY_SEGMENT_STARTED -> COPY_SEGMENT_FINISHED -> DELETE_SEGMENT_STARTED -> DELETE_SEGMENT_FINISHED
                \_________________________________________^

        DELETE_PARTITION_MARKED -> DELETE_PARTITION_STARTED -> DELETE_PARTITION_FINISHED

    Only segments in COPY_SEGMENT_FINISHED are readable. A retry may write a state again, which is idempotent.
    """

    COPY_SEGMENT_STARTED = 0
    COPY_SEGMENT_FINISHED = 1
    DELETE_SEGMENT_STARTED = 2
    DELETE_SEGMENT_FINISHED = 3


class RemotePartitionDeleteState(IntEnum):
    DELETE_PARTITION_MARKED = 0
    DELETE_PARTITION_STARTED = 1
    DELETE_PARTITION_FINISHED = 2


def is_valid_transition(source: RemoteLogSegmentState, target: RemoteLogSegmentState) -> bool:
    """Returns whether the owner may write `target` after `source`."""
    is_given_up = (source, target) == (
        RemoteLogSegmentState.COPY_SEGMENT_STARTED,
        RemoteLogSegmentState.DELETE_SEGMENT_STARTED,
    )
    return is_given_up or target - source in (0, 1)


def is_valid_partition_transition(
    source: RemotePartitionDeleteState | None, target: RemotePartitionDeleteState
) -> bool:
    """Returns whether the owner may write `target` after `source`: marked, started, finished, without skips."""
    return source == target or target == (-1 if source is None else source) + 1


TOPIC_DELETION_VALID_MS = 3_600_000
"""How long after a request to delete a topic the brokers may have forgotten the topic because of that request."""


@dataclass(frozen=True, slots=True)
class LeaderEpochEntry:
    """Leader epoch `epoch` begins at `start_offset`. A segment's first entry is clipped to the segment's start."""

    epoch: int
    start_offset: int


def leader_epoch_at(leader_epochs: Sequence[LeaderEpochEntry], offset: int) -> int:
    """Returns the leader epoch that wrote `offset`, by the entries of the segment that holds it."""
    return leader_epochs[max(0, bisect_right(leader_epochs, offset, key=attrgetter("start_offset")) - 1)].epoch


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
    copy_epoch: int = UNKNOWN_EPOCH
    """The leader epoch in which the leader gave the records. `UNKNOWN_EPOCH`: that of the last record."""
    cut_at: int | None = None
    """The first offset that a CUT voids; at most `end_offset`. None: no CUT voids any."""

    @property
    def leader_epoch(self) -> int:
        """The leader epoch in which the segment was copied. A CUT of a later epoch voids it from the CUT's offset on.

        Records that another program wrote do not name it. It is at least the epoch of the last record."""
        return self.segment_leader_epochs[-1].epoch if self.copy_epoch == UNKNOWN_EPOCH else self.copy_epoch

    @property
    def valid_end_offset(self) -> int:
        """The last offset (inclusive) that may be served; below `start_offset` when a CUT voids all of them."""
        return self.end_offset if self.cut_at is None else self.cut_at - 1

    @property
    def is_cut_off(self) -> bool:
        """Whether a CUT voids the whole segment, so that no part of it may be served."""
        return self.valid_end_offset < self.start_offset

    @property
    def retained_bytes(self) -> int:
        """The size that counts for retention by size; 0 for a segment that is cut, whose valid size is unknown."""
        return self.segment_size_bytes if self.cut_at is None else 0

    @property
    def topic_id_partition(self) -> TopicIdPartition:
        return self.segment_id.topic_id_partition


@dataclass(frozen=True, slots=True)
class RemoteLogSegmentMetadataUpdate:
    """A later state of a known segment.

    It repeats the custom metadata, because compaction may remove the earlier record."""

    segment_id: RemoteLogSegmentId
    broker_id: int
    event_timestamp_ms: int
    state: RemoteLogSegmentState
    custom_metadata: bytes | None = None

    @property
    def topic_id_partition(self) -> TopicIdPartition:
        return self.segment_id.topic_id_partition


@dataclass(frozen=True, slots=True)
class RemotePartitionDeleteMetadata:
    """The deletion of a whole partition whose topic was deleted."""

    topic_id_partition: TopicIdPartition
    broker_id: int
    event_timestamp_ms: int
    state: RemotePartitionDeleteState


@dataclass(frozen=True, slots=True)
class OwnMetadataRecord:
    """The first fields of the record types that are Tidegate's own."""

    topic_id_partition: TopicIdPartition
    writer: str
    event_timestamp_ms: int


@dataclass(frozen=True, slots=True)
class LogStartOffsetUpdate(OwnMetadataRecord):
    """the log starts at `log_start`.

    Every log start has a record of its own, whichever writer it has. A higher log start ends the ones that it
    replaces."""

    log_start: LogStart


@dataclass(frozen=True, slots=True)
class TopicTierConfigUpdate(OwnMetadataRecord):
    """all tier settings that clients set for a topic through a proxy
    (docs/semantics.md 9.4).

    The last record of a topic replaces the earlier ones. `topic_id_partition` is the topic's partition 0; the record is
    in its metadata partition."""

    config: Mapping[str, str]
    """The settings by Kafka's names; a missing key is not set."""


class Cut(NamedTuple):
    """A CUT: in `leader_epoch`, the leader had other records from `offset` on than the tier.

    It voids, from `offset` on, every segment that was copied in an earlier leader epoch, wherever its records stand in
    the metadata topic. A copy of the same offsets in that epoch or a later one stays."""

    leader_epoch: int
    offset: int
    at_ms: int
    """The LogAppendTime of the record."""
    is_proved: bool = True
    """Whether the leader has the record before `offset`, or an operator named the offset. Otherwise the histories may
    part below it."""


def first_void(cuts: Iterable[Cut], leader_epoch: int) -> int | None:
    """Returns the first offset that `cuts` void of what was copied in `leader_epoch`. None: they void none."""
    return min((cut.offset for cut in cuts if cut.leader_epoch > leader_epoch), default=None)


def after_cuts(segment: RemoteLogSegmentMetadata, cuts: Iterable[Cut]) -> RemoteLogSegmentMetadata:
    """Returns the segment with the `cut_at` that `cuts` give it."""
    void_from = first_void(cuts, segment.leader_epoch)
    is_cut = void_from is not None and void_from <= segment.end_offset
    return replace(segment, cut_at=void_from if is_cut else None)


@dataclass(frozen=True, slots=True)
class CutUpdate(OwnMetadataRecord):
    """a CUT. Of several in one leader epoch, the lowest decides."""

    leader_epoch: int
    offset: int
    is_proved: bool = True

    @classmethod
    def of(cls, topic_id_partition: TopicIdPartition, writer: str, event_timestamp_ms: int, cut: Cut) -> CutUpdate:
        """Returns the record of `cut`. The broker sets its time."""
        return cls(topic_id_partition, writer, event_timestamp_ms, cut.leader_epoch, cut.offset, cut.is_proved)

    @property
    def cut(self) -> Cut:
        return Cut(self.leader_epoch, self.offset, self.event_timestamp_ms, self.is_proved)


@dataclass(frozen=True, slots=True)
class LocalLogStartUpdate(OwnMetadataRecord):
    """the local log starts at this offset, or a trim to it is imminent.

    The owner writes it before each trim. All records below it were remote then (docs/design.md, safety rule 5)."""

    local_log_start: OffsetAndEpoch


@dataclass(frozen=True, slots=True)
class LogGapUpdate(OwnMetadataRecord):
    """the broker removed the records of `gap` before they were copied.

    The owner writes it. A later record with the same first offset replaces this one. A tombstone removes the gap once
    the log starts after it."""

    gap: LogGap
    leader_epoch: int
    """The epoch of the leader whose log starts at the gap's end."""


@dataclass(frozen=True, slots=True)
class TierMarkerUpdate(OwnMetadataRecord):
    """the marker object of a location of the store has this id (`TierMarker`).

    It is announced before the object is written, and confirmed after the object was read back. `topic_id_partition` is
    `TIER_PARTITION`."""

    location: str
    marker_id: UUID
    is_confirmed: bool


@dataclass(frozen=True, slots=True)
class TopicDeletionUpdate(OwnMetadataRecord):
    """a client is about to delete the topic, or an operator says that it was deleted.

    A proxy writes the record before it forwards DeleteTopics. `topic_id_partition` is the topic's partition 0."""

    is_confirmed: bool
    """Whether an operator says it."""

    def is_proof(self, missing_since_ms: int | None) -> bool:
        """Whether the topic was deleted, if no broker has known it since `missing_since_ms`.

        A request proves nothing by itself, since the brokers may refuse it. A topic that is missing before the request
        or long after it is missing for another reason."""
        if self.is_confirmed or missing_since_ms is None:
            return self.is_confirmed
        return 0 <= missing_since_ms - self.event_timestamp_ms <= TOPIC_DELETION_VALID_MS


@dataclass(frozen=True, slots=True)
class TopicMissingUpdate(OwnMetadataRecord):
    """no broker knows the topic.

    The owner of the topic's partition 0 writes it. The topic counts as missing since the broker appended this record. A
    tombstone ends the record when a broker knows the topic again."""


@dataclass(frozen=True, slots=True)
class UnfinishedRebuildUpdate(OwnMetadataRecord):
    """`rebuild` has not yet written all records of a metadata partition.

    `topic_id_partition` is the metadata partition itself. The record precedes every other record of the topic. A
    tombstone follows the last record that `rebuild` writes into the metadata partition."""
