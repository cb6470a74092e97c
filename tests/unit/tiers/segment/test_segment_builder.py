from __future__ import annotations

import errno
import os
from pathlib import Path

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from protocol.errors import CorruptBatchError
from protocol.records.record_batch import iterate_batches
from tests.support.fakes.kafka_indexes import offset_index_entries, time_index_entries
from tests.support.fakes.record_batches import (
    batch_of,
    build_batch,
    control_batch,
    legacy_message,
    legacy_wrapper,
    record,
)
from tests.support.fakes.segments import build_segment, metadata_of
from tiers.errors import LogDivergedError
from tiers.model.log_source import AbortedTransaction
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.indexes.indexes_object import decode_indexes_object
from tiers.segment.indexes.producer_snapshot import encode_producer_snapshot
from tiers.segment.indexes.segment_index import AbortedTransactionRange
from tiers.segment.indexes.transaction_index import MARKER_NOT_COPIED, decode_transaction_index
from tiers.segment.leader_epochs import EpochHole, UnknownEpochStartError
from tiers.segment.segment_builder import SegmentBuilder, SegmentOverflowError


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "00000000000000000000.log"


def test_the_log_is_the_batches_byte_for_byte(path: Path) -> None:
    first, second = batch_of(0, 10) + batch_of(10, 5), batch_of(15, 1)
    built = build_segment(path, [first, second])
    assert path.read_bytes() == first + second
    assert (built.start_offset, built.end_offset, built.size_bytes) == (0, 15, len(first + second))
    assert built.max_timestamp_ms == 1_600_000_000_009
    assert built.txn_index_empty
    assert built.missing_offsets == 0


def test_fullness_is_the_callers_to_judge(path: Path) -> None:
    builder = SegmentBuilder(path, 0)
    builder.append(b"", ())
    assert (builder.size_bytes, builder.end_offset) == (0, -1)
    builder.append(batch_of(0, 2), ())
    builder.append(batch_of(2, 2), ())
    assert builder.next_offset == 4
    assert builder.size_bytes == builder.finish().log_segment.stat().st_size
    builder.discard()


def test_chunks_are_whole_batches_within_the_limit(path: Path) -> None:
    batches = [batch_of(0, 1, value_bytes=300), batch_of(1, 1, value_bytes=300), batch_of(2, 1, value_bytes=5000)]
    batches += [batch_of(3 + i, 1, value_bytes=100, timestamp=1_600_000_000_000 - i) for i in range(8)]
    built = build_segment(path, [b"".join(batches[:2]), b"".join(batches[2:5]), *batches[5:]], chunk_bytes=1000)
    log = path.read_bytes()
    assert [(chunk.first_offset, chunk.last_offset) for chunk in built.chunks] == [(0, 1), (2, 2), (3, 7), (8, 10)]
    for chunk in built.chunks:
        content = log[chunk.stored_position : chunk.stored_position + chunk.stored_bytes]
        inside = list(iterate_batches(content))
        assert (inside[0].base_offset, inside[-1].last_offset) == (chunk.first_offset, chunk.last_offset)
        assert chunk.max_timestamp_ms == max(batch.max_timestamp for batch in inside)
        assert chunk.crc32c == google_crc32c.value(content)
        assert len(content) <= 1000 or len(inside) == 1
    assert built.chunks[2].max_timestamp_ms == 1_600_000_000_000
    assert built.chunks[2].first_timestamp_ms == 1_600_000_000_000


@given(
    st.lists(
        st.tuples(st.integers(1, 4), st.integers(1, 3000), st.integers(-3, 3), st.booleans()), min_size=1, max_size=30
    )
)
def test_indexes_are_as_kafka_writes_them(
    tmp_path_factory: pytest.TempPathFactory, shapes: list[tuple[int, int, int, bool]]
) -> None:
    """Against the rules as LogSegment.append spells them, whatever the borders of the appends."""
    path = tmp_path_factory.mktemp("segment") / "log"
    builder = SegmentBuilder(path, 100, chunk_bytes=5000)
    offset, timestamp, pending = 100, 1_600_000_000_000, b""
    for count, value_bytes, step, ends_append in shapes:
        timestamp += step
        pending += batch_of(offset, count, value_bytes=value_bytes, timestamp=timestamp)
        offset += count
        if ends_append:
            builder.append(pending, ())
            pending = b""
    builder.append(pending, ())
    built = builder.finish()

    offsets: list[tuple[int, int]] = []
    times: list[tuple[int, int]] = []
    position, since_last, highest, highest_at = 0, 0, -1, 100
    for batch in iterate_batches(path.read_bytes()):
        if batch.max_timestamp > highest:
            highest, highest_at = batch.max_timestamp, batch.last_offset
        if since_last > 4096:
            offsets.append((batch.last_offset, position))
            if not times or highest > times[-1][0]:
                times.append((highest, highest_at))
            since_last = 0
        position += batch.size_bytes
        since_last += batch.size_bytes
    if not times or highest > times[-1][0]:
        times.append((highest, highest_at))
    assert offset_index_entries(100, built.indexes.offset_index) == offsets
    assert time_index_entries(100, built.indexes.time_index) == times
    log = path.read_bytes()
    for chunk in built.chunks:
        content = log[chunk.stored_position : chunk.stored_position + chunk.stored_bytes]
        assert chunk.crc32c == google_crc32c.value(content)


