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
    legacy_message,
    record,
)
from tests.support.fakes.segments import build_segment
from tiers.errors import LogDivergedError
from tiers.model.segment_metadata import LeaderEpochEntry
from tiers.segment.leader_epochs import EpochHole, UnknownEpochStartError, clipped
from tiers.segment.segment_builder import Carried, SegmentBuilder, SegmentOverflowError

Epochs = list[tuple[int, int]]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "00000000000000000000.log"


def entries(pairs: Epochs) -> tuple[LeaderEpochEntry, ...]:
    return tuple(LeaderEpochEntry(*pair) for pair in pairs)


def test_chunks_are_whole_batches_within_the_limit(path: Path) -> None:
    batches = [batch_of(0, 1, value_bytes=300), batch_of(1, 1, value_bytes=300), batch_of(2, 1, value_bytes=5000)]
    batches += [batch_of(3 + i, 1, value_bytes=100, timestamp=1_600_000_000_000 - i) for i in range(8)]
    built = build_segment(path, [b"".join(batches[:2]), b"".join(batches[2:5]), *batches[5:]], chunk_bytes=1000)
    log = path.read_bytes()
    assert [(chunk.first_offset, chunk.last_offset) for chunk in built.chunks] == [(0, 1), (2, 2), (3, 7), (8, 10)]
    for chunk in built.chunks:
        content = log[chunk.stored_position : chunk.stored_position + chunk.stored_bytes]
        assert chunk.crc32c == google_crc32c.value(content)
    assert built.chunks[2].max_timestamp_ms == built.chunks[2].first_timestamp_ms == 1_600_000_000_000


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


def test_an_index_entry_takes_more_than_the_interval(path: Path) -> None:
    overhead = len(batch_of(0, 1, value_bytes=1000)) - 1000
    exact = batch_of(0, 1, value_bytes=4096 - overhead)
    built = build_segment(path, [exact, batch_of(1, 1), batch_of(2, 1)])
    assert offset_index_entries(0, built.indexes.offset_index) == [(2, 4096 + len(batch_of(1, 1)))]


TORN_MARKER = build_batch(11, [record(11, key=b"\x00", value=None)], producer_id=9, transactional=True, control=True)


@pytest.mark.parametrize(
    "refused",
    [batch_of(9, 2), batch_of(10, 2) + batch_of(11, 2), batch_of(10, 2)[:-1], batch_of(10, 1) + TORN_MARKER],
    ids=["overlaps the last append", "overlap each other", "cut short", "a marker that cannot be read"],
)
def test_corrupt_batches_change_nothing(path: Path, refused: bytes) -> None:
    builder = SegmentBuilder(path, 0)
    builder.append(b"", ())
    assert (builder.size_bytes, builder.end_offset) == (0, -1)
    builder.append(batch_of(0, 10), ())
    with pytest.raises(CorruptBatchError):
        builder.append(refused, ())
    builder.append(batch_of(10, 1), ())
    assert (builder.finish().end_offset, path.read_bytes()) == (10, batch_of(0, 10) + batch_of(10, 1))


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


def test_a_falling_leader_epoch_is_divergence(path: Path) -> None:
    builder = SegmentBuilder(path, 100, Carried((LeaderEpochEntry(4, 0),)))
    with pytest.raises(LogDivergedError, match="leader epoch 3 at offset 100 after 4"):
        builder.append(batch_of(100, 1, leader_epoch=3), ())
    with pytest.raises(LogDivergedError, match="leader epoch 5 at offset 101 after 6"):
        builder.append(batch_of(100, 1, leader_epoch=6) + batch_of(101, 1, leader_epoch=5), ())
    assert (builder.size_bytes, builder.leader_epoch) == (0, 4)
    builder.discard()


def at(offset: int, leader_epoch: int) -> bytes:
    """A batch of ten records."""
    return batch_of(offset, 10, leader_epoch=leader_epoch)


