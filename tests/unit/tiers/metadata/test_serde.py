"""The golden bytes were made by Kafka 4.3.0's own RemoteLogMetadataSerde.serialize from the same values."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiers.errors import RemoteLogMetadataError
from tiers.metadata.records.serde import (
    MetadataRecord,
    RecordKey,
    UnknownRecordError,
    decode_key,
    decode_value,
    encode_key,
    encode_value,
    key_of,
    log_gap_key,
    nothing_key,
    segment_keys,
)
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import TIER_PARTITION, RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import (
    CutUpdate,
    LeaderEpochEntry,
    LocalLogStartUpdate,
    LogGapUpdate,
    LogStartOffsetUpdate,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemotePartitionDeleteMetadata,
    TierMarkerUpdate,
    TopicDeletionUpdate,
    TopicMissingUpdate,
    TopicTierConfigUpdate,
    UnfinishedRebuildUpdate,
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


@pytest.mark.parametrize("reason", LogStartReason)
def test_a_log_start_keeps_its_bytes(reason: LogStartReason) -> None:
    update = LogStartOffsetUpdate(PARTITION, "proxy-1", 1700000001234, LogStart(4096, 5, reason, 4))
    expected = (
        "01e80702076f7264657273123456789abcdef0123456789abcdef00000000700"
        f"0870726f78792d310000018bcfe56cd2000000000000100000000005{reason:02x}0000000400"
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
    update = LocalLogStartUpdate(PARTITION, "proxy-1", 1700000001234, OffsetAndEpoch(4096, 5))
    expected = (
        "01ec0701076f7264657273123456789abcdef0123456789abcdef00000000700"
        "0870726f78792d310000018bcfe56cd200000000000010000000000500"
    )
    assert encode_value(update).hex() == expected
    assert decode_value(bytes.fromhex(expected)) == update


def test_a_gap_keeps_its_bytes_and_what_is_none_is_an_error() -> None:
    update = LogGapUpdate(PARTITION, "proxy-1", 1700000001234, LogGap(16, 32), 5)
    expected = (
        "01ee0700076f7264657273123456789abcdef0123456789abcdef00000000700"
        "0870726f78792d310000018bcfe56cd2000000000000001000000000000000200000000500"
    )
    assert encode_value(update).hex() == expected
    assert decode_value(bytes.fromhex(expected)) == update
    for empty in (LogGap(16, 16), LogGap(-1, 16)):
        with pytest.raises(RemoteLogMetadataError, match="holds no offsets"):
            decode_value(encode_value(replace(update, gap=empty)))


@pytest.mark.parametrize(
    ("record_type", "api_key"),
    [
        (UnfinishedRebuildUpdate, "f107"),
        (TopicMissingUpdate, "d10f"),
    ],
)
def test_a_record_without_fields_of_its_own_keeps_its_bytes(
    record_type: type[UnfinishedRebuildUpdate | TopicMissingUpdate],
    api_key: str,
) -> None:
    update = record_type(PARTITION, "proxy-1", 1700000001234)
    expected = (
        f"01{api_key}00076f7264657273123456789abcdef0123456789abcdef000000007000870726f78792d310000018bcfe56cd200"
    )
    assert encode_value(update).hex() == expected
    assert decode_value(bytes.fromhex(expected)) == update


def test_a_deletion_of_a_topic_keeps_its_bytes() -> None:
    update = TopicDeletionUpdate(PARTITION, "proxy-1", 1700000001234, True)
    expected = "01d00f00076f7264657273123456789abcdef0123456789abcdef000000007000870726f78792d310000018bcfe56cd20100"
    assert encode_value(update).hex() == expected
    assert decode_value(bytes.fromhex(expected)) == update


def test_a_marker_keeps_its_bytes() -> None:
    update = TierMarkerUpdate(TIER_PARTITION, "a", 1, "east", UUID(int=3), True)
    expected = f"01f20700{'01'}{'00' * 16}ffffffff00026100000000000000010565617374{'00' * 15}030100"
    assert encode_value(update).hex() == expected
    assert decode_value(bytes.fromhex(expected)) == update


def test_an_offset_below_zero_is_remembered_of_no_log() -> None:
    records: tuple[MetadataRecord, ...] = (
        LogStartOffsetUpdate(PARTITION, "a", 0, LogStart(-1, 5, LogStartReason.USER)),
        LocalLogStartUpdate(PARTITION, "a", 0, OffsetAndEpoch(-1, 5)),
        CutUpdate(PARTITION, "a", 0, 5, -1),
    )
    for record in records:
        with pytest.raises(RemoteLogMetadataError, match="negative offset -1"):
            decode_value(encode_value(record))


@pytest.mark.parametrize("is_proved", [False, True])
def test_a_cut_keeps_its_bytes(is_proved: bool) -> None:
    update = CutUpdate(PARTITION, "proxy-1", 1700000001234, 5, 149, is_proved)
    expected = (
        "01ea0701076f7264657273123456789abcdef0123456789abcdef00000000700"
        f"0870726f78792d310000018bcfe56cd20000000000000095000000050{int(is_proved)}00"
    )
    assert encode_value(update).hex() == expected
    assert decode_value(bytes.fromhex(expected)) == update


def test_a_copy_plan_keeps_its_bytes_and_what_is_none_is_an_error() -> None:
    plan = CopyPlan(PARTITION, "proxy-1", 1700000001234, UUID(int=5), 3, 2, 4, (10, 20, 35))
    expected = (
        "01ed0701076f7264657273123456789abcdef0123456789abcdef00000000700"
        "0870726f78792d310000018bcfe56cd20000000000000000000000000000000500"
        "000003000000020000000404000000000000000a0000000000000014000000000000002300"
    )
    assert encode_value(plan).hex() == expected
    assert decode_value(bytes.fromhex(expected)) == plan
    with pytest.raises(RemoteLogMetadataError, match="has no tiles"):
        decode_value(bytes.fromhex(expected.replace("0000000000000014", "0000000000000009")))


def test_an_unknown_record_is_left_out_only_if_it_may_be() -> None:
    """Api keys from 2000 on may be. Below that, and of a version that is not known, a later release wrote it."""
    assert decode_value(bytes.fromhex("01b71700deadbeef")) is None  # 2999
    assert decode_value(bytes.fromhex("01d00f07deadbeef")) is None  # a later version of 2000
    for later in ("01cf0f00deadbeef", "01e80703", "01ee0701"):  # 1999, and later versions of 1000 and 1006
        with pytest.raises(UnknownRecordError, match="later release"):
            decode_value(bytes.fromhex(later))


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
        b"\x01\xe8\x07\x01",
        b"\x01\xe9\x07\x00",
        b"\x01\xea\x07\x00",
        b"\x01\xec\x07\x01",
        b"\x01\xed\x07\x00",
        b"\x01\xee\x07\x00",
        b"\x01\xef\x07\x00",
        b"\x01\xd0\x0f\x00",
    ):
        try:
            decoded = decode_value(prefix + data)
        except RemoteLogMetadataError:
            continue
        assert decoded is None or decode_value(encode_value(decoded)) == decoded


def test_keys_tell_segments_record_types_and_log_starts_apart() -> None:
    update = RemoteLogSegmentMetadataUpdate(SEGMENT_ID, 4, 0, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
    keys = [
        key_of(ADDED),
        key_of(update),
        key_of(RemotePartitionDeleteMetadata(PARTITION, 1, 0, RemotePartitionDeleteState.DELETE_PARTITION_MARKED)),
        key_of(LogStartOffsetUpdate(PARTITION, "a", 0, LogStart(1, 0, LogStartReason.USER))),
        key_of(LogStartOffsetUpdate(PARTITION, "a", 0, LogStart(1, 1, LogStartReason.USER))),
        key_of(LogStartOffsetUpdate(PARTITION, "a", 0, LogStart(2, 0, LogStartReason.USER))),
        key_of(LogStartOffsetUpdate(PARTITION, "a", 0, LogStart(1, 0, LogStartReason.RETENTION))),
        key_of(LogStartOffsetUpdate(PARTITION, "a", 0, LogStart(1, 0, LogStartReason.USER, last_epoch=0))),
        key_of(LogStartOffsetUpdate(PARTITION, "b", 0, LogStart(1, 0, LogStartReason.SEEN))),
        nothing_key(PARTITION),
        key_of(LocalLogStartUpdate(PARTITION, "a", 0, OffsetAndEpoch(1, 0))),
        key_of(LogGapUpdate(PARTITION, "a", 0, LogGap(1, 9), 0)),
        key_of(LogGapUpdate(PARTITION, "a", 0, LogGap(2, 9), 0)),
        key_of(TierMarkerUpdate(PARTITION, "a", 0, "", UUID(int=3), True)),
        key_of(UnfinishedRebuildUpdate(PARTITION, "a", 0)),
        key_of(TopicDeletionUpdate(PARTITION, "a", 0, False)),
        key_of(TopicMissingUpdate(PARTITION, "a", 0)),
        key_of(TopicTierConfigUpdate(PARTITION, "a", 0, {})),
        key_of(CutUpdate(PARTITION, "a", 0, 1, 5)),
        key_of(CutUpdate(PARTITION, "a", 0, 2, 5)),
        key_of(CopyPlan(PARTITION, "a", 0, UUID(int=5), 1, 0, 0, (0, 1))),
    ]
    assert tuple(keys[:2]) == segment_keys(SEGMENT_ID)
    assert len({encode_key(key) for key in keys}) == len(keys)
    assert [decode_key(encode_key(key)) for key in keys] == keys


def test_a_replaced_record_has_one_key_for_all_writers() -> None:
    """Compaction keeps the later record; a tombstone ends it."""
    for number, writer in enumerate("ab"):
        start = LogStart(number, number, LogStartReason.SEEN)
        assert key_of(LogStartOffsetUpdate(PARTITION, writer, 0, start)) == RecordKey(1000, PARTITION)
        trim = LocalLogStartUpdate(PARTITION, writer, 0, OffsetAndEpoch(number, number))
        assert key_of(trim) == RecordKey(1004, PARTITION)
        assert key_of(LogGapUpdate(PARTITION, writer, 0, LogGap(5, 9 + number), 0)) == log_gap_key(PARTITION, 5)
        assert key_of(TopicMissingUpdate(PARTITION, writer, 0)) == RecordKey(2001, PARTITION)


def test_a_later_state_of_a_segment_has_the_same_key() -> None:
    finished = RemoteLogSegmentMetadataUpdate(SEGMENT_ID, 1, 5, RemoteLogSegmentState.COPY_SEGMENT_FINISHED, b"x")
    deleted = RemoteLogSegmentMetadataUpdate(SEGMENT_ID, 2, 9, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
    assert key_of(finished) == key_of(deleted)


def test_a_torn_key_is_an_error() -> None:
    whole = encode_key(RecordKey(2, PARTITION))
    for length in range(len(whole)):
        with pytest.raises(RemoteLogMetadataError):
            decode_key(whole[:length])
