"""The state replays every readable record, whoever wrote it into the topic."""

from __future__ import annotations

import tempfile
from pathlib import Path
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.tiers.metadata_batches import OWNER, TRANSACTIONAL, batch, fetched
from tests.support.tiers.metadata_state import open_state
from tiers.metadata.records.serde import MetadataRecord, RecordKey, encode_key, encode_value, key_of
from tiers.metadata.topic.committed_records import read_committed
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
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
    TopicDeletionUpdate,
    TopicMissingUpdate,
    TopicTierConfigUpdate,
    UnfinishedRebuildUpdate,
)
from tiers.model.segment_state import RemoteLogSegmentState, RemotePartitionDeleteState

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