def test_an_index_entry_takes_more_than_the_interval(path: Path) -> None:
    overhead = len(batch_of(0, 1, value_bytes=1000)) - 1000
    exact = batch_of(0, 1, value_bytes=4096 - overhead)
    assert len(exact) == 4096
    built = build_segment(path, [exact, batch_of(1, 1), batch_of(2, 1)])
    assert offset_index_entries(0, built.indexes.offset_index) == [(2, 4096 + len(batch_of(1, 1)))]


def test_batches_that_overlap_or_are_cut_short_change_nothing(path: Path) -> None:
    builder = SegmentBuilder(path, 0)
    builder.append(batch_of(0, 10), ())
    for refused in (batch_of(9, 2), batch_of(10, 2) + batch_of(11, 2), batch_of(10, 2)[:-1], b"\x00" * 5):
        with pytest.raises(CorruptBatchError):
            builder.append(refused, ())
    builder.append(batch_of(10, 1), ())
    assert builder.finish().end_offset == 10
    assert path.read_bytes() == batch_of(0, 10) + batch_of(10, 1)


@pytest.mark.parametrize("is_retried", [True, False])
def test_a_full_disk_changes_nothing(path: Path, monkeypatch: pytest.MonkeyPatch, *, is_retried: bool) -> None:
    write, first, second = os.pwrite, batch_of(0, 10), batch_of(10, 10)

    def write_a_part(file: int, data: memoryview, position: int) -> int:
        if len(data) < len(second):
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, data[:20], position)

    builder = SegmentBuilder(path, 0)
    builder.append(first, ())
    with monkeypatch.context() as patched:
        patched.setattr(os, "pwrite", write_a_part)
        with pytest.raises(OSError, match="No space left"):
            builder.append(second, ())
    if is_retried:
        builder.append(second, ())
    built = builder.finish()
    assert path.read_bytes() == (first + second if is_retried else first)
    assert (built.end_offset, built.size_bytes) == (19 if is_retried else 9, path.stat().st_size)


def test_a_marker_that_cannot_be_read_changes_nothing(path: Path) -> None:
    builder = SegmentBuilder(path, 0)
    torn = build_batch(1, [record(1, key=b"\x00", value=None)], producer_id=9, transactional=True, control=True)
    with pytest.raises(CorruptBatchError):
        builder.append(batch_of(0, 1) + torn, ())
    builder.append(batch_of(0, 1), ())
    assert builder.finish().size_bytes == path.stat().st_size == len(batch_of(0, 1))


def test_the_state_of_producers_is_handed_on(path: Path) -> None:
    def data(offset: int, producer_id: int) -> bytes:
        return build_batch(offset, [record(offset)], producer_id=producer_id, producer_epoch=0, transactional=True)

    first = SegmentBuilder(path, 0)
    first.append(data(0, 8) + data(1, 9), ())
    built = first.finish()
    assert [(one.producer_id, one.current_txn_first_offset) for one in built.producers] == [(8, 0), (9, 1)]
    assert built.indexes.producer_snapshot == encode_producer_snapshot(built.producers)

    second = SegmentBuilder(path.with_name("second"), 2, producers=built.producers)
    second.append(control_batch(2, commit=True, producer_id=8, producer_epoch=1) + data(3, 9), ())
    assert [one[:4] + one[6:] for one in second.finish().producers] == [(8, 1, -1, -1, 7, -1), (9, 0, -1, 3, -1, 1)]


def test_a_falling_leader_epoch_is_divergence(path: Path) -> None:
    builder = SegmentBuilder(path, 100, leader_epochs=(LeaderEpochEntry(4, 0),))
    with pytest.raises(LogDivergedError, match="leader epoch 3 at offset 100 after 4"):
        builder.append(batch_of(100, 1, leader_epoch=3), ())
    with pytest.raises(LogDivergedError, match="leader epoch 5 at offset 101 after 6"):
        builder.append(batch_of(100, 1, leader_epoch=6) + batch_of(101, 1, leader_epoch=5), ())
    assert builder.size_bytes == 0
    assert builder.leader_epoch == 4
    builder.discard()


