"""Segments in their stored form, and values that are made quickly."""

from __future__ import annotations

import gc
import pickle
from contextlib import suppress
from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.stored_segments import stored
from tests.support.tiers.segment_metadata import with_update
from tiers.errors import RemoteLogMetadataError
from tiers.metadata.state.layout import partition_key
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.quick_values import garbage_collection_paused, quick, quick_uuid
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentMetadataUpdate
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.model.stored_segment import (
    decode_answer,
    decode_stored_segment,
    encode_answer,
    encode_stored_segment,
    stored_fields,
    update_stored_segment,
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
    segment_leader_epochs=st.lists(st.builds(LeaderEpochEntry, int32s, int64s), max_size=3).map(tuple),
    segment_size_bytes=int32s,
    state=st.sampled_from(RemoteLogSegmentState),
    custom_metadata=st.none() | st.binary(max_size=200),
    txn_index_empty=st.booleans(),
)


def key_of(segment: RemoteLogSegmentMetadata) -> bytes:
    return partition_key(segment.topic_id_partition) + segment.segment_id.id.bytes


@given(segments)
def test_a_stored_segment_is_read_again(segment: RemoteLogSegmentMetadata) -> None:
    read = decode_stored_segment(key_of(segment), encode_stored_segment(segment))
    assert read == segment
    assert read.topic_id_partition.topic == segment.topic_id_partition.topic


@given(segments, st.integers(0, 1 << 62))
def test_an_answer_says_where_the_segment_ends(segment: RemoteLogSegmentMetadata, valid_end: int) -> None:
    key = key_of(segment)
    read = decode_answer(key[:20], encode_answer(key[20:], valid_end, encode_stored_segment(segment)))
    assert read == replace(segment, cut_at=valid_end + 1 if valid_end < segment.end_offset else None)


@given(segments, st.sampled_from(RemoteLogSegmentState), st.none() | st.binary(max_size=20), int64s)
def test_a_change_in_the_stored_form_equals_a_change_before_storing(
    segment: RemoteLogSegmentMetadata, state: RemoteLogSegmentState, custom_metadata: bytes | None, at_ms: int
) -> None:
    update = RemoteLogSegmentMetadataUpdate(segment.segment_id, 7, at_ms, state, custom_metadata)
    raw = encode_stored_segment(segment)
    changed = update_stored_segment(raw, stored_fields(raw), update, at_ms)
    assert changed == encode_stored_segment(with_update(segment, update))


@given(segments, st.data())
def test_a_torn_segment_is_an_error_or_lacks_the_end_of_its_name(
    segment: RemoteLogSegmentMetadata, data: st.DataObject
) -> None:
    whole = encode_stored_segment(segment)
    torn = whole[: data.draw(st.integers(0, len(whole) - 1))]
    with suppress(RemoteLogMetadataError):
        assert decode_stored_segment(key_of(segment), torn) == segment


def test_nothing_at_all_is_an_error() -> None:
    with pytest.raises(RemoteLogMetadataError, match="unreadable"):
        decode_stored_segment(bytes(36), b"")


@given(segments, st.integers(0, 1 << 62))
def test_a_value_travels_whole(segment: RemoteLogSegmentMetadata, cut_at: int) -> None:
    end = max(segment.end_offset, 0)
    for sent in (segment, replace(segment, end_offset=end, cut_at=min(cut_at, end))):
        travelled = pickle.loads(pickle.dumps(sent))
        assert travelled == sent
        assert travelled.topic_id_partition.topic == segment.topic_id_partition.topic
        assert stored(sent).metadata == sent


@given(segments)
def test_a_value_made_quickly_is_like_any_other(segment: RemoteLogSegmentMetadata) -> None:
    made = quick(RemoteLogSegmentMetadata)(**{each.name: getattr(segment, each.name) for each in fields(segment)})
    assert type(made) is RemoteLogSegmentMetadata
    assert (made, hash(made), repr(made)) == (segment, hash(segment), repr(segment))
    with pytest.raises(FrozenInstanceError):
        made.broker_id = 7  # type: ignore[misc]  # it is frozen
    slow = segment.segment_id.id
    uuid = quick_uuid(slow.bytes)
    assert (uuid, hash(uuid), repr(uuid), uuid.is_safe) == (slow, hash(slow), repr(slow), slow.is_safe)
    assert pickle.loads(pickle.dumps(uuid)) == slow


def test_garbage_is_collected_again_when_many_were_made() -> None:
    with suppress(ValueError), garbage_collection_paused():
        assert not gc.isenabled()
        raise ValueError
    assert gc.isenabled()
