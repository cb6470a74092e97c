"""Indexes are made again of the log: of a lost object, of merged segments, and by a verification."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from protocol.records.record_batch import crc32c
from tests.support.fakes.in_memory_log import Aborted
from tests.support.fakes.record_batches import build_batch, control_batch, legacy_message, legacy_wrapper, record
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.tiers.transactional_log import ACTS, COMPACTED_EPOCHS, compacted_log, copied, indexes_of, log_of
from tests.support.written_log import WrittenLog
from tiers.errors import CorruptSegmentError
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.indexes.segment_index import AbortedTransactionRange, encode_remote_log_index
from tiers.segment.indexes_made_again import LogIndexer, why_not_continued, with_merged_indexes
from tiers.segment.leader_epochs import UnknownEpochStartError
from tiers.segment.segment_builder import BuiltSegment, Carried, SegmentBuilder
from tiers.segment.transactions import MARKER_NOT_COPIED, decode_transaction_index
from tiers.verify.segment_verification import SegmentVerification

Epochs = tuple[LeaderEpochEntry, ...]


def new_path(folder: Path) -> Path:
    return folder / f"again-{len(list(folder.iterdir()))}"


def made_again(
    folder: Path, lost: BuiltSegment, before: BuiltSegment | None, after: BuiltSegment | None
) -> BuiltSegment:
    carried = Carried() if before is None else Carried.behind(indexes_of(before).indexes)
    indexer = LogIndexer(new_path(folder), metadata_of(lost), carried, None if after is None else indexes_of(after))
    try:
        indexer.append(lost.log_segment.read_bytes())
        return indexer.finish()
    finally:
        indexer.discard()


def merged(folder: Path, parts: list[BuiltSegment]) -> BuiltSegment:
    stored = [indexes_of(each) for each in parts]
    for earlier, later in pairwise(stored):
        assert why_not_continued(earlier, later) is None
    builder = SegmentBuilder(new_path(folder), parts[0].start_offset, Carried(stored[0].epochs_before()), 200)
    for part in parts:
        builder.append(part.log_segment.read_bytes(), (), stored[-1].indexes.leader_epochs)
    return with_merged_indexes(builder.finish(), stored)


def verified(built: BuiltSegment, log: bytes | None = None) -> SegmentVerification:
    metadata = metadata_of(built)
    verification = SegmentVerification(metadata, built.log_segment_data(metadata).indexes, None)
    data = memoryview(built.log_segment.read_bytes() if log is None else log)
    for run in verification.runs(5000):
        verification.add(run, data[run.start_position : run.end_position + 1])
    verification.finish()
    return verification


def damages_of(built: BuiltSegment) -> list[str]:
    return [each.what for each in verified(built).damages]


def check_transactions(log: WrittenLog, built: BuiltSegment) -> None:
    """Compares the aborted transactions with those of the log. Transactions that are open at its end abort later."""
    still_open = [Aborted(*each, MARKER_NOT_COPIED) for each in log.open_transactions().items()]
    aborted = [*log.aborted(), *still_open]
    start, end = built.start_offset, built.end_offset
    assert [*built.indexes.aborted_transactions] == [
        AbortedTransactionRange(one.producer_id, one.first_offset, one.marker_offset if ends else MARKER_NOT_COPIED)
        for one in sorted(aborted, key=lambda one: one.first_offset)
        if one.first_offset <= end and one.marker_offset >= start
        for ends in [one.marker_offset <= end]
    ]
    found = decode_transaction_index(built.indexes.transaction_index)
    for entry in found:
        before = WrittenLog()
        before.batches = [batch for batch in log.batches if batch.last_offset <= entry.last_offset]
        assert entry.last_stable_offset == before.last_stable_offset
    ended = sorted((one for one in aborted if start <= one.marker_offset <= end), key=lambda one: one.marker_offset)
    assert [entry[:3] for entry in found] == [(one.producer_id, one.first_offset, one.marker_offset) for one in ended]


@settings(max_examples=30)
@given(ACTS, st.data())
def test_they_are_those_of_the_copies(acts: list[tuple[int, str]], data: st.DataObject) -> None:
    log = log_of(acts)
    count = len(log.batches)
    ends = sorted({*data.draw(st.sets(st.integers(1, max(count, 1)))), count})
    base = data.draw(st.sampled_from((0, min(2, count))))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        whole_chunks = copied(folder, log, ends, chunk_bytes=1 << 20)
        for each in whole_chunks:
            check_transactions(log, each)
        for number, lost in enumerate(whole_chunks[:-1]):
            before = whole_chunks[number - 1] if number else None
            assert made_again(folder, lost, before, whole_chunks[number + 1]).indexes == lost.indexes
        parts = copied(folder, log, ends, base)
        if not parts:
            return
        first = data.draw(st.integers(0, len(parts) - 1))
        last = data.draw(st.integers(first, len(parts) - 1))
        starts = [batch.base_offset for batch in log.batches]
        cuts = [starts.index(each.start_offset) for each in parts[1:]] + [count]
        whole = copied(folder, log, [*cuts[:first], *cuts[last:]], base)[first]
        found = merged(folder, parts[first : last + 1])
        assert found.log_segment.read_bytes() == whole.log_segment.read_bytes()
        assert (found.indexes, found.max_timestamp_ms) == (whole.indexes, whole.max_timestamp_ms)
        for built in (*parts, found):
            assert damages_of(built) == []


@pytest.mark.parametrize("ends", [[1, 3, 6], [2, 4, 6], [1, 2, 3, 4, 5, 6], [6]])
@pytest.mark.parametrize("named", [COMPACTED_EPOCHS, None], ids=["the leader named", "no leader named"])
def test_epochs_that_begin_in_a_hole_begin_there_again(tmp_path: Path, ends: list[int], named: Epochs | None) -> None:
    segments = copied(tmp_path, compacted_log(), ends, chunk_bytes=1 << 20, named=named)
    for before, lost in pairwise([None, *segments]):
        assert lost is not None
        assert made_again(tmp_path, lost, before, None).indexes == lost.indexes
        assert damages_of(lost) == []


def test_an_aborted_transaction_without_its_first_records_is_listed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader and the neighbouring segments name it by its first record, which the cleaner has removed."""
    log = log_of([(1, "plain"), (2, "data"), (1, "plain"), (2, "data"), (1, "plain"), (2, "abort")])
    whole = WrittenLog()
    whole.batches = list(log.batches)
    monkeypatch.setattr(log, "reports", whole.reports)
    del log.batches[1]
    before, lost, after = copied(tmp_path, log, [2, 3, 5])
    assert [one.first_offset for one in lost.indexes.aborted_transactions] == [2]
    assert made_again(tmp_path, lost, before, after).indexes == lost.indexes
    assert damages_of(lost) == []


