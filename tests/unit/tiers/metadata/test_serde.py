"""The golden bytes were made by Kafka 4.3.0's own RemoteLogMetadataSerde.serialize from the same values."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import replace
from typing import get_args
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
    known_record_types,
    nothing_key,
    read_record_type,
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
    RemoteLogSegmentState,
    RemotePartitionDeleteMetadata,
    RemotePartitionDeleteState,
    TierMarkerUpdate,
    TopicDeletionUpdate,
    TopicMissingUpdate,
    TopicTierConfigUpdate,
    UnfinishedRebuildUpdate,
)

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

_HEAD = "076f7264657273123456789abcdef0123456789abcdef000000007000870726f78792d310000018bcfe56cd2"
_OWN = (PARTITION, "proxy-1", 1700000001234)
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
]
"""Kafka's record types."""
OWN: list[tuple[MetadataRecord, str]] = [
    (replace(ADDED, copy_epoch=7), _ADDED_HEX + "000001904e0400000007"),
    *(
        (
            LogStartOffsetUpdate(*_OWN, LogStart(4096, 5, reason, 4)),
            f"01e80702{_HEAD}000000000000100000000005{reason:02x}0000000400",
        )
        for reason in LogStartReason
    ),
    (
        TopicTierConfigUpdate(*_OWN, {"local.retention.ms": "10"}),
        f"01e90700{_HEAD}02136c6f63616c2e726574656e74696f6e2e6d730331300000",
    ),
    (CutUpdate(*_OWN, 5, 149, False), f"01ea0701{_HEAD}0000000000000095000000050000"),
    (CutUpdate(*_OWN, 5, 149, True), f"01ea0701{_HEAD}0000000000000095000000050100"),
    (LocalLogStartUpdate(*_OWN, OffsetAndEpoch(4096, 5)), f"01ec0701{_HEAD}00000000000010000000000500"),
    (
        CopyPlan(*_OWN, UUID(int=5), 3, 2, 4, (10, 20, 35)),
        f"01ed0701{_HEAD}{5:032x}00000003000000020000000404000000000000000a0000000000000014000000000000002300",
    ),
    (LogGapUpdate(*_OWN, LogGap(16, 32), 5), f"01ee0700{_HEAD}000000000000001000000000000000200000000500"),
    (UnfinishedRebuildUpdate(*_OWN), f"01f10700{_HEAD}00"),
    (
        TierMarkerUpdate(TIER_PARTITION, "a", 1, "east", UUID(int=3), True),
        f"01f20700{'01'}{'00' * 16}ffffffff00026100000000000000010565617374{'00' * 15}030100",
    ),
    (TopicDeletionUpdate(*_OWN, True), f"01d00f00{_HEAD}0100"),
    (TopicMissingUpdate(*_OWN), f"01d10f00{_HEAD}00"),
]


@pytest.mark.parametrize(("record", "golden"), [*GOLDEN, *OWN])
def test_a_record_keeps_its_bytes(record: MetadataRecord, golden: str) -> None:
    assert encode_value(record).hex() == golden
    whole = bytes.fromhex(golden)
    decoded = decode_value(whole)
    assert (decoded, type(decoded)) == (record, type(record))
    assert key_of(record).topic_id_partition.topic == record.topic_id_partition.topic
    assert read_record_type(whole) in known_record_types()
    for torn in (*(whole[:length] for length in range(len(whole))), whole + b"\x00"):
        with pytest.raises(RemoteLogMetadataError):
            decode_value(torn)


def test_every_record_type_is_read() -> None:
    assert {type(record) for record, _ in (*GOLDEN, *OWN)} == {*get_args(MetadataRecord)}


@pytest.mark.parametrize(
    ("record", "error"),
    [
        (LogStartOffsetUpdate(*_OWN, LogStart(-1, 5, LogStartReason.USER)), "negative offset -1"),
        (LocalLogStartUpdate(*_OWN, OffsetAndEpoch(-1, 5)), "negative offset -1"),
        (CutUpdate(*_OWN, 5, -1), "negative offset -1"),
        (LogGapUpdate(*_OWN, LogGap(16, 16), 5), "holds no offsets"),
        (LogGapUpdate(*_OWN, LogGap(-1, 16), 5), "holds no offsets"),
        (replace(ADDED, segment_leader_epochs=()), "holds no offsets or no leader epoch"),
        (replace(ADDED, start_offset=300), "holds no offsets or no leader epoch"),
    ],
)
def test_offsets_of_no_log_are_an_error(record: MetadataRecord, error: str) -> None:
    with pytest.raises(RemoteLogMetadataError, match=error):
        decode_value(encode_value(record))


