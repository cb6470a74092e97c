from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.flat_file import (
    FlatFile,
    PartitionDeleteEntry,
    decode_flat_file,
    encode_flat_file,
    write_flat_file,
)
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import (
    LeaderEpochEntry,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentState,
    RemotePartitionDeleteState,
)

PARTITION = TopicIdPartition(UUID(int=5), 2, "orders")
int64s = st.integers(0, (1 << 63) - 1)
int32s = st.integers(0, (1 << 31) - 1)
segments = st.builds(
    RemoteLogSegmentMetadata,
    segment_id=st.builds(RemoteLogSegmentId, st.just(PARTITION), st.uuids()),
    start_offset=int64s,
    end_offset=st.just((1 << 63) - 1),
    broker_id=st.integers(-1, (1 << 31) - 1),
    max_timestamp_ms=int64s,
    event_timestamp_ms=int64s,
    segment_leader_epochs=st.lists(st.builds(LeaderEpochEntry, int32s, int64s), min_size=1, max_size=3).map(tuple),
    segment_size_bytes=int32s,
    state=st.sampled_from(RemoteLogSegmentState),
    custom_metadata=st.none() | st.binary(max_size=128),
    txn_index_empty=st.booleans(),
)
files = st.builds(
    FlatFile,
    topic_id=st.just(PARTITION.topic_id),
    metadata_offset=int64s,
    segments=st.lists(segments, max_size=4).map(tuple),
    deletion=st.none() | st.builds(PartitionDeleteEntry, int32s, int64s, st.sampled_from(RemotePartitionDeleteState)),
)
SEGMENT = RemoteLogSegmentMetadata(
    segment_id=RemoteLogSegmentId(PARTITION, UUID(int=9)),
    start_offset=1,
    end_offset=2,
    broker_id=-1,
    max_timestamp_ms=3,
    event_timestamp_ms=4,
    segment_leader_epochs=(LeaderEpochEntry(6, 1),),
    segment_size_bytes=7,
    state=RemoteLogSegmentState.COPY_SEGMENT_FINISHED,
)
HEADER_HEX = "0000" + "00000000000000000000000000000005" + "000000000000000a"
SEGMENT_HEX = (
    "00000000000000000000000000000009" + "0000000000000001" + "0000000000000002" + "00000006"
    "0000000000000003" + "0000000000000004" + "00000001" + "000000060000000000000001" + "00000007" + "01"
)
DELETION_HEX = "0100" + "00000008" + "0000000000000009" + "01"


@given(files)
def test_a_file_survives_its_bytes(file: FlatFile) -> None:
    assert decode_flat_file(encode_flat_file(file), PARTITION) == file


def test_the_entries_have_kafkas_bytes_for_snapshots() -> None:
    """Kafka 4.3.0's RemoteLogSegmentMetadataSnapshotTransform made the data of both entries."""
    segment = RemoteLogSegmentMetadata(
        segment_id=RemoteLogSegmentId(PARTITION, UUID("01122334455667788899aabbccddeeff")),
        start_offset=100,
        end_offset=299,
        broker_id=2,
        max_timestamp_ms=1700000000123,
        event_timestamp_ms=1700000001234,
        segment_leader_epochs=(LeaderEpochEntry(3, 100), LeaderEpochEntry(5, 150)),
        segment_size_bytes=1048576,
        state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
    )
    copied = replace(
        segment,
        state=RemoteLogSegmentState.COPY_SEGMENT_FINISHED,
        custom_metadata=b"\x01\x02\x03",
        txn_index_empty=True,
    )
    fields_hex = (
        "01122334455667788899aabbccddeeff0000000000000064000000000000012b000000020000018bcfe5687b"
        "0000018bcfe56cd203000000030000000000000064000000000500000000000000960000100000"
    )
    file = FlatFile(PARTITION.topic_id, 10, (segment, copied))
    golden = HEADER_HEX + "58" + "0300" + fields_hex + "000000" + "5e" + "0300" + fields_hex + "040102030101000101"
    assert encode_flat_file(file).hex() == golden
    assert decode_flat_file(bytes.fromhex(golden), PARTITION) == file


def test_a_deletion_has_the_founding_bytes() -> None:
    deletion = PartitionDeleteEntry(8, 9, RemotePartitionDeleteState.DELETE_PARTITION_STARTED)
    file = FlatFile(PARTITION.topic_id, 10, (), deletion)
    assert encode_flat_file(file).hex() == HEADER_HEX + "0f" + DELETION_HEX


def test_a_founding_segment_is_read() -> None:
    founding = bytes.fromhex(HEADER_HEX + "4b" + "0000" + SEGMENT_HEX)
    assert decode_flat_file(founding, PARTITION) == FlatFile(PARTITION.topic_id, 10, (SEGMENT,))


def test_a_torn_file_is_not_used() -> None:
    whole = encode_flat_file(FlatFile(PARTITION.topic_id, 10, (SEGMENT, replace(SEGMENT, start_offset=0))))
    boundaries = {26, 26 + (len(whole) - 26) // 2}
    for length in set(range(len(whole))) - boundaries:
        with pytest.raises(RemoteLogMetadataError):
            decode_flat_file(whole[:length], PARTITION)
    unknown_entry, more_bytes = (
        bytes.fromhex(HEADER_HEX + "020201"),
        bytes.fromhex(HEADER_HEX + "10" + DELETION_HEX + "00"),
    )
    for other in (encode_flat_file(FlatFile(UUID(int=6), 0, ())), unknown_entry, more_bytes):
        with pytest.raises(RemoteLogMetadataError):
            decode_flat_file(other, PARTITION)


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    path = tmp_path / "orders-2"
    for offset in (1, 2):
        write_flat_file(path, FlatFile(PARTITION.topic_id, offset, (SEGMENT,)))
        assert decode_flat_file(path.read_bytes(), PARTITION).metadata_offset == offset
    assert [each.name for each in tmp_path.iterdir()] == ["orders-2"]
