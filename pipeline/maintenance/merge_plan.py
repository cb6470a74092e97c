"""Plans merges from the metadata alone: which segments are merged, and the metadata of the merged one. Pure functions.

* A group has as many small segments as fit. They follow each other without a gap, and each answers for all its offsets.
* Segments that are cut, that are being copied or deleted, that lie below the log start, or whose offsets
  another segment has too, are left alone. So is the newest segment: copiers continue it, and trims end at it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from uuid import UUID

from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.model.stored_segment import StoredSegment, decode_answer
from tiers.segment.indexes.segment_index import MAX_RELATIVE
from tiers.tasks.history.align import open_cut


@dataclass(frozen=True, slots=True)
class MergeLimits:
    """Segments smaller than `below_bytes` are merged into segments of at most `target_bytes`."""

    below_bytes: int = 64 << 20
    target_bytes: int = 512 << 20


@dataclass(frozen=True, slots=True)
class MergeGroup:
    """Two or more segments to merge, as bytes of the metadata state, because a plan may have a million segments."""

    stored: tuple[tuple[bytes, bytes], ...]
    """For each segment, the partition's key and the bytes of a `StoredSegment`."""
    size_bytes: int

    @property
    def parts(self) -> tuple[RemoteLogSegmentMetadata, ...]:
        return tuple(decode_answer(*each) for each in self.stored)

    @property
    def partition(self) -> TopicIdPartition:
        return decode_answer(*self.stored[0]).topic_id_partition


def plan_merges(metadata: RemoteLogMetadataState, partition: TopicIdPartition, limits: MergeLimits) -> list[MergeGroup]:
    """Returns the segments to merge; none while the partition has a CUT that is not proved and may still move down."""
    if open_cut(metadata, partition, 0) is not None:
        return []
    target_bytes = min(limits.target_bytes, MAX_RELATIVE)
    groups: list[MergeGroup] = []
    group: list[StoredSegment] = []
    size_bytes = 0

    def close() -> None:
        if len(group) > 1:
            groups.append(MergeGroup(tuple((each.partition_key, each.answer) for each in group), size_bytes))
        group.clear()

    for segment in _may_be_merged(metadata, partition, limits.below_bytes):
        if group and (
            segment.start_offset != group[-1].end_offset + 1
            or size_bytes + segment.segment_size_bytes > target_bytes
            or segment.end_offset - group[0].start_offset > MAX_RELATIVE
        ):
            close()
        size_bytes = (size_bytes if group else 0) + segment.segment_size_bytes
        group.append(segment)
    close()
    return groups


def _may_be_merged(
    metadata: RemoteLogMetadataState, partition: TopicIdPartition, below_bytes: int
) -> Iterator[StoredSegment]:
    """Yields the segments that may be merged, in the log's order."""
    log_start = metadata.log_start_offset(partition) or 0
    finished = [each for each in metadata.stored_segments(partition) if each.is_finished]
    doubled = _with_second_copies(finished)
    newest = max((each.valid_end_offset for each in finished), default=-1)
    for segment in finished:
        if (
            segment.segment_size_bytes < below_bytes
            and segment.kept_end_offset >= segment.end_offset
            and segment.end_offset != newest
            and segment.end_offset >= log_start
            and segment.id not in doubled
        ):
            yield segment


def _with_second_copies(segments: Sequence[StoredSegment]) -> set[bytes]:
    """Returns the ids of segments that share an offset with another one. `segments` are ordered by start offset."""
    found: set[bytes] = set()
    reaching = None
    for segment in segments:
        if reaching is not None and segment.start_offset <= reaching.end_offset:
            found |= {reaching.id, segment.id}
        if reaching is None or segment.end_offset > reaching.end_offset:
            reaching = segment
    return found


def merged_segment(group: MergeGroup, uuid: UUID, broker_id: int, event_timestamp_ms: int) -> RemoteLogSegmentMetadata:
    """Returns the metadata of the merged segment for its COPY_SEGMENT_STARTED record."""
    parts = group.parts
    return RemoteLogSegmentMetadata(
        segment_id=RemoteLogSegmentId(group.partition, uuid),
        start_offset=parts[0].start_offset,
        end_offset=parts[-1].end_offset,
        broker_id=broker_id,
        max_timestamp_ms=max(each.max_timestamp_ms for each in parts),
        event_timestamp_ms=event_timestamp_ms,
        segment_leader_epochs=tuple(_epochs(parts)),
        segment_size_bytes=group.size_bytes,
        state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
        txn_index_empty=all(each.txn_index_empty for each in parts),
        # The metadata has every CUT up to the latest of these epochs, and no part is void.
        copy_epoch=max(each.leader_epoch for each in parts),
    )


def _epochs(parts: Iterable[RemoteLogSegmentMetadata]) -> Iterator[LeaderEpochEntry]:
    """Yields each leader epoch once. Every segment repeats the epoch in which it begins."""
    known = -1
    for part in parts:
        for entry in part.segment_leader_epochs:
            if entry.epoch > known:
                yield entry
                known = entry.epoch


def still_stand(metadata: RemoteLogMetadataState, group: MergeGroup) -> bool:
    """Whether the metadata of every part is still the same as when the merge was planned."""
    for part in group.parts:
        known = metadata.remote_log_segment_metadata_by_id(part.segment_id)
        if known is None or (known.state, known.cut_at) != (part.state, part.cut_at):
            return False
    return all(later.start_offset == earlier.end_offset + 1 for earlier, later in pairwise(group.parts))