@pytest.mark.parametrize(
    ("base", "earlier", "batches", "named", "known"),
    [
        (100, [(0, 0), (2, 50)], [at(100, 2), at(110, 5), at(120, 7)], None, [(0, 0), (2, 50), (5, 110), (7, 120)]),
        (100, [], [at(95, 3)], None, [(3, 95)]),
        (10, [(3, 0)], [at(200, 5)], None, [(3, 0), (5, 200)]),
        (10, [(3, 0)], [at(200, 5)], [(4, 120), (5, 150)], [(3, 0), (4, 120), (5, 150)]),
        (0, [], [legacy_message(1, 5, 0, None, b"five"), at(20, 0)], [], [(0, 0)]),
    ],
    ids=[
        "no hole",
        "a batch over the start",
        "a hole",
        "epochs in a hole",
        "epoch 0 and message sets are not asked for",
    ],
)
def test_leader_epochs_are_cumulative_and_clipped_to_the_segment(
    path: Path, base: int, earlier: Epochs, batches: list[bytes], named: Epochs | None, known: Epochs
) -> None:
    builder = SegmentBuilder(path, base, Carried(entries(earlier)))
    for batch in batches:
        builder.append(batch, (), None if named is None else entries(named))
    built = builder.finish()
    assert built.leader_epochs == built.indexes.leader_epochs == entries(known)
    assert built.segment_leader_epochs == clipped(entries(known), base)


def test_an_epoch_that_may_begin_in_a_hole_is_asked_for_first(path: Path) -> None:
    builder = SegmentBuilder(path, 10, Carried((LeaderEpochEntry(3, 0),)))
    records = batch_of(10, 5, leader_epoch=4) + batch_of(200, 1, leader_epoch=4) + batch_of(300, 1, leader_epoch=6)
    for named in ((), (LeaderEpochEntry(4, 10),)):
        with pytest.raises(UnknownEpochStartError) as raised:
            builder.append(records, (), named)
        assert raised.value.hole == EpochHole(4, 201, 6, 300)
        assert (builder.size_bytes, builder.next_offset, builder.leader_epoch) == (0, 10, 3)
    builder.append(records, (), entries([(5, 220), (6, 250)]))
    assert builder.finish().segment_leader_epochs == entries([(4, 10), (5, 220), (6, 250)])
    assert path.read_bytes() == records


@pytest.mark.parametrize(
    ("base", "batches", "found"),
    [
        (100, [batch_of(95, 10)], (100, 104, 0)),
        (0, [batch_of(5, 5) + batch_of(12, 1), build_batch(20, [], last_offset=24)], (0, 24, 5 + 2 + 7)),
    ],
    ids=["a first batch that straddles the start", "holes"],
)
def test_start_end_and_missing_offsets(
    path: Path, base: int, batches: list[bytes], found: tuple[int, int, int]
) -> None:
    built = build_segment(path, batches, base_offset=base)
    assert (built.start_offset, built.end_offset, built.missing_offsets) == found
    assert built.chunks[0].first_offset == (95 if base else 5)


def test_a_size_beyond_int32_is_refused_before_it_is_written(path: Path) -> None:
    builder = SegmentBuilder(path, 0)
    builder.append(batch_of(0, 1), ())
    near, far = batch_of(1, 1), batch_of(2**31, 1, leader_epoch=1)
    with pytest.raises(SegmentOverflowError) as raised:
        builder.append(near + far, (), ())
    assert (raised.value.fits_bytes, raised.value.next_offset, builder.next_offset) == (len(near), 2, 1)
    builder.append(near, ())
    with pytest.raises(SegmentOverflowError) as raised:
        builder.append(far, (), ())
    assert (raised.value.fits_bytes, raised.value.next_offset) == (0, 2)
    builder.append(batch_of(2**31 - 1, 1), ())
    assert builder.finish().size_bytes == len(path.read_bytes())


def test_a_segment_may_begin_with_a_hole_of_any_size(path: Path) -> None:
    far = 2**40
    batches = [batch_of(far + 10 * n, 10, value_bytes=4096, timestamp=1000 + n) for n in range(5)]
    built = build_segment(path, batches, base_offset=7)
    assert (built.start_offset, built.end_offset, built.missing_offsets) == (7, far + 49, far - 7)
    ends = [far + 10 * n + 9 for n in range(1, 5)]
    offsets = offset_index_entries(far + 9, built.indexes.offset_index)
    assert offsets == [(end, len(batches[0]) * n) for n, end in enumerate(ends, 1)]
    times = time_index_entries(far + 9, built.indexes.time_index)
    assert times == [(1009 + n, end) for n, end in enumerate(ends, 1)]
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
