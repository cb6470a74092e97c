"""`ScrubReport`: the findings of a scrub, and how much it checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum

from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.object_key import SegmentObjectKey
from tiers.upkeep.orphans import Orphan
from tiers.verify.segment_verification import Damage


class ScrubLevel(StrEnum):
    """Each level includes the ones before it.

    `META` checks that every record has its objects, that every object has its record, and that the segments tile.
    `BATCH` also checks every batch and every index. `DEEP` also decodes every record."""

    META = "meta"
    BATCH = "batch"
    DEEP = "deep"


class FindingKind(StrEnum):
    DAMAGED = "damaged"
    MISSING = "missing"
    STALE_INDEX = "stale index"
    UNREAD = "unread"
    GAP = "gap"
    OVERLAP = "overlap"
    ORPHAN = "orphan"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One finding. Offsets are inclusive. `position` is where it begins in the stored log, `object` a key in the
    store."""

    kind: FindingKind
    topic: str | None
    partition: int | None
    segment: str | None = None
    first_offset: int | None = None
    last_offset: int | None = None
    position: int | None = None
    object: str | None = None
    size_bytes: int | None = None
    what: str


@dataclass(frozen=True, slots=True)
class InnerGap:
    """A segment whose log lacks offsets. Compaction and transactions leave such gaps, so it is not a finding."""

    topic: str
    partition: int
    segment: str
    missing_offsets: int


@dataclass(slots=True)
class ScrubReport:
    level: ScrubLevel
    findings: list[Finding] = field(default_factory=list)
    inner_gaps: list[InnerGap] = field(default_factory=list)
    partitions: int = 0
    segments: int = 0
    """Segments that were read back; none below `BATCH`."""
    already_scrubbed: int = 0
    log_bytes: int = 0
    batches: int = 0
    records: int = 0
    """Below `DEEP`, the number comes from the batch headers."""
    objects: int = 0
    stored_bytes: int = 0
    other_clusters: int = 0
    young_orphans: int = 0
    """Objects without a record that are younger than the grace period."""
    outdated: int = 0
    """Verdicts on segments that were replaced or deleted meanwhile."""
    deletable_segments: int = 0
    deletable_uploads: int = 0
    deleted_segments: int = 0
    aborted_uploads: int = 0


def of_damage(segment: RemoteLogSegmentMetadata, damage: Damage) -> Finding:
    found = of_segment(FindingKind(damage.kind), segment, damage.what)
    return replace(found, first_offset=damage.first_offset, last_offset=damage.last_offset, position=damage.position)


def of_segment(kind: FindingKind, segment: RemoteLogSegmentMetadata, what: str) -> Finding:
    return Finding(
        kind=kind,
        topic=segment.topic_id_partition.topic,
        partition=segment.topic_id_partition.partition,
        segment=str(segment.segment_id.id),
        first_offset=segment.start_offset,
        last_offset=segment.end_offset,
        what=what,
    )


def of_gap(partition: TopicIdPartition, gap: LogGap) -> Finding:
    return Finding(
        kind=FindingKind.GAP,
        topic=partition.topic,
        partition=partition.partition,
        first_offset=gap.first_offset,
        last_offset=gap.next_offset - 1,
        what="no segment has these offsets",
    )


def of_overlap(first_offset: int, one: RemoteLogSegmentMetadata, other: RemoteLogSegmentMetadata) -> Finding:
    """Returns the finding of two segments that have the same offsets, from `first_offset` on."""
    found = of_segment(FindingKind.OVERLAP, other, f"segment {one.segment_id.id} has these offsets too")
    last = min(one.valid_end_offset, other.valid_end_offset)
    return replace(found, first_offset=first_offset, last_offset=last)


def of_orphan(orphan: Orphan, topic: str | None, partition: int | None, key: SegmentObjectKey | None) -> Finding:
    return Finding(
        kind=FindingKind.ORPHAN,
        topic=topic,
        partition=partition,
        segment=orphan.segment,
        first_offset=None if key is None else key.base_offset,
        last_offset=None if key is None else key.end_offset,
        object=orphan.key,
        size_bytes=orphan.size_bytes,
        what=orphan.what,
    )


def in_order(findings: Sequence[Finding]) -> list[Finding]:
    def place(one: Finding) -> tuple[str, int, int, str, str]:
        partition = -1 if one.partition is None else one.partition
        first = -1 if one.first_offset is None else one.first_offset
        return one.topic or "", partition, first, one.kind, one.object or ""

    return sorted(findings, key=place)
