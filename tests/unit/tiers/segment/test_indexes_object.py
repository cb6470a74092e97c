from __future__ import annotations

from dataclasses import replace
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.segments import PARTITION
from tiers.errors import CorruptSegmentError
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.segment.indexes.indexes_object import (
    Section,
    SegmentIndexes,
    decode_indexes_object,
    decode_sections,
    decode_segment_metadata,
    encode_indexes_object,
    encode_sections,
    encode_segment_metadata,
)
from tiers.segment.indexes.segment_index import AbortedTransactionRange, Chunk, encode_remote_log_index
from tiers.segment.transactions import MARKER_NOT_COPIED

METADATA = RemoteLogSegmentMetadata(
    segment_id=RemoteLogSegmentId(PARTITION, UUID("00000000-0000-4000-8000-000000000001")),
    start_offset=100,
    end_offset=109,
    broker_id=1,
    max_timestamp_ms=1_600_000_000_009,
    event_timestamp_ms=1_700_000_000_000,
    segment_leader_epochs=(LeaderEpochEntry(2, 100),),
    segment_size_bytes=4096,
    state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
)
CHUNK = Chunk(100, 109, 1_600_000_000_000, 1_600_000_000_009, 0, 4096, 4096, 0xE3069283)
INDEXES = SegmentIndexes(
    offset_index=bytes.fromhex("0000000900001001"),
    time_index=bytes.fromhex("00000174876e800900000009"),
    aborted_transactions=(AbortedTransactionRange(4000, 90, MARKER_NOT_COPIED),),
    transaction_index=b"",
    leader_epochs=(LeaderEpochEntry(0, 0), LeaderEpochEntry(2, 50)),
    remote_log_index=encode_remote_log_index([CHUNK]),
    producer_snapshot=bytes.fromhex("000148674bc700000000"),
    history_from=50,
    facts=b"facts",
)


def test_an_object_tells_the_whole_segment() -> None:
    data = encode_indexes_object(METADATA, INDEXES)
    assert data.startswith(bytes.fromhex("54474958 0003 000a"))  # magic, version, ten sections
    decoded = decode_indexes_object(data, expected=METADATA)
    assert (decoded.metadata, decoded.indexes) == (METADATA, INDEXES)
    assert decoded.metadata.topic_id_partition.topic == "orders"
    assert decoded.remote_log_index().chunks() == (CHUNK,)
    assert decoded.remote_log_index().leader_epochs() == INDEXES.leader_epochs


def test_sections_to_the_byte() -> None:
    assert encode_sections({1: b"123456789", 5: b""}) == bytes.fromhex(
        "54474958 0003 0002"  # magic, version, sections
        "0001 00000028 00000009 e3069283"  # type, position, length, CRC-32C
        "0005 00000031 00000000 00000000"
        "ed48bc82"  # CRC-32C of the above
        "313233343536373839"
    )


def test_the_metadata_section_to_the_byte() -> None:
    assert encode_segment_metadata(METADATA) == (
        b'{"topic":"orders","topicId":"6a1d9b2e-4c3f-4e58-9f70-1b2c3d4e5f60","partition":3,'
        b'"segmentId":"00000000-0000-4000-8000-000000000001","startOffset":100,"endOffset":109,"brokerId":1,'
        b'"maxTimestampMs":1600000000009,"eventTimestampMs":1700000000000,"segmentLeaderEpochs":[[2,100]],'
        b'"segmentSizeInBytes":4096,"state":0,"txnIndexEmpty":false,"copyEpoch":-1}'
    )


@given(st.data())
def test_no_flipped_bit_and_no_lost_or_added_byte_goes_unnoticed(data: st.DataObject) -> None:
    whole = encode_indexes_object(METADATA, INDEXES)
    flipped = bytearray(whole)
    bit = data.draw(st.integers(0, len(whole) * 8 - 1))
    flipped[bit // 8] ^= 1 << bit % 8
    for wrong in (bytes(flipped), whole[: data.draw(st.integers(0, len(whole) - 1))], whole + b"\x00"):
        with pytest.raises(CorruptSegmentError):
            decode_indexes_object(wrong)


def sections() -> dict[int, bytes]:
    found = decode_sections(encode_indexes_object(METADATA, INDEXES))
    return {key: bytes(content) for key, content in found.items()}


def test_sections_of_a_later_writer_are_skipped_and_missing_ones_named() -> None:
    assert decode_indexes_object(encode_sections(sections() | {99: b"later"})).metadata == METADATA
    without = {key: content for key, content in sections().items() if key != Section.TIME_INDEX}
    with pytest.raises(CorruptSegmentError, match="without TIME_INDEX"):
        decode_indexes_object(encode_sections(without))
    for history in (b"", b"\x00" * 7, b"\xff" * 8):
        with pytest.raises(CorruptSegmentError, match="history"):
            decode_indexes_object(encode_sections(sections() | {Section.HISTORY_FROM: history}))


def chunks(position: int, stored_bytes: int, log_bytes: int) -> bytes:
    first = Chunk(100, 104, 0, 0, 0, 4096, 4096, 7)
    return encode_remote_log_index([first, Chunk(105, 109, 0, 0, position, stored_bytes, log_bytes, 7)])


@pytest.mark.parametrize(
    ("metadata", "indexes"),
    [
        (replace(METADATA, segment_size_bytes=4097), INDEXES),
        (replace(METADATA, end_offset=110), INDEXES),
        (METADATA, replace(INDEXES, remote_log_index=b"")),
        *(
            (replace(METADATA, segment_size_bytes=4096 + last[2]), replace(INDEXES, remote_log_index=chunks(*last)))
            for last in ((5000, 10, 20), (4096, 0, 20), (4096, 10, 0))
        ),
    ],
    ids=["size", "end offset", "no chunk", "a hole", "no stored bytes", "no bytes"],
)
def test_sections_are_held_against_each_other(metadata: RemoteLogSegmentMetadata, indexes: SegmentIndexes) -> None:
    with pytest.raises(CorruptSegmentError, match="remote log index"):
        decode_indexes_object(encode_indexes_object(metadata, indexes))


def test_another_segments_object_is_corruption() -> None:
    other = replace(METADATA, segment_id=RemoteLogSegmentId(PARTITION, uuid4()))
    with pytest.raises(CorruptSegmentError, match="expected"):
        decode_indexes_object(encode_indexes_object(METADATA, INDEXES), expected=other)


def test_metadata_that_cannot_be_is_corrupt() -> None:
    for document in (b"", b"[]", b"{}", b'{"topicId":1}', b'"x"', b"\xff"):
        with pytest.raises(CorruptSegmentError):
            decode_segment_metadata(document)
