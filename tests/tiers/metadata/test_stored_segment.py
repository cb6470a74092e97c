from __future__ import annotations

from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.errors import RemoteLogMetadataError
from tiers.metadata.state_layout import partition_key
from tiers.metadata.stored_segment import decode_stored_segment, encode_stored_segment
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState

int32s = st.integers(-(1 << 31), (1 << 31) - 1)
int64s = st.integers(-(1 << 63), (1 << 63) - 1)
partitions = st.builds(TopicIdPartition, st.uuids(), int32s, st.text(max_size=12))
segments = st.builds(
    RemoteLogSegmentMetadata,
    segment_id=st.builds(RemoteLogSegmentId, partitions, st.uuids()),
    start_offset=int64s,
    end_offset=int64s,
    broker_id=int32s,
    max_timestamp_ms=int64s,
    event_timestamp_ms=int64s,
    segment_leader_epochs=st.lists(st.builds(LeaderEpochEntry, int32s, int64s), max_size=3).map(tuple),
    segment_size_bytes=int32s,
    state=st.sampled_from(RemoteLogSegmentState),
    custom_metadata=st.none() | st.binary(max_size=200),
    txn_index_empty=st.booleans(),
)


def key_of(segment: RemoteLogSegmentMetadata) -> bytes:
    return partition_key(segment.topic_id_partition) + segment.segment_id.id.bytes


@given(segments)
def test_what_was_stored_is_read_again(segment: RemoteLogSegmentMetadata) -> None:
    read = decode_stored_segment(key_of(segment), encode_stored_segment(segment))
    assert read == segment
    assert read.topic_id_partition.topic == segment.topic_id_partition.topic


@given(segments, st.data())
def test_a_torn_segment_is_an_error_or_lacks_no_more_than_the_end_of_its_name(
    segment: RemoteLogSegmentMetadata, data: st.DataObject
) -> None:
    whole = encode_stored_segment(segment)
    torn = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with suppress(RemoteLogMetadataError):
        assert decode_stored_segment(key_of(segment), torn) == segment


def test_nothing_at_all_is_an_error() -> None:
    with pytest.raises(RemoteLogMetadataError, match="unreadable"):
        decode_stored_segment(bytes(36), b"")
