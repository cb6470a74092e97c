"""Converts metadata to stored segments and to the ranges of a plan, as the state does, but without a state."""

from __future__ import annotations

from pipeline.source.read_plan import RemoteRange, bytes_per_offset
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.stored_segment import (
    NOT_CUT,
    StoredSegment,
    encode_answer,
    encode_stored_segment,
    stored_segment,
)


def stored(metadata: RemoteLogSegmentMetadata) -> StoredSegment:
    partition = metadata.topic_id_partition
    key = partition.topic_id.bytes + partition.partition.to_bytes(4, "big", signed=True)
    kept_end = NOT_CUT if metadata.cut_at is None else metadata.valid_end_offset
    return stored_segment(key, encode_answer(metadata.segment_id.id.bytes, kept_end, encode_stored_segment(metadata)))


def remote_range(metadata: RemoteLogSegmentMetadata, first_offset: int, end_offset: int) -> RemoteRange:
    """Returns the range of a segment. Both offsets are inclusive."""
    known = stored(metadata)
    return RemoteRange(known.partition_key, known.answer, first_offset, end_offset, bytes_per_offset(known))