def test_leader_epochs_are_cumulative_and_clipped_to_the_segment(path: Path) -> None:
    earlier = (LeaderEpochEntry(0, 0), LeaderEpochEntry(2, 50))
    builder = SegmentBuilder(path, 100, leader_epochs=earlier)
    for offset, epoch in ((100, 2), (101, 2), (102, 5), (103, 7)):
        builder.append(batch_of(offset, 1, leader_epoch=epoch), ())
    built = builder.finish()
    later = (LeaderEpochEntry(5, 102), LeaderEpochEntry(7, 103))
    assert built.segment_leader_epochs == (LeaderEpochEntry(2, 100), *later)
    assert built.leader_epochs == built.indexes.leader_epochs == (*earlier, *later)


def test_a_first_batch_that_straddles_the_start_is_kept_whole(path: Path) -> None:
    built = build_segment(path, [batch_of(95, 10, leader_epoch=3)], base_offset=100)
    assert (built.start_offset, built.end_offset, built.missing_offsets) == (100, 104, 0)
    assert built.chunks[0].first_offset == 95
    assert built.segment_leader_epochs == (LeaderEpochEntry(3, 100),)
    assert built.leader_epochs == (LeaderEpochEntry(3, 95),)


def test_holes_of_the_log_are_counted_and_covered(path: Path) -> None:
    emptied = build_batch(20, [], last_offset=24)
    built = build_segment(path, [batch_of(5, 5) + batch_of(12, 1), emptied], base_offset=0)
    assert (built.start_offset, built.end_offset, built.missing_offsets) == (0, 24, 5 + 2 + 7)
    assert built.segment_leader_epochs == (LeaderEpochEntry(0, 0),)


def test_an_epoch_that_may_begin_in_a_hole_is_asked_for_first(path: Path) -> None:
    builder = SegmentBuilder(path, 10, leader_epochs=(LeaderEpochEntry(3, 0),))
    records = batch_of(10, 5, leader_epoch=4) + batch_of(200, 1, leader_epoch=4) + batch_of(300, 1, leader_epoch=6)
    for named in ((), (LeaderEpochEntry(4, 10),)):
        with pytest.raises(UnknownEpochStartError) as raised:
            builder.append(records, (), named)
        assert raised.value.hole == EpochHole(4, 201, 6, 300)
        assert (builder.size_bytes, builder.next_offset, builder.leader_epoch) == (0, 10, 3)
    builder.append(records, (), (LeaderEpochEntry(5, 220), LeaderEpochEntry(6, 250)))
    built = builder.finish()
    begun = tuple(LeaderEpochEntry(*each) for each in ((4, 10), (5, 220), (6, 250)))
    assert built.segment_leader_epochs == begun
    assert built.leader_epochs == built.indexes.leader_epochs == (LeaderEpochEntry(3, 0), *begun)
    assert path.read_bytes() == records


def test_a_hole_at_the_start_of_a_segment_may_have_its_own_epochs(path: Path) -> None:
    builder = SegmentBuilder(path, 10, leader_epochs=(LeaderEpochEntry(3, 0),))
    builder.append(batch_of(200, 1, leader_epoch=5), (), (LeaderEpochEntry(4, 120), LeaderEpochEntry(5, 150)))
    built = builder.finish()
    assert built.segment_leader_epochs == tuple(LeaderEpochEntry(*each) for each in ((3, 10), (4, 120), (5, 150)))


def test_epoch_0_and_message_sets_are_not_asked_for(path: Path) -> None:
    builder = SegmentBuilder(path, 0)
    builder.append(legacy_message(1, 5, 0, None, b"five") + batch_of(20, 1), (), ())
    assert builder.finish().segment_leader_epochs == (LeaderEpochEntry(0, 0),)


def test_a_caller_that_cannot_know_lets_an_epoch_begin_at_its_first_record(path: Path) -> None:
    builder = SegmentBuilder(path, 10, leader_epochs=(LeaderEpochEntry(3, 0),))
    builder.append(batch_of(200, 1, leader_epoch=5), ())
    assert builder.finish().segment_leader_epochs == (LeaderEpochEntry(3, 10), LeaderEpochEntry(5, 200))