def test_no_more_is_claimed_than_log_and_neighbours_tell(tmp_path: Path) -> None:
    first, second = copied(tmp_path, log_of([(1, "data"), (1, "plain"), (1, "plain"), (1, "abort")]), [2, 4])
    with pytest.raises(CorruptSegmentError, match="is open at its end"):
        made_again(tmp_path, first, None, None)
    assert made_again(tmp_path, second, first, None).indexes.aborted_transactions[0].last_offset == 6
    found = made_again(tmp_path, second, None, None).indexes
    assert (found.history_from, found.offset_index) == (4, second.indexes.offset_index)
    assert found.aborted_transactions == ()
    with pytest.raises(CorruptSegmentError, match="the log is not the segment's"):
        made_again(tmp_path, replace(first, log_segment=second.log_segment, start_offset=4), None, second)


TWO_EPOCHS = [(1, "data"), (1, "plain"), (1, "elected"), (1, "plain"), (1, "abort"), (1, "plain")]


def test_only_parts_that_know_the_same_are_merged(tmp_path: Path) -> None:
    parts = copied(tmp_path, log_of(TWO_EPOCHS), [2, 5])
    earlier, later = stored = [*map(indexes_of, parts)]
    forgot = replace(later, indexes=replace(later.indexes, history_from=4))
    epochs = replace(later, indexes=replace(later.indexes, leader_epochs=(LeaderEpochEntry(1, 4),)))
    for first, second, why in (
        (later, earlier, "offsets from 9 on are missing or occur twice"),
        (earlier, forgot, "the segment at 4 does not know the transactions before it"),
        (earlier, epochs, "the segment at 4 does not know the leader epochs before it"),
    ):
        assert why_not_continued(first, second) == why
    with pytest.raises(CorruptSegmentError, match="the segments have offsets 0 to 8"):
        with_merged_indexes(parts[0], stored)
    strange = replace(parts[0], indexes=replace(parts[0].indexes, leader_epochs=(LeaderEpochEntry(7, 0),)))
    with pytest.raises(CorruptSegmentError, match="leader epochs"):
        with_merged_indexes(strange, stored[:1])


