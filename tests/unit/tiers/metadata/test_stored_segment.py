"""Segments in their stored form."""

from __future__ import annotations

import pickle
from contextlib import suppress
from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.stored_segments import stored
from tests.support.tiers.segment_metadata import with_update
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.state.layout import partition_key
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import UNKNOWN_EPOCH
from tiers.model.segment_metadata import (
    Cut,
    LeaderEpochEntry,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemoteLogSegmentState,
    after_cuts,
)
from tiers.model.stored_segment import (
    StoredSegment,
    decode_answer,
    encode_stored_segment,
    with_cuts,
)

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
    segment_leader_epochs=st.lists(st.builds(LeaderEpochEntry, int32s, int64s), min_size=1, max_size=3).map(tuple),
    segment_size_bytes=int32s,
    state=st.sampled_from(RemoteLogSegmentState),
    custom_metadata=st.none() | st.binary(max_size=200),
    txn_index_empty=st.booleans(),
    copy_epoch=st.just(UNKNOWN_EPOCH) | int32s,
)


def stored_as(segment: RemoteLogSegmentMetadata, raw: bytes, *cuts: Cut) -> StoredSegment:
    return with_cuts(partition_key(segment.topic_id_partition), segment.segment_id.id.bytes, raw, cuts)


@given(segments, st.lists(st.builds(Cut, int32s, st.integers(0, 1 << 62), st.just(0)), max_size=3))
def test_a_stored_segment_is_read_again(segment: RemoteLogSegmentMetadata, cuts: list[Cut]) -> None:
    read = stored_as(segment, encode_stored_segment(segment), *cuts)
    assert read.metadata == decode_answer(read.partition_key, read.answer) == after_cuts(segment, cuts)
    assert read.metadata.topic_id_partition.topic == segment.topic_id_partition.topic
    assert (read.leader_epoch, read.valid_end_offset) == (segment.leader_epoch, read.metadata.valid_end_offset)


@given(segments, st.sampled_from(RemoteLogSegmentState), st.none() | st.binary(max_size=20), int64s)
def test_a_change_in_the_stored_form_equals_a_change_before_storing(
    segment: RemoteLogSegmentMetadata, state: RemoteLogSegmentState, custom_metadata: bytes | None, at_ms: int
) -> None:
    update = RemoteLogSegmentMetadataUpdate(segment.segment_id, 7, at_ms, state, custom_metadata)
    changed = stored_as(segment, encode_stored_segment(segment)).updated(update, at_ms)
    assert changed == encode_stored_segment(with_update(segment, update))


@given(segments, st.data())
def test_a_torn_segment_is_an_error_or_lacks_the_end_of_its_name(
    segment: RemoteLogSegmentMetadata, data: st.DataObject
) -> None:
    whole = encode_stored_segment(segment)
    torn = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with suppress(RemoteLogMetadataError):
        assert stored_as(segment, torn).metadata == segment


@given(segments, st.integers(0, 1 << 62))
def test_a_value_travels_whole(segment: RemoteLogSegmentMetadata, cut_at: int) -> None:
    end = max(segment.end_offset, 0)
    for sent in (segment, replace(segment, end_offset=end, cut_at=min(cut_at, end))):
        travelled = pickle.loads(pickle.dumps(sent))
        assert travelled == sent
        assert travelled.topic_id_partition.topic == segment.topic_id_partition.topic
        assert stored(sent).metadata == sent
