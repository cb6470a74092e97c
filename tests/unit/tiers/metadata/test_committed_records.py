"""The follower reads as read_committed, leaves out foreign records, and can replay all others."""

from __future__ import annotations

import struct
import tempfile
from pathlib import Path
from uuid import UUID

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.errors import CorruptBatchError, ErrorCode
from tests.support.tiers.metadata_batches import OWNER, TRANSACTIONAL, batch, fetched, with_crc
from tests.support.tiers.metadata_state import NOW_MS, log_start, open_state, segment, to, user
from tiers.errors import BrokerError
from tiers.metadata.records.serde import (
    MetadataRecord,
    RecordKey,
    encode_key,
    encode_value,
    key_of,
    nothing_key,
    segment_keys,
)
from tiers.metadata.topic.committed_records import read_committed
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.log_source import AbortedTransaction
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
    TopicDeletionUpdate,
    TopicMissingUpdate,
    TopicTierConfigUpdate,
    UnfinishedRebuildUpdate,
)
from tiers.model.segment_metadata import RemoteLogSegmentState as State

CONTROL = 0x20
GZIP = 0x01


def data(base_offset: int, count: int, producer_id: int = OWNER) -> bytes:
    metadata = [segment(base_offset + index + 1, 0, 9) for index in range(count)]
    records = [(encode_key(key_of(each)), encode_value(each)) for each in metadata]
    return batch(base_offset, records, producer_id)


def marker(offset: int, producer_id: int, *, commit: bool) -> bytes:
    key = struct.pack(">hh", 0, 1 if commit else 0)
    return batch(offset, [(key, struct.pack(">hi", 0, 0))], producer_id, TRANSACTIONAL | CONTROL)


def offsets(records: bytes, aborted: tuple[AbortedTransaction, ...] = (), position: int = 0) -> list[int]:
    return [event.offset for event in read_committed(fetched(records, aborted), position).events]


def test_a_transaction_that_began_before_the_position_is_left_out() -> None:
    log = data(5, 1, producer_id=7) + marker(6, 7, commit=False)
    assert offsets(log, (AbortedTransaction(7, 1),), position=5) == []


@given(st.lists(st.tuples(st.sampled_from([7, 8, 9]), st.sampled_from(["write", "write", "commit", "abort"]))))
def test_exactly_the_committed_records_are_read(acts: list[tuple[int, str]]) -> None:
    log, committed, aborted, offset = b"", [], [], 0
    written: dict[int, list[int]] = {}
    for producer_id, act in [*acts, (7, "commit"), (8, "abort"), (9, "commit")]:
        if act == "write":
            written.setdefault(producer_id, []).append(offset)
            log += data(offset, 1, producer_id)
        elif producer_id in written:
            of_transaction = written.pop(producer_id)
            log += marker(offset, producer_id, commit=act == "commit")
            if act == "commit":
                committed += of_transaction
            else:
                aborted.append(AbortedTransaction(producer_id, of_transaction[0]))
        else:
            continue
        offset += 1
    read = read_committed(fetched(log, tuple(reversed(aborted))), 0)
    assert ([event.offset for event in read.events], read.next_offset) == (sorted(committed), offset)


def test_a_marker_that_compaction_emptied_is_read_past() -> None:
    emptied = bytearray(marker(1, 7, commit=False)[:61])
    struct.pack_into(">i", emptied, 8, len(emptied) - 12)
    struct.pack_into(">i", emptied, 57, 0)
    read = read_committed(fetched(data(0, 1) + with_crc(emptied) + data(2, 1)), 0)
    assert ([event.offset for event in read.events], read.next_offset) == ([0, 2], 3)


def test_a_batch_cut_short_waits_for_the_next_read() -> None:
    log = data(0, 2) + data(2, 2)
    read = read_committed(fetched(log[:-1]), 0)
    assert ([event.offset for event in read.events], read.next_offset) == ([0, 1], 2)


def test_records_of_others_are_left_out_and_told_of_once(caplog: pytest.LogCaptureFixture) -> None:
    mine = to(segment(1, 0, 9), State.COPY_SEGMENT_FINISHED)
    log = batch(
        0,
        [
            (b"?", b"not a record of ours"),
            (b"?", None),
            (None, None),
            (b"?", bytes.fromhex("01b71700")),
            (b"?", bytes.fromhex("010500")),
            (b"?", bytes.fromhex("010001")),
        ],
        -1,
        0,
    ) + batch(6, [(b"?", None), (b"?", b"\x01\x00\x00torn"), (None, encode_value(mine))])
    read = read_committed(fetched(log), 0)
    assert [event.record for event in read.events] == [mine]
    assert (read.next_offset, read.foreign_records, read.unknown) == (9, 7, None)
    assert [(vars(record)["offset"], vars(record)["records"]) for record in caplog.records] == [(0, 7)]


