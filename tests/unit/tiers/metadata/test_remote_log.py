"""`RemoteLog` compared with sets of offsets, and its attempts and trims by examples."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import count
from typing import NamedTuple
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.fakes.in_memory_rlmm import InMemoryRemoteLogMetadataManager as Metadata
from tests.support.fakes.log_starts import user_log_start
from tests.support.tiers.segment_metadata import copied, segment
from tiers.metadata.remote_log import RemoteLog, is_measured
from tiers.model.copy_plan import CopyPlan
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata

PARTITION = TopicIdPartition(UUID(int=1), 0, "orders")
MINUTE_MS = 60_000
LAST = 34


class Made(NamedTuple):
    log: RemoteLog
    epochs: dict[int, int]
    """The leader epoch of each readable offset."""
    gaps: set[int]
    log_start: int


@st.composite
def logs(draw: st.DrawFn) -> Made:
    """Segments, gaps and holes follow each other. A gap may be recorded in pieces."""
    metadata, epochs, gaps, epoch, offset = Metadata(lambda: 0, lambda: 0), dict[int, int](), set[int](), 0, 0
    kinds = st.tuples(st.sampled_from(["segment", "segment", "gap", "hole"]), st.integers(1, 6), st.integers(0, 2))
    log_start = draw(st.integers(0, 20))

    async def make() -> None:
        nonlocal epoch, offset
        for kind, length, more_epochs in draw(st.lists(kinds, max_size=6)):
            end = offset + length
            if kind == "segment":
                first = LeaderEpochEntry(epoch, offset)
                epoch += more_epochs
                entries = (first, LeaderEpochEntry(epoch, end - 1)) if more_epochs and length > 1 else (first,)
                await copied(metadata, replace(segment(PARTITION, offset, end - 1), segment_leader_epochs=entries))
                epochs.update(dict.fromkeys(range(offset, end), entries[0].epoch))
                epochs[end - 1] = entries[-1].epoch
            elif kind == "gap":
                gaps.update(range(offset, end))
                await metadata.put_log_gap(PARTITION, LogGap(offset, end), epoch)
            offset = end
        if log_start:
            await metadata.put_log_start(PARTITION, user_log_start(log_start, leader_epoch=99))

    asyncio.run(make())
    return Made(RemoteLog(metadata.state, PARTITION), epochs, gaps, log_start)


def runs(offsets: Iterator[int]) -> list[LogGap]:
    found: list[LogGap] = []
    for each in offsets:
        if found and found[-1].next_offset == each:
            found[-1] = LogGap(found[-1].first_offset, each + 1)
        else:
            found.append(LogGap(each, each + 1))
    return found


def holes(offsets: range, made: Made) -> list[LogGap]:
    """Each run without a segment, from its first offset on that no gap has."""
    apart = runs(each for each in offsets if each not in made.epochs)
    lost = [next((each for each in range(*run) if each not in made.gaps), None) for run in apart]
    return [LogGap(first, run.next_offset) for first, run in zip(lost, apart, strict=True) if first is not None]


@given(logs(), st.integers(0, LAST))
def test_an_offset_is_in_a_segment_in_a_gap_or_in_neither(made: Made, offset: int) -> None:
    log, epochs, gaps, log_start = made
    explained = epochs.keys() | gaps
    assert log.has(offset) is (offset in epochs)
    assert log.epoch_at(offset) == epochs.get(offset, -1)
    assert log.epoch_below(offset) == max((epoch for at, epoch in epochs.items() if at < offset), default=-1)
    assert log.end() == max(epochs, default=None)
    assert log.end(offset) == max((each for each in epochs if max(epochs) >= offset), default=None)
    assert log.last_epoch() == (epochs[max(epochs)] if epochs else None)
    assert log.next_uncopied(offset) == next(each for each in count(offset) if each not in explained)
    behind_gap = next(each for each in count(offset) if each not in gaps)
    following = min((each for each in epochs if each > offset), default=None)
    gap = log.gap_exit(offset)
    assert (gap is None) is (offset not in gaps)
    if gap is not None:
        assert (gap.end, gap.segment_start) == (behind_gap, following)
        pieces = [each for each in log.metadata.gaps(PARTITION) if each.holds(offset)]
        assert log.epoch_before_gap(offset) == epochs.get(pieces[0].first_offset - 1, -1)
    else:
        assert log.epoch_before_gap(offset) == -1
    is_below = offset < (log_start or min(epochs, default=LAST + 1))
    reached = offset if offset in epochs else behind_gap if offset in gaps and behind_gap in epochs else None
    assert log.remote_position(offset) == (None if is_below else reached)
    inner = range(max(log_start, min(epochs)), max(epochs)) if epochs else range(0)
    assert list(log.remote_holes()) == holes(inner, made)
    assert log.has_gap_behind() is any(each > max(epochs, default=-1) for each in gaps)


@given(logs(), st.integers(0, LAST), st.integers(0, LAST), st.integers(0, 9))
def test_the_bounds_are_those_of_the_offsets(made: Made, start: int, local_start: int, length: int) -> None:
    log, epochs, gaps, log_start = made
    above = [each for each in epochs if each >= start]
    explained = None
    if above:
        explained = next(each for each in count(min(above)) if each not in epochs.keys() | gaps)
    assert asyncio.run(log.explained_to(start)) == explained
    limited = asyncio.run(log.explained_to(start, local_start))
    assert limited == explained or (
        explained is not None and limited is not None and local_start <= limited <= explained
    )
    lost = range(min(above, default=LAST), local_start)
    assert asyncio.run(log.holes(start, local_start)) == (holes(lost, made) if above else [])
    offset = max(start, log_start)
    assert log.is_at_head(offset, log_start) is (
        offset < min((each for each in epochs if each >= log_start), default=99)
    )
    bounds = LocalLogBounds(local_start, local_start + length, local_start + length, 5)
    assert log.next_local(bounds) == min(max(local_start, max(epochs, default=-1) + 1), bounds.last_stable_offset)
    confirmed = log_start if log_start <= local_start else 0
    readable = [each for each in epochs if each >= confirmed]
    is_known = bool(epochs or gaps or log_start)
    earliest = min([local_start, *readable])
    assert log.earliest(local_start) == (earliest if is_known else None)
    assert log.log_start(local_start) == confirmed
    first = max(local_start, log_start)
    uncopied = next(each for each in count(first) if each not in epochs.keys() | gaps)
    assert log.first_uncopied(bounds) == min(uncopied, bounds.high_watermark)


@pytest.fixture
async def metadata() -> Metadata:
    """The segments 20-29 and 40-49 are readable."""
    metadata = Metadata(lambda: 0, lambda: MINUTE_MS)
    for start in (20, 40):
        await copied(metadata, segment(PARTITION, start, start + 9))
    return metadata


@pytest.fixture
def log(metadata: Metadata) -> RemoteLog:
    return RemoteLog(metadata.state, PARTITION)


async def begun(metadata: Metadata, start: int, end: int) -> RemoteLogSegmentMetadata:
    attempt = segment(PARTITION, start, end)
    await metadata.add_remote_log_segment_metadata(attempt)
    return replace(attempt, event_timestamp_ms=MINUTE_MS)


async def test_attempts_are_the_segments_without_an_end(metadata: Metadata, log: RemoteLog) -> None:
    last, first = await begun(metadata, 50, 59), await begun(metadata, 0, 9)
    assert (list(log.attempts()), list(log.attempts(10))) == ([first, last], [last])


async def test_an_attempt_of_a_plan_is_not_measured(metadata: Metadata, log: RemoteLog) -> None:
    await metadata.put_copy_plan(CopyPlan(PARTITION, "", 0, UUID(int=7), 1, 0, 0, (60, 70)))
    assert [is_measured(each) for each in log.attempts()] == [False]
    assert log.last_attempt() is None
    assert is_measured(await begun(metadata, 60, 69))


@pytest.mark.parametrize(
    ("attempt", "log_start", "local_log_start", "first"),
    [
        ((0, 9), 0, 100, 0),
        ((0, 9), 9, 100, 9),
        ((0, 9), 10, 100, None),
        ((0, 9), 0, 0, None),
        ((10, 19), 0, 10, None),
        ((10, 19), 0, 11, 10),
        ((30, 39), 0, 100, None),
    ],
)
async def test_the_head_ends_at_the_first_segment_or_at_the_local_log(
    metadata: Metadata,
    log: RemoteLog,
    attempt: tuple[int, int],
    log_start: int,
    local_log_start: int,
    first: int | None,
) -> None:
    await begun(metadata, *attempt)
    assert log.attempt_at_head(log_start, local_log_start) == first
    in_head = [LogGap(first, min(local_log_start, 20))] if first is not None else []
    assert (await log.holes(log_start, local_log_start))[: len(in_head)] == in_head


@pytest.mark.parametrize(
    ("gap_end", "cut_at", "first"), [(0, 10, 0), (5, 10, 5), (10, 10, None), (0, 5, 0), (5, 5, None)]
)
async def test_no_attempt_at_the_head_has_offsets_of_a_gap_or_behind_a_cut(
    metadata: Metadata, log: RemoteLog, gap_end: int, cut_at: int, first: int | None
) -> None:
    await begun(metadata, 0, 9)
    await metadata.put_cut(PARTITION, 1, cut_at)
    if gap_end:
        await metadata.put_log_gap(PARTITION, LogGap(0, gap_end), 0)
    assert log.attempt_at_head(0, 100) == first


async def test_the_last_attempt_ends_above_the_segments(metadata: Metadata, log: RemoteLog) -> None:
    assert RemoteLog(metadata.state, TopicIdPartition(UUID(int=1), 7)).begun_end() is None
    await begun(metadata, 30, 39)
    assert (log.last_attempt(), log.begun_end()) == (None, 49)
    await begun(metadata, 50, 59)
    last = await begun(metadata, 60, 69)
    assert (log.last_attempt(), log.begun_end()) == (last, 69)
    await metadata.put_cut(PARTITION, 1, 55)
    assert log.begun_end() == 54


@pytest.mark.parametrize(
    ("attempt", "offset", "unread"),
    [
        ((0, 9), 0, 0),
        ((0, 9), 5, 5),
        ((0, 9), 10, None),
        ((22, 27), 0, None),
        ((20, 39), 0, 30),
        ((20, 39), 35, 35),
        ((15, 45), 20, 30),
        ((40, 59), 0, 50),
    ],
)
def test_an_offset_of_an_attempt_is_unread_if_no_readable_segment_has_it(
    log: RemoteLog, attempt: tuple[int, int], offset: int, unread: int | None
) -> None:
    assert log.unread_from(segment(PARTITION, *attempt), offset) == unread


async def test_copying_fails_since_the_oldest_attempt_at_the_next_segment(metadata: Metadata, log: RemoteLog) -> None:
    await begun(metadata, 30, 39)
    assert log.copy_failing_since_ms(9 * MINUTE_MS) is None
    await begun(metadata, 50, 59)
    assert log.copy_failing_since_ms(2 * MINUTE_MS - 1) is None
    assert log.copy_failing_since_ms(2 * MINUTE_MS) == MINUTE_MS


async def test_a_trim_shows_that_there_were_segments(metadata: Metadata, log: RemoteLog) -> None:
    trim = OffsetAndEpoch(19, 5)
    assert log.lost_trim(0) is None
    await metadata.put_local_log_start(PARTITION, trim)
    assert [log.lost_trim(log_start) for log_start in (0, 18, 19)] == [trim, trim, None]
    assert await log.unknown_offsets(0, 50) == [LogGap(0, 20), LogGap(30, 40)]
    await metadata.put_log_gap(PARTITION, LogGap(0, 19), 5)
    assert log.lost_trim(0) is None
    await metadata.end_log_gap(PARTITION, LogGap(0, 19))
    await metadata.put_local_log_start(PARTITION, OffsetAndEpoch(21, 5))
    assert log.lost_trim(0) is None, "a segment begins below its end"


@pytest.mark.parametrize(("deleted_to", "is_explained"), [((19, 5), True), ((18, 5), False), ((20, 4), False)])
async def test_a_deletion_after_a_trim_explains_that_there_are_no_segments(
    metadata: Metadata, log: RemoteLog, deleted_to: tuple[int, int], is_explained: bool
) -> None:
    await metadata.put_local_log_start(PARTITION, OffsetAndEpoch(19, 5))
    await metadata.put_log_start(PARTITION, LogStart(*deleted_to, LogStartReason.USER))
    assert (log.last_trim() is None) is is_explained