def test_message_sets_of_old_brokers(path: Path) -> None:
    legacy = legacy_message(0, 0, 0, None, b"zero") + legacy_message(1, 1, 1_500_000_000_000, None, b"one")
    wrapper = legacy_wrapper(1, 2, [record(o, 1_500_000_000_001) for o in (2, 3, 4)], codec=1)
    built = build_segment(path, [legacy + wrapper, batch_of(5, 1, leader_epoch=2)], chunk_bytes=1)
    assert [(chunk.first_offset, chunk.last_offset) for chunk in built.chunks] == [(0, 0), (1, 1), (2, 4), (5, 5)]
    assert built.segment_leader_epochs == (LeaderEpochEntry(0, 0), LeaderEpochEntry(2, 5))
    assert built.missing_offsets == 0


def test_log_append_time_is_every_records_timestamp(path: Path) -> None:
    batch = build_batch(0, [record(0, 1000), record(1, 2000)], log_append_time_ms=9000)
    (chunk,) = build_segment(path, [batch]).chunks
    assert (chunk.first_timestamp_ms, chunk.max_timestamp_ms) == (9000, 9000)


def test_a_size_beyond_int32_is_refused_before_it_is_written(path: Path) -> None:
    builder = SegmentBuilder(path, 0)
    builder.append(batch_of(0, 1), ())
    near, far = batch_of(1, 1), batch_of(2**31, 1, leader_epoch=1)
    with pytest.raises(SegmentOverflowError) as raised:
        builder.append(near + far, (), ())
    assert (raised.value.fits_bytes, raised.value.next_offset) == (len(near), 2)
    assert builder.next_offset == 1
    builder.append(near, ())
    with pytest.raises(SegmentOverflowError) as raised:
        builder.append(far, (), ())
    assert (raised.value.fits_bytes, raised.value.next_offset) == (0, 2)
    builder.append(batch_of(2**31 - 1, 1), ())
    assert builder.finish().size_bytes == len(path.read_bytes())


def test_a_segment_may_begin_with_a_hole_of_any_size(path: Path) -> None:
    far, big = 2**40, 4096
    batches = [batch_of(far + 10 * number, 10, value_bytes=big, timestamp=1000 + number) for number in range(5)]
    built = build_segment(path, batches, base_offset=7)
    assert (built.start_offset, built.end_offset, built.missing_offsets) == (7, far + 49, far - 7)
    base, positions = far + 9, [len(batches[0]) * number for number in range(5)]
    offsets = offset_index_entries(base, built.indexes.offset_index)
    assert offsets == [(far + 10 * number + 9, positions[number]) for number in range(1, 5)]
    times = time_index_entries(base, built.indexes.time_index)
    assert times == [(1009 + number, far + 10 * number + 9) for number in range(1, 5)]
    builder = SegmentBuilder(path.with_name("second"), 7)
    builder.append(batches[0], ())
    with pytest.raises(SegmentOverflowError):
        builder.append(batch_of(far + 9 + 2**31, 1), ())
    builder.append(batch_of(far + 8 + 2**31, 1), ())
    assert builder.finish().end_offset == far + 8 + 2**31


def test_an_empty_segment_and_a_used_spool_file_are_refused(path: Path) -> None:
    builder = SegmentBuilder(path, 0)
    with pytest.raises(ValueError, match="empty"):
        builder.finish()
    with pytest.raises(FileExistsError):
        SegmentBuilder(path, 0)
    builder.discard()


def test_an_aborted_transaction_over_two_segments(tmp_path: Path) -> None:
    def data(first: int, last: int) -> bytes:
        records = [record(offset) for offset in range(first, last + 1)]
        return build_batch(first, records, producer_id=9, transactional=True)

    aborted = [AbortedTransaction(9, 5)]
    builder = SegmentBuilder(tmp_path / "first", 0)
    builder.append(batch_of(0, 5) + data(5, 9), aborted)
    first = builder.finish()
    builder = SegmentBuilder(
        tmp_path / "second",
        10,
        leader_epochs=first.leader_epochs,
        open_transactions=first.open_transactions,
    )
    builder.append(data(10, 12) + control_batch(13, commit=False, producer_id=9), aborted)
    builder.append(build_batch(14, [record(14)], producer_id=9, transactional=True), ())
    second = builder.finish()

    assert first.indexes.aborted_transactions == (AbortedTransactionRange(9, 5, MARKER_NOT_COPIED),)
    assert first.indexes.transaction_index == b""
    assert not first.txn_index_empty
    assert second.indexes.aborted_transactions == (AbortedTransactionRange(9, 5, 13),)
    assert decode_transaction_index(second.indexes.transaction_index) == [(9, 5, 13, 14)]
    index = decode_indexes_object(second.log_segment_data(metadata_of(second)).indexes).remote_log_index()
    assert index.aborted_transactions(14, 14) == []
    assert index.aborted_transactions(10, 14) == [AbortedTransactionRange(9, 5, 13)]