UNKNOWN_KEY = encode_key(RecordKey(1999, segment(1, 0, 9).topic_id_partition))
KNOWN_KEY = encode_key(key_of(segment(1, 0, 9)))
UNKNOWN = {
    "a later type of ours": (UNKNOWN_KEY, bytes.fromhex("01cf0f00")),
    "a later version of ours": (KNOWN_KEY, bytes.fromhex("01e80703")),
    "its tombstone": (UNKNOWN_KEY, None),
}
UNKNOWN_IN_TRANSACTIONS = {
    "another frame": (KNOWN_KEY, bytes.fromhex("020000")),
    "a later type of Kafka's": (KNOWN_KEY, bytes.fromhex("010500")),
    "a later version of Kafka's": (KNOWN_KEY, bytes.fromhex("010001")),
    "a tombstone of a later type of Kafka's": (encode_key(RecordKey(5, segment(1, 0, 9).topic_id_partition)), None),
}


@pytest.mark.parametrize("in_transaction", [False, True])
@pytest.mark.parametrize("what", [*UNKNOWN, *UNKNOWN_IN_TRANSACTIONS])
def test_a_record_of_a_later_release_ends_the_read_in_front_of_it(what: str, in_transaction: bool) -> None:
    unknown = (UNKNOWN | UNKNOWN_IN_TRANSACTIONS)[what]
    added = segment(1, 0, 9)
    raised = log_start("anybody", user(5))
    pairs = [(encode_key(key_of(each)), encode_value(each)) for each in (raised, raised)]
    middle = [pairs[0], unknown, pairs[1]]
    producer, attributes = (OWNER, TRANSACTIONAL) if in_transaction else (-1, 0)
    log = data(0, 1) + batch(1, middle, producer, attributes) + data(4, 1)
    read = read_committed(fetched(log), 0)
    if what in UNKNOWN_IN_TRANSACTIONS and not in_transaction:
        assert ([event.offset for event in read.events], read.unknown) == ([0, 1, 3, 4], None)
        assert read.foreign_records == 1
        return
    assert read.unknown is not None
    assert read.unknown.offset == 2
    assert "later release" in read.unknown.what
    assert ([event.offset for event in read.events], read.next_offset) == ([0, 1], 2)
    assert added in [event.record for event in read.events]
    again = read_committed(fetched(log), 2)
    assert (again.events, again.next_offset, again.unknown) == ([], 2, read.unknown)


def test_an_aborted_record_of_a_later_release_is_none() -> None:
    unknown = batch(0, [UNKNOWN["a later type of ours"]], producer_id=7) + marker(1, 7, commit=False)
    read = read_committed(fetched(unknown + data(2, 1, producer_id=8), (AbortedTransaction(7, 0),)), 0)
    assert ([event.offset for event in read.events], read.unknown) == ([2], None)


@pytest.mark.parametrize(("at", "position", "leader_epoch"), [(0, 50, 3), (1, 61, 4)])
def test_a_position_before_an_unknown_record_has_an_epoch_that_reached_it(
    at: int, position: int, leader_epoch: int
) -> None:
    """Leader epoch 3 ended at 50. What epoch 4 wrote first was compacted away."""
    pairs = [(KNOWN_KEY, encode_value(segment(1, 0, 9)))] * 2
    pairs[at] = (UNKNOWN_KEY, bytes.fromhex("01cf0f00"))
    before, after = bytearray(data(49, 1)), bytearray(batch(60, pairs))
    struct.pack_into(">i", before, 12, 3)
    struct.pack_into(">i", after, 12, 4)
    read = read_committed(fetched(bytes(before + after)), 40)
    assert read.unknown is not None
    assert read.unknown.offset == 60 + at
    assert (read.next_offset, read.leader_epoch) == (position, leader_epoch)
    again = read_committed(fetched(bytes(after)), position)
    assert (again.next_offset, again.leader_epoch, again.unknown) == (position, -1, read.unknown)


def test_records_of_owners_count_only_in_a_transaction() -> None:
    added = segment(1, 0, 9)
    raised = log_start("anybody", user(5))
    records = [
        (None, encode_value(added)),
        (encode_key(segment_keys(added.segment_id)[0]), None),
        (encode_key(key_of(raised)), encode_value(raised)),
        (encode_key(key_of(raised)), None),
        (encode_key(nothing_key(added.topic_id_partition)), None),
    ]
    read = read_committed(fetched(batch(0, records, -1, 0)), 0)
    assert [(event.offset, event.record) for event in read.events] == [(2, raised), (3, None), (4, None)]
    assert [event.timestamp_ms for event in read.events] == [NOW_MS] * 3
    assert [event.key for event in read.events] == [*[key_of(raised)] * 2, nothing_key(added.topic_id_partition)]
    assert offsets(batch(0, records), position=2) == [2, 3, 4]
    assert read.foreign_records == 2
    assert len(read_committed(fetched(batch(0, records)), 0).events) == 5


