"""Converts metadata to stored segments and to the ranges of a plan, as the state does, but without a state."""

from __future__ import annotations

from pipeline.source.read_plan import RemoteRange, bytes_per_offset
from tiers.model.segment_metadata import Cut, RemoteLogSegmentMetadata
from tiers.model.stored_segment import StoredSegment, encode_stored_segment, with_cuts


def stored(metadata: RemoteLogSegmentMetadata) -> StoredSegment:
    partition = metadata.topic_id_partition
    key = partition.topic_id.bytes + partition.partition.to_bytes(4, "big", signed=True)
    cuts = [] if metadata.cut_at is None else [Cut(metadata.leader_epoch + 1, metadata.cut_at, 0)]
    return with_cuts(key, metadata.segment_id.id.bytes, encode_stored_segment(metadata), cuts)


def remote_range(metadata: RemoteLogSegmentMetadata, first_offset: int, end_offset: int) -> RemoteRange:
    """Returns the range of a segment. Both offsets are inclusive."""
    known = stored(metadata)
    return RemoteRange(known.partition_key, known.answer, first_offset, end_offset, bytes_per_offset(known))
