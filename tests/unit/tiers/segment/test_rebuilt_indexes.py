"""Indexes that are rebuilt from a log equal those of its copy. Gaps are counted, and are no fault."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.records.record_batch import crc32c, verify_batches
from tests.support.fakes.record_batches import build_batch, control_batch, legacy_message, legacy_wrapper, record
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.tiers.transactional_log import COMPACTED_EPOCHS, compacted_log, copied, indexes_of
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata
from tiers.segment.indexes.indexes_object import IndexesObject, decode_indexes_object, encode_indexes_object
from tiers.segment.rebuilt_indexes import RebuiltIndexes

KINDS = ("plain", "empty", "transactional", "commit", "abort", "message", "wrapper", "append time")
LEGACY = ("message", "wrapper")
STEP = st.tuples(
    st.sampled_from(KINDS),
    st.integers(0, 3),  # offsets missing before it
    st.integers(0, 1),  # new leader epochs
    st.integers(1, 3),  # the producer
    st.integers(1, 6),  # records
    st.integers(0, 10_000),  # timestamp
)


def batch_at(offset: int, epoch: int, kind: str, producer: int, count: int, timestamp: int) -> bytes:
    rows = [record(offset + i, timestamp + i, value=b"v" * 700) for i in range(count)]
    if kind in ("commit", "abort"):
        return control_batch(
            offset, commit=kind == "commit", producer_id=producer, leader_epoch=epoch, timestamp=timestamp
        )
    if kind == "message":
        return legacy_message(1, offset, timestamp, b"k", b"v")
    if kind == "wrapper":
        return legacy_wrapper(1, offset, rows, codec=1)
    return build_batch(
        offset,
        [] if kind == "empty" else rows,
        last_offset=offset + count - 1,
        leader_epoch=epoch,
        producer_id=producer if kind == "transactional" else -1,
        transactional=kind == "transactional",
        log_append_time_ms=timestamp if kind == "append time" else None,
    )


def rebuilt_of(log: bytes, segment: RemoteLogSegmentMetadata, stored: IndexesObject) -> RebuiltIndexes:
    rebuilt = RebuiltIndexes(segment)
    for chunk in stored.chunks():
        data = memoryview(log)[chunk.stored_position :][: chunk.stored_bytes]
        batches = verify_batches(data, chunk.first_offset)
        assert rebuilt.add_chunk(chunk, crc32c(data, 0, len(data)), data, batches) is None
    return rebuilt


@settings(max_examples=60)
@given(
    steps=st.lists(STEP, min_size=1, max_size=15),
    base=st.integers(0, 3),
    chunk_bytes=st.sampled_from([1, 3000, 1 << 20]),
    reported=st.booleans(),
)
def test_the_builder_makes_the_indexes_that_the_log_gives(
    steps: list[tuple[str, int, int, int, int, int]], base: int, chunk_bytes: int, reported: bool
) -> None:
    offset, epoch, appends, records = base, 0, [], 0
    # Brokers wrote legacy messages before they wrote batches, never after.
    steps = sorted(steps, key=lambda step: step[0] not in LEGACY)
    for kind, gap, bump, producer, count, timestamp in steps:
        # The header of a wrapper does not have its first offset: it continues the log.
        offset += gap if kind != "wrapper" else 0
        epoch += bump
        appends.append(batch_at(offset, epoch, kind, producer, count, timestamp))
        is_one = kind in ("commit", "abort", "message")
        records += {"empty": 0, "commit": 0, "abort": 0, "wrapper": 1, "message": 1}.get(kind, count)
        offset += 1 if is_one else count
    aborted = [AbortedTransaction(1, base)] if reported else []
    with tempfile.TemporaryDirectory() as folder:
        built = build_segment(Path(folder) / "log", appends, base, aborted, chunk_bytes)
        log = built.log_segment.read_bytes()
    segment = metadata_of(built)
    stored = decode_indexes_object(encode_indexes_object(segment, built.indexes), segment)
    rebuilt = rebuilt_of(log, segment, stored)
    assert list(rebuilt.differences(stored)) == []
    assert (rebuilt.batches, rebuilt.records) == (len(appends), records)
    assert rebuilt.missing_offsets == built.missing_offsets


@pytest.mark.parametrize("ends", [[1, 3, 6], [2, 4, 6], [6]])
@pytest.mark.parametrize("named", [COMPACTED_EPOCHS, None], ids=["the leader named", "no leader named"])
def test_an_epoch_may_begin_in_a_hole(
    tmp_path: Path, ends: list[int], named: tuple[LeaderEpochEntry, ...] | None
) -> None:
    for built in copied(tmp_path, compacted_log(), ends, named=named):
        segment, stored = metadata_of(built), indexes_of(built)
        log = built.log_segment.read_bytes()
        assert list(rebuilt_of(log, segment, stored).differences(stored)) == []


@pytest.mark.parametrize("epochs", [[(0, 0), (1, 2), (2, 7), (3, 10)], [(0, 0), (1, 2), (3, 10)]])
def test_the_metadata_names_no_epoch_outside_of_a_hole(tmp_path: Path, epochs: list[tuple[int, int]]) -> None:
    [built] = copied(tmp_path, compacted_log(), [6], named=COMPACTED_EPOCHS)
    wrong = tuple(LeaderEpochEntry(*each) for each in epochs)
    segment = replace(metadata_of(built), segment_leader_epochs=wrong)
    stored = decode_indexes_object(encode_indexes_object(segment, replace(built.indexes, leader_epochs=wrong)), segment)
    log = built.log_segment.read_bytes()
    assert list(rebuilt_of(log, segment, stored).differences(stored)) == ["the leader epochs do not match the log"]


def test_chunks_that_overlap_are_told(tmp_path: Path) -> None:
    batches = [build_batch(0, [record(0), record(1)]), build_batch(2, [record(2)])]
    built = build_segment(tmp_path / "log", batches, chunk_bytes=1)
    rebuilt = RebuiltIndexes(metadata_of(built))
    log = build_batch(0, [record(0), record(1)])
    for chunk, expected in zip(built.chunks, (None, "offset 1 after 1"), strict=True):
        data = memoryview(log)
        trouble = rebuilt.add_chunk(chunk, 0, data, verify_batches(data))
        assert trouble is None if expected is None else expected in str(trouble)
        log = build_batch(1, [record(1), record(2)])