def test_an_unreadable_batch_counts_only_in_a_transaction() -> None:
    records = [(None, b"not compressed, whatever the batch says")]
    stranger = batch(0, records, -1, GZIP)
    read = read_committed(fetched(stranger + data(1, 1)), 0)
    assert [event.offset for event in read.events] == [1]
    assert read.foreign_records == 1
    damaged = bytearray(data(0, 1))
    damaged[-1] ^= 1
    for corrupt in (batch(0, records, OWNER, TRANSACTIONAL | GZIP), bytes(damaged)):
        with pytest.raises(CorruptBatchError):
            read_committed(fetched(corrupt), 0)
    with pytest.raises(BrokerError):
        read_committed(fetched(b"", error=ErrorCode.NOT_LEADER_OR_FOLLOWER), 0)


INT32 = st.sampled_from([0, 1, 5]) | st.integers(-(1 << 31), (1 << 31) - 1)
INT64 = st.sampled_from([-1, 0, 9, 10, 19]) | st.integers(-(1 << 63), (1 << 63) - 1)
PARTITIONS = st.builds(
    TopicIdPartition, st.just(UUID(int=1)), st.sampled_from([0, -1]), st.sampled_from(["", "orders"])
)
SEGMENTS = st.builds(RemoteLogSegmentId, PARTITIONS, st.sampled_from([UUID(int=2), UUID(int=3)]))
NAMES = st.sampled_from(["", "a", "w" * 255, "w" * 600]) | st.text(max_size=5)
BYTES = st.none() | st.binary(max_size=8)
EPOCHS = st.lists(st.builds(LeaderEpochEntry, INT32, INT64), max_size=3).map(tuple)
STATES = st.sampled_from(RemoteLogSegmentState)
ADDED = st.builds(
    RemoteLogSegmentMetadata, SEGMENTS, INT64, INT64, INT32, INT64, INT64, EPOCHS, INT32, STATES, BYTES, st.booleans()
)
PLANS = st.builds(
    CopyPlan,
    PARTITIONS,
    NAMES,
    INT64,
    st.sampled_from([UUID(int=2), UUID(int=4)]),
    st.integers(1, 3),
    st.integers(0, 5),
    st.integers(0, 5),
    st.sets(st.integers(0, (1 << 63) - 1), min_size=2, max_size=4).map(lambda bounds: tuple(sorted(bounds))),
)
RECORDS: st.SearchStrategy[MetadataRecord] = st.one_of(
    ADDED,
    st.builds(RemoteLogSegmentMetadataUpdate, SEGMENTS, INT32, INT64, STATES, BYTES),
    st.builds(RemotePartitionDeleteMetadata, PARTITIONS, INT32, INT64, st.sampled_from(RemotePartitionDeleteState)),
    st.builds(
        LogStartOffsetUpdate,
        PARTITIONS,
        NAMES,
        INT64,
        st.builds(LogStart, INT64, INT32, st.sampled_from(LogStartReason)),
    ),
    st.builds(TopicTierConfigUpdate, PARTITIONS, NAMES, INT64, st.dictionaries(NAMES, NAMES, max_size=2)),
    st.builds(CutUpdate, PARTITIONS, NAMES, INT64, INT32, st.integers(0, 2**63 - 1), st.booleans()),
    st.builds(LocalLogStartUpdate, PARTITIONS, NAMES, INT64, st.builds(OffsetAndEpoch, INT64, INT32)),
    st.builds(LogGapUpdate, PARTITIONS, NAMES, INT64, st.builds(LogGap, INT64, INT64), INT32),
    st.builds(UnfinishedRebuildUpdate, PARTITIONS, NAMES, INT64),
    st.builds(TopicDeletionUpdate, PARTITIONS, NAMES, INT64, st.booleans()),
    st.builds(TopicMissingUpdate, PARTITIONS, NAMES, INT64),
    PLANS,
)
KEYS = st.builds(
    RecordKey,
    st.sampled_from([0, 1, 2, 3, *range(1000, 1010), *range(2000, 2003)]),
    PARTITIONS,
    st.sampled_from([UUID(int=2).bytes, b"", b"a", b"x" * 600]) | st.binary(max_size=20),
)
WRITTEN = st.one_of(
    RECORDS.map(lambda record: (encode_key(key_of(record)), encode_value(record))),
    KEYS.map(lambda key: (encode_key(key), None)),
    st.tuples(st.none() | st.binary(max_size=40), st.none() | st.binary(max_size=40)),
)


@settings(max_examples=60)
@given(written=st.lists(WRITTEN, min_size=1, max_size=12), in_transaction=st.booleans())
def test_nothing_that_can_be_written_stops_the_replay(
    written: list[tuple[bytes | None, bytes | None]], in_transaction: bool
) -> None:
    raw = batch(0, written, OWNER if in_transaction else -1, TRANSACTIONAL if in_transaction else 0)
    with tempfile.TemporaryDirectory() as folder:
        state = open_state(Path(folder))
        try:
            read = read_committed(fetched(raw), 0)
            if read.unknown is None:
                assert read.next_offset == len(written)
            else:
                assert read.next_offset <= read.unknown.offset < len(written)
            state.apply([read])
            assert state.next_offset(read.metadata_partition) == read.next_offset
        finally:
            state.close()
