"""An offload's tiles are adjacent. A plan covers the eligible records in order, and leaves a small young end alone."""

from __future__ import annotations

from dataclasses import replace
from uuid import UUID

from hypothesis import given
from hypothesis import strategies as st

from pipeline.offload.plan import Backlog, Wave, last_piece, part_of_tile, tile_ends
from pipeline.offload.task import Pace
from protocol.records.record_batch import iterate_batches
from tests.support.fakes.record_batches import batch_of
from tiers.model.ids import TopicIdPartition

TOPIC_ID = UUID(int=3)


def log_of(counts: list[tuple[int, int]]) -> bytes:
    """Batches of so many records, each behind a hole of so many offsets."""
    offset, batches = 0, []
    for hole, count in counts:
        batches.append(batch_of(offset + hole, count))
        offset += hole + count
    return b"".join(batches)


def tile(log: bytes, start: int, hi: int, read_batches: int) -> tuple[bytes, int]:
    """A tile as a task fills it: answers of a number of batches, from the one that has the asked offset on."""
    pieces, offset = [], start
    while True:
        batches = [one for one in iterate_batches(log) if one.last_offset >= offset][:read_batches]
        records = log[batches[0].start : batches[-1].end] if batches else b""
        piece, next_offset, is_whole = part_of_tile(records, hi)
        pieces.append(piece)
        offset = next_offset if piece else offset
        if not piece or is_whole:
            return b"".join(pieces), offset


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 20)), min_size=1, max_size=30),
    st.sets(st.integers(1, 400), max_size=12),
    st.integers(1, 7),
)
def test_tiles_join_to_the_log_wherever_they_are_cut(
    counts: list[tuple[int, int]], cuts: set[int], read_batches: int
) -> None:
    log = log_of(counts)
    end = [batch.next_offset for batch in iterate_batches(log)][-1]
    his = [*sorted(cut for cut in cuts if cut < end), end]
    joined, start = b"", 0
    for lo, hi in zip([0, *his], his, strict=False):
        content, start = tile(log, start, hi, read_batches)
        owned = [one for one in iterate_batches(log) if lo <= one.base_offset < hi]
        assert content == b"".join(log[one.start : one.end] for one in owned)  # by its cuts, not by who reads it how
        joined += content
    assert joined == log
    assert start == end


backlogs = st.builds(
    Backlog,
    partition=st.builds(TopicIdPartition, st.just(TOPIC_ID), st.integers(0, 1 << 20), st.just("orders")),
    first_offset=st.integers(0, 10_000),
    next_offset=st.integers(0, 20_000),
    bytes_per_offset=st.floats(0.01, 1e5),
    segment_bytes=st.integers(1, 10_000_000),
    min_bytes=st.integers(0, 10_000_000),
    takes_all=st.booleans(),
)


@given(backlogs, st.integers(0, 1 << 40))
def test_tiles_cover_what_is_eligible_from_its_beginning_on(backlog: Backlog, max_bytes: int) -> None:
    ends = tile_ends(backlog, max_bytes)
    assert ends == sorted(set(ends))
    assert all(backlog.first_offset < end <= backlog.next_offset for end in ends)
    sizes = [
        (end - start) * backlog.bytes_per_offset
        for start, end in zip([backlog.first_offset, *ends], ends, strict=False)
    ]
    assert all(size <= max(backlog.segment_bytes, backlog.bytes_per_offset) + 1 for size in sizes)
    assert sum(sizes[1:]) <= max_bytes + len(sizes)  # the first is taken whatever it is
    if backlog.takes_all and backlog.first_offset < backlog.next_offset:
        assert ends
        assert last_piece(backlog) is None
        assert tile_ends(backlog, 1 << 62)[-1] == backlog.next_offset
    piece = last_piece(backlog)
    if piece is not None:
        assert (backlog.next_offset - piece) * backlog.bytes_per_offset < backlog.min_bytes + 1


def test_a_few_offsets_of_next_to_no_bytes_have_their_turn_too() -> None:
    """A log that compaction made sparse."""
    sparse = Backlog(TopicIdPartition(TOPIC_ID, 0, "orders"), 1_000, 1_003, 0.1, 1_000, 0)
    assert Wave(4, 1_000).choose([sparse]) == [sparse]
    assert not Wave(4, 1_000).choose([replace(sparse, next_offset=1_000)])


@given(st.lists(backlogs, max_size=20, unique_by=lambda one: one.partition), st.integers(1, 9), st.integers(1, 1 << 40))
def test_a_wave_is_of_so_many_tasks_and_shares_its_bytes(waiting: list[Backlog], tasks: int, size_bytes: int) -> None:
    wave = Wave(tasks, size_bytes)
    chosen = wave.choose(waiting)
    sizes = sorted((one.size_bytes for one in waiting if one.size_bytes > 0), reverse=True)
    assert [one.size_bytes for one in chosen] == sizes[: len(chosen)]
    assert len(chosen) <= tasks
    assert chosen or not sizes
    shares = wave.share_bytes(chosen)
    assert sum(shares.values()) <= size_bytes
    assert all(shares[one.partition] <= one.size_bytes for one in chosen)
    if sum(one.size_bytes for one in chosen) <= size_bytes:
        assert all(shares[one.partition] == one.size_bytes for one in chosen)


@given(st.lists(st.tuples(st.integers(1, 1_000_000), st.integers(0, 5_000)), min_size=1, max_size=30))
def test_no_more_is_moved_than_the_pace_allows(moves: list[tuple[int, int]]) -> None:
    now_ms, moved_bytes = 0, 0
    pace = Pace(100_000, lambda: now_ms)
    for size_bytes, took_ms in moves:
        now_ms += int(pace.pause_ms() + 0.999)
        assert moved_bytes <= now_ms * 100 + 1
        pace.moved(size_bytes)
        moved_bytes += size_bytes
        now_ms += took_ms
    assert Pace(None, lambda: 0).pause_ms() == 0