@pytest.mark.parametrize(
    "epochs", [[(0, 0), (1, 2), (2, 7), (3, 10)], [(0, 0), (1, 2), (3, 10)], [(0, 0), (1, 2), (2, 4)], [(5, 0)]]
)
def test_a_record_with_epochs_that_the_log_has_not_is_found(tmp_path: Path, epochs: list[tuple[int, int]]) -> None:
    before, built = copied(tmp_path, compacted_log(), [1, 6], named=COMPACTED_EPOCHS)
    wrong = tuple(LeaderEpochEntry(*each) for each in epochs)
    other = replace(built, indexes=replace(built.indexes, leader_epochs=wrong))
    assert damages_of(other) == ["the leader epochs do not match the log"]
    if epochs[-1] == (2, 4):
        with pytest.raises(UnknownEpochStartError):
            made_again(tmp_path, other, before, None)


KINDS = ("plain", "empty", "transactional", "commit", "abort", "message", "wrapper", "append time")
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


@settings(max_examples=60)
@given(
    steps=st.lists(STEP, min_size=1, max_size=15),
    base=st.integers(0, 3),
    chunk_bytes=st.sampled_from([1, 3000, 1 << 20]),
    reported=st.booleans(),
)
def test_a_verification_finds_no_fault_and_counts_what_a_log_has(
    steps: list[tuple[str, int, int, int, int, int]], base: int, chunk_bytes: int, reported: bool
) -> None:
    offset, epoch, appends, records = base, 0, [], 0
    # Brokers wrote legacy messages before they wrote batches, never after.
    steps = sorted(steps, key=lambda step: step[0] not in ("message", "wrapper"))
    for kind, gap, bump, producer, count, timestamp in steps:
        # The header of a wrapper does not have its first offset: it continues the log.
        offset += gap if kind != "wrapper" else 0
        epoch += bump
        appends.append(batch_at(offset, epoch, kind, producer, count, timestamp))
        records += {"empty": 0, "commit": 0, "abort": 0, "wrapper": 1, "message": 1}.get(kind, count)
        offset += 1 if kind in ("commit", "abort", "message") else count
    aborted = [AbortedTransaction(1, base)] if reported else []
    with tempfile.TemporaryDirectory() as folder:
        built = build_segment(Path(folder) / "log", appends, base, aborted, chunk_bytes)
        found = verified(built)
    assert found.damages == []
    assert (found.batches, found.records) == (len(appends), records)
    assert found.missing_offsets == built.missing_offsets


def test_chunks_that_overlap_are_damage(tmp_path: Path) -> None:
    batches = [build_batch(0, [record(0), record(1)]), build_batch(1, [record(1), record(2)])]
    built = build_segment(tmp_path / "log", [batches[0], build_batch(2, [record(2), record(3)])], chunk_bytes=1)
    first, second = built.chunks
    crc = crc32c(batches[1], 0, len(batches[1]))
    index = encode_remote_log_index([first, replace(second, first_offset=1, last_offset=2, crc32c=crc)])
    built = replace(built, end_offset=2, indexes=replace(built.indexes, remote_log_index=index))
    [damage] = verified(built, b"".join(batches)).damages
    assert (damage.first_offset, "overlaps the log at 2" in damage.what) == (1, True)
