"""A verification finds no fault in the indexes of any log that was copied, and counts what the log has."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.records.record_batch import crc32c
from tests.support.fakes.record_batches import build_batch, control_batch, legacy_message, legacy_wrapper, record
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.tiers.transactional_log import ACTS, COMPACTED_EPOCHS, compacted_log, copied, log_of
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.indexes.segment_index import encode_remote_log_index
from tiers.segment.segment_builder import BuiltSegment
from tiers.verify.segment_verification import SegmentVerification

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


def verified(built: BuiltSegment, log: bytes | None = None) -> SegmentVerification:
    metadata = metadata_of(built)
    verification = SegmentVerification(metadata, built.log_segment_data(metadata).indexes, None)
    data = memoryview(built.log_segment.read_bytes() if log is None else log)
    for run in verification.runs(5000):
        verification.add(run, data[run.start_position : run.end_position + 1])
    verification.finish()
    return verification


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
        found = verified(built)
    assert found.damages == []
    assert (found.batches, found.records) == (len(appends), records)
    assert found.missing_offsets == built.missing_offsets


@settings(max_examples=25)
@given(ACTS, st.data())
def test_the_segments_of_a_log_with_transactions_are_whole(acts: list[tuple[int, str]], data: st.DataObject) -> None:
    log = log_of(acts)
    ends = sorted({*data.draw(st.sets(st.integers(1, max(len(log.batches), 1)))), len(log.batches)})
    with tempfile.TemporaryDirectory() as folder:
        for built in copied(Path(folder), log, ends):
            assert verified(built).damages == []


@pytest.mark.parametrize("ends", [[1, 3, 6], [2, 4, 6], [6]])
@pytest.mark.parametrize("named", [COMPACTED_EPOCHS, None], ids=["the leader named", "no leader named"])
def test_an_epoch_may_begin_in_a_hole(
    tmp_path: Path, ends: list[int], named: tuple[LeaderEpochEntry, ...] | None
) -> None:
    for built in copied(tmp_path, compacted_log(), ends, named=named):
        assert verified(built).damages == []


@pytest.mark.parametrize(
    "epochs", [[(0, 0), (1, 2), (2, 7), (3, 10)], [(0, 0), (1, 2), (3, 10)], [(0, 0), (1, 2), (2, 4)], [(5, 0)]]
)
def test_the_metadata_names_no_epoch_outside_of_a_hole(tmp_path: Path, epochs: list[tuple[int, int]]) -> None:
    [built] = copied(tmp_path, compacted_log(), [6], named=COMPACTED_EPOCHS)
    wrong = tuple(LeaderEpochEntry(*each) for each in epochs)
    built = replace(built, indexes=replace(built.indexes, leader_epochs=wrong))
    assert [each.what for each in verified(built).damages] == ["the leader epochs do not match the log"]


def test_chunks_that_overlap_are_damage(tmp_path: Path) -> None:
    batches = [build_batch(0, [record(0), record(1)]), build_batch(1, [record(1), record(2)])]
    built = build_segment(tmp_path / "log", [batches[0], build_batch(2, [record(2), record(3)])], chunk_bytes=1)
    first, second = built.chunks
    crc = crc32c(batches[1], 0, len(batches[1]))
    overlapping = replace(second, first_offset=1, last_offset=2, crc32c=crc)
    index = encode_remote_log_index([first, overlapping])
    built = replace(built, end_offset=2, indexes=replace(built.indexes, remote_log_index=index))
    [damage] = verified(built, b"".join(batches)).damages
    assert (damage.first_offset, "overlaps the log at 2" in damage.what) == (1, True)