def test_a_plan_without_tiles_is_an_error() -> None:
    plan = encode_value(CopyPlan(*_OWN, UUID(int=5), 3, 2, 4, (10, 20, 35))).hex()
    with pytest.raises(RemoteLogMetadataError, match="has no tiles"):
        decode_value(bytes.fromhex(plan.replace("0000000000000014", "0000000000000009")))


@pytest.mark.parametrize("tag", ["00020100", "0000", "904e050000000700", "904e020007"])
def test_a_tag_of_another_size_is_an_error(tag: str) -> None:
    with pytest.raises(RemoteLogMetadataError):
        decode_value(bytes.fromhex(_ADDED_HEX + "000001" + tag))


def test_an_unknown_record_is_left_out_only_if_it_may_be() -> None:
    """Api keys from 2000 on may be. Below that, and of a version that is not known, a later release wrote it."""
    assert decode_value(bytes.fromhex("01b71700deadbeef")) is None  # 2999
    assert decode_value(bytes.fromhex("01d00f07deadbeef")) is None  # a later version of 2000
    later = {"01cf0f00deadbeef": True, "01e80703": True, "01ee0701": True, "020000": False, "010001": False}
    for value, is_surely_ours in later.items():
        with pytest.raises(UnknownRecordError, match="later release") as error:
            decode_value(bytes.fromhex(value))
        assert error.value.is_surely_ours is is_surely_ours


@given(st.sampled_from(["", *(golden[:8] for _, golden in (*GOLDEN, *OWN))]), st.binary(max_size=200))
def test_arbitrary_bytes_never_raise_anything_else(prefix: str, data: bytes) -> None:
    with suppress(RemoteLogMetadataError):
        decoded = decode_value(bytes.fromhex(prefix) + data)
        assert decoded is None or decode_value(encode_value(decoded)) == decoded


def test_keys_name_the_subjects_of_records() -> None:
    subjects: list[MetadataRecord] = [
        *(record for record, _ in (GOLDEN[0], GOLDEN[2], GOLDEN[4], *OWN[1:])),
        LogStartOffsetUpdate(*_OWN, LogStart(4096, 6, LogStartReason.USER, 4)),
        LogStartOffsetUpdate(*_OWN, LogStart(4097, 5, LogStartReason.USER, 4)),
        LogStartOffsetUpdate(*_OWN, LogStart(4096, 5, LogStartReason.USER, 5)),
        LogGapUpdate(*_OWN, LogGap(17, 32), 5),
        CutUpdate(*_OWN, 6, 149),
    ]
    subjects.remove(CutUpdate(*_OWN, 5, 149, False))
    keys = [*map(key_of, subjects), nothing_key(PARTITION)]
    assert tuple(keys[:2]) == segment_keys(SEGMENT_ID)
    assert len({encode_key(key) for key in keys}) == len(keys)
    assert [decode_key(encode_key(key)) for key in keys] == keys
    for length in range(len(encode_key(RecordKey(2, PARTITION)))):
        with pytest.raises(RemoteLogMetadataError):
            decode_key(encode_key(keys[0])[:length])


@pytest.mark.parametrize(
    ("record", "later"),
    [
        (GOLDEN[2][0], GOLDEN[3][0]),
        *(
            (made("a", 1), made("b", 2))
            for made in (
                lambda writer, at: LogStartOffsetUpdate(PARTITION, writer, at, LogStart(at, at, LogStartReason.SEEN)),
                lambda writer, at: LocalLogStartUpdate(PARTITION, writer, at, OffsetAndEpoch(at, at)),
                lambda writer, at: LogGapUpdate(PARTITION, writer, at, LogGap(5, 9 + at), at),
                lambda writer, at: CutUpdate(PARTITION, writer, at, 5, 7, at > 1),
                lambda writer, at: TierMarkerUpdate(PARTITION, writer, at, "east", UUID(int=at), False),
                lambda writer, at: TopicMissingUpdate(PARTITION, writer, at),
            )
        ),
    ],
)
def test_a_replaced_record_has_one_key_for_all_writers(record: MetadataRecord, later: MetadataRecord) -> None:
    assert key_of(record) == key_of(later)
