"""The golden bytes were made by Kafka 4.3.0's own RemoteLogMetadataSerde.serialize from the same values."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.errors import RemoteLogMetadataError
from tiers.metadata.serde import (
    MetadataRecord,
    RecordKey,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
    key_of,
    segment_keys,
)
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import (
    LeaderEpochEntry,
    LocalLogStartUpdate,
    LogStartOffsetUpdate,
    QuarantineDeletionUpdate,
    RemoteLogClampUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
    TopicTierConfigUpdate,
)
from tiers.model.segment_state import RemoteLogSegmentState, RemotePartitionDeleteState

PARTITION = TopicIdPartition(UUID("123456789abcdef0123456789abcdef0"), 7, "orders")
SEGMENT_ID = RemoteLogSegmentId(PARTITION, UUID("01122334455667788899aabbccddeeff"))
ADDED = RemoteLogSegmentMetadata(
    segment_id=SEGMENT_ID,
    start_offset=100,
    end_offset=299,
    broker_id=2,
    max_timestamp_ms=1700000000123,
    event_timestamp_ms=1700000001234,
    segment_leader_epochs=(LeaderEpochEntry(3, 100), LeaderEpochEntry(5, 150)),
    segment_size_bytes=1048576,
    state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
)

_SEGMENT_ID_HEX = "076f7264657273123456789abcdef0123456789abcdef0000000070001122334455667788899aabbccddeeff00"
_ADDED_HEX = (
    "010000"
    + _SEGMENT_ID_HEX
    + "0000000000000064000000000000012b000000020000018bcfe5687b0000018bcfe56cd2"
    + "03000000030000000000000064000000000500000000000000960000100000"
)

GOLDEN: list[tuple[MetadataRecord, str]] = [
    (ADDED, _ADDED_HEX + "000000"),
    (replace(ADDED, custom_metadata=b"\x01\x02\x03", txn_index_empty=True), _ADDED_HEX + "040102030001000101"),
    (
        RemoteLogSegmentMetadataUpdate(
            SEGMENT_ID, 2, 1700000002345, RemoteLogSegmentState.COPY_SEGMENT_FINISHED, b"\x09\x08"
        ),
        "010100" + _SEGMENT_ID_HEX + "000000020000018bcfe571290309080100",
    ),
    (
        RemoteLogSegmentMetadataUpdate(SEGMENT_ID, 4, 1700000003456, RemoteLogSegmentState.DELETE_SEGMENT_STARTED),
        "010100" + _SEGMENT_ID_HEX + "000000040000018bcfe57580000200",
    ),
    (
        RemotePartitionDeleteMetadata(PARTITION, 1, 1700000004567, RemotePartitionDeleteState.DELETE_PARTITION_MARKED),
        "010200076f7264657273123456789abcdef0123456789abcdef00000000700000000010000018bcfe579d70000",
    ),
    (
        RemotePartitionDeleteMetadata(
            PARTITION, 1, 1700000004567, RemotePartitionDeleteState.DELETE_PARTITION_FINISHED
        ),
        "010200076f7264657273123456789abcdef0123456789abcdef00000000700000000010000018bcfe579d70200",
    ),
]


@pytest.mark.parametrize(("record", "golden"), GOLDEN)
def test_bytes_are_kafkas(record: MetadataRecord, golden: str) -> None:
    assert encode_value(record).hex() == golden
    decoded = decode_value(bytes.fromhex(golden))
    assert decoded == record
    assert key_of(record).topic_id_partition.topic == "orders"


def test_our_own_record_keeps_its_bytes() -> None:
    update = LogStartOffsetUpdate(PARTITION, "proxy-1", 1700000001234, 4096)
    expected = (
        "01e80700076f7264657273123456789abcdef0123456789abcdef00000000700"
        "0870726f78792d310000018bcfe56cd2000000000000100000"
    )
    assert encode_value(update).hex() == expected
    assert decode_value(bytes.fromhex(expected)) == update


def test_the_tier_settings_of_a_topic_keep_their_bytes() -> None:
    update = TopicTierConfigUpdate(PARTITION, "proxy-1", 1700000001234, {"local.retention.ms": "10"})
    expected = (
        "01e90700076f7264657273123456789abcdef0123456789abcdef00000000700"
        "0870726f78792d310000018bcfe56cd202136c6f63616c2e726574656e74696f6e2e6d730331300000"
    )
    assert encode_value(update).hex() == expected
    assert decode_value(bytes.fromhex(expected)) == update


def test_the_end_of_a_trim_keeps_its_bytes() -> None:
    update = LocalLogStartUpdate(PARTITION, "proxy-1", 1700000001234, 4096)
    expected = (
        "01ec0700076f7264657273123456789abcdef0123456789abcdef00000000700"
        "0870726f78792d310000018bcfe56cd2000000000000100000"
    )
    assert encode_value(update).hex() == expected
    assert decode_value(bytes.fromhex(expected)) == update


def test_a_clamp_keeps_its_bytes() -> None:
    update = RemoteLogClampUpdate(PARTITION, "proxy-1", 1700000001234, 5, 149)
    expected = (
        "01ea0700076f7264657273123456789abcdef0123456789abcdef00000000700"
        "0870726f78792d310000018bcfe56cd200000005000000000000009500"
    )
    assert encode_value(update).hex() == expected
    assert decode_value(bytes.fromhex(expected)) == update


def test_the_wish_to_delete_a_segment_is_read_as_it_was_written() -> None:
    update = QuarantineDeletionUpdate(SEGMENT_ID, "proxy-1", 1700000001234)
    assert encode_value(update).hex().startswith("01eb0700076f7264657273")
    assert decode_value(encode_value(update)) == update


def test_a_copy_plan_keeps_its_bytes_and_what_is_none_is_an_error() -> None:
    plan = CopyPlan(PARTITION, "proxy-1", 1700000001234, UUID(int=5), 3, 2, (10, 20, 35))
    expected = (
        "01ed0700076f7264657273123456789abcdef0123456789abcdef00000000700"
        "0870726f78792d310000018bcfe56cd20000000000000000000000000000000500"
        "0000030000000204000000000000000a0000000000000014000000000000002300"
    )
    assert encode_value(plan).hex() == expected
    assert decode_value(bytes.fromhex(expected)) == plan
    with pytest.raises(RemoteLogMetadataError, match="has no tiles"):
        decode_value(bytes.fromhex(expected.replace("0000000000000014", "0000000000000009")))


def test_an_unknown_api_key_is_skipped() -> None:
    assert decode_value(bytes.fromhex("01cf0f00deadbeef")) is None


@pytest.mark.parametrize(("record", "golden"), GOLDEN)
def test_every_torn_record_is_an_error(record: MetadataRecord, golden: str) -> None:
    whole = bytes.fromhex(golden)
    for length in range(len(whole)):
        with pytest.raises(RemoteLogMetadataError):
            decode_value(whole[:length])
    with pytest.raises(RemoteLogMetadataError):
        decode_value(whole + b"\x00")


@pytest.mark.parametrize("broken", ["020000", "010001", "0100"])
def test_versions_of_the_future_are_errors(broken: str) -> None:
    with pytest.raises(RemoteLogMetadataError):
        decode_value(bytes.fromhex(broken))


@given(st.binary(max_size=200))
def test_arbitrary_bytes_never_raise_anything_else(data: bytes) -> None:
    for prefix in (
        b"",
        b"\x01\x00\x00",
        b"\x01\x01\x00",
        b"\x01\x02\x00",
        b"\x01\xe8\x07\x00",
        b"\x01\xe9\x07\x00",
        b"\x01\xea\x07\x00",
        b"\x01\xed\x07\x00",
    ):
        try:
            decoded = decode_value(prefix + data)
        except RemoteLogMetadataError:
            continue
        assert decoded is None or decode_value(encode_value(decoded)) == decoded


def test_keys_tell_segments_record_types_and_writers_apart() -> None:
    update = RemoteLogSegmentMetadataUpdate(SEGMENT_ID, 4, 0, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
    keys = [
        key_of(ADDED),
        key_of(update),
        key_of(RemotePartitionDeleteMetadata(PARTITION, 1, 0, RemotePartitionDeleteState.DELETE_PARTITION_MARKED)),
        key_of(LogStartOffsetUpdate(PARTITION, "a", 0, 1)),
        key_of(LogStartOffsetUpdate(PARTITION, "b", 0, 1)),
        key_of(TopicTierConfigUpdate(PARTITION, "a", 0, {})),
        key_of(RemoteLogClampUpdate(PARTITION, "a", 0, 1, 5)),
        key_of(RemoteLogClampUpdate(PARTITION, "a", 0, 1, 6)),
        key_of(QuarantineDeletionUpdate(SEGMENT_ID, "a", 0)),
        key_of(CopyPlan(PARTITION, "a", 0, UUID(int=5), 1, 0, (0, 1))),
    ]
    assert tuple(keys[:2]) == segment_keys(SEGMENT_ID)
    assert len({encode_key(key) for key in keys}) == len(keys)
    assert [decode_key(encode_key(key)) for key in keys] == keys


def test_a_later_state_of_a_segment_has_the_same_key() -> None:
    finished = RemoteLogSegmentMetadataUpdate(SEGMENT_ID, 1, 5, RemoteLogSegmentState.COPY_SEGMENT_FINISHED, b"x")
    deleted = RemoteLogSegmentMetadataUpdate(SEGMENT_ID, 2, 9, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
    assert key_of(finished) == key_of(deleted)


def test_a_torn_key_is_an_error() -> None:
    whole = encode_key(RecordKey(2, PARTITION))
    for length in range(len(whole)):
        with pytest.raises(RemoteLogMetadataError):
            decode_key(whole[:length])
