"""Kafka's rules of retention over two tiers, one by one, with the bugs that made them (KIP-405, its JIRA issues)."""

from __future__ import annotations

from dataclasses import replace
from uuid import uuid4

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.tiers import segment_metadata
from tests.support.tiers.interposed import before
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.errors import RemoteStorageError
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import RemoteLogSegmentState


async def finished_again(bench: Workbench, start: int, end: int) -> RemoteLogSegmentId:
    """Another copy of a range, as one whose commit was not known to have succeeded."""
    batch = batch_of(start, end - start + 1, value_bytes=15, timestamp=bench.wall_ms)
    built = build_segment(bench.folder / f"{start}-{end}", [batch], start)
    again = replace(
        metadata_of(built),
        segment_id=RemoteLogSegmentId(PARTITION, uuid4()),
        state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
    )
    await bench.metadata.add_remote_log_segment_metadata(again)
    await bench.store.copy_log_segment_data(again, built.log_segment_data(again))
    await bench.services.write_state(again, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)
    return again.segment_id


async def test_a_new_owner_does_not_count_what_lies_in_both_tiers_twice(copied: Workbench) -> None:
    """KAFKA-20732: the highest remote offset is known before any size is."""
    size_bytes = copied.segments[0].segment_size_bytes
    whole_bytes = len(copied.log.records)
    assert whole_bytes > 3 * size_bytes
    copied.restart()
    copied.log.leader_epoch += 1
    assert await copied.expire(replace(POLICY, retention_bytes=whole_bytes)) == 0
    await copied.copy_all()
    assert await copied.expire(replace(POLICY, retention_bytes=whole_bytes)) == 0
    assert copied.state.log_start_offset(PARTITION) == 0
    assert await copied.expire(replace(POLICY, retention_bytes=2 * size_bytes + 61)) == 1


@pytest.mark.parametrize("is_local", [True, False])
async def test_records_that_are_not_known_to_be_remote_keep_the_later_ones(copied: Workbench, is_local: bool) -> None:
    """The first segment is an attempt that could not be read back yet, or the broker alone has its records."""
    first = copied.segments[0]
    del copied.metadata.segments[first.segment_id]
    if not is_local:
        copied.log.log_start_offset = 30
        await copied.metadata.add_remote_log_segment_metadata(
            replace(first, state=RemoteLogSegmentState.COPY_SEGMENT_STARTED)
        )
    assert await copied.expire(replace(POLICY, retention_bytes=0)) == 0
    assert copied.state.log_start_offset(PARTITION) == 30


async def test_a_hole_between_segments_keeps_its_neighbours_until_it_is_a_gap(copied: Workbench) -> None:
    """Without the segment before it, the hole would be the head of the log, where no gap is recorded."""
    del copied.metadata.segments[copied.segments[1].segment_id]
    copied.log.log_start_offset = 60
    assert await copied.expire(replace(POLICY, retention_bytes=0)) == 0
    assert copied.state.log_start_offset(PARTITION) == 0
    await copied.metadata.put_log_gap(PARTITION, LogGap(30, 60), 0)
    assert await copied.expire(replace(POLICY, retention_bytes=0)) == 2
    assert copied.state.log_start_offset(PARTITION) == 90


@pytest.mark.parametrize("is_first", [False, True], ids=["between-segments", "at-the-head"])
@pytest.mark.parametrize("is_local", [False, True], ids=["in-an-attempt", "in-the-local-log"])
async def test_a_gap_whose_records_came_back_keeps_the_later_ones(
    copied: Workbench, is_local: bool, is_first: bool
) -> None:
    """The leader's log start went back, or a member returned with its copy. The gap ends in a later round."""
    back = copied.segments[0 if is_first else 1]
    del copied.metadata.segments[back.segment_id]
    await copied.metadata.put_log_gap(PARTITION, LogGap(back.start_offset, back.end_offset + 1), 0)
    if is_local:
        copied.log.log_start_offset = back.start_offset
    else:
        copied.log.log_start_offset = back.end_offset + 1
        await copied.metadata.add_remote_log_segment_metadata(
            replace(back, state=RemoteLogSegmentState.COPY_SEGMENT_STARTED)
        )
    assert await copied.expire(replace(POLICY, retention_bytes=0)) == 0


async def test_a_copy_that_answers_for_nothing_goes_without_moving_the_log_start(copied: Workbench) -> None:
    """KAFKA-16511: of two copies of a range, one is enough. A copy within another one goes, too."""
    old = [one.segment_id for one in copied.segments]
    for segment in copied.segments:
        await finished_again(copied, segment.start_offset, segment.end_offset)
    old.append(await finished_again(copied, 40, 45))
    assert await copied.expire(POLICY) == 0
    copied.now_ms += copied.services.settings.remote_log.visible_after_ms
    assert await copied.expire(POLICY) == 4
    assert copied.finished == [(0, 29), (30, 59), (60, 89)]
    assert not set(old) & {one.segment_id for one in copied.segments}
    assert copied.state.log_start_offset(PARTITION) == 0
    assert await copied.expire(POLICY) == 0


async def test_overlapping_copies_that_all_answer_for_something_stay(copied: Workbench) -> None:
    """After an election segments need not begin and end where they did."""
    await finished_again(copied, 20, 45)
    copied.now_ms += copied.services.settings.remote_log.visible_after_ms
    assert await copied.expire(POLICY) == 0
    assert len(copied.finished) == 4
    read = [copied.state.remote_log_segment_metadata(PARTITION, offset) for offset in range(90)]
    assert None not in read


@pytest.mark.parametrize("range_", [(15, 50), (0, 50), (20, 89)])
async def test_what_two_copies_have_does_not_count_twice(copied: Workbench, range_: tuple[int, int]) -> None:
    """Else the log would expire before it has reached its limit."""
    log_bytes = sum(one.segment_size_bytes for one in copied.segments) + copied.copy_task.uncopied.at_least()
    await finished_again(copied, *range_)
    await copied.expire(replace(POLICY, retention_bytes=log_bytes))
    assert copied.state.log_start_offset(PARTITION) == 0
    await copied.expire(replace(POLICY, retention_bytes=0))
    assert copied.state.log_start_offset(PARTITION) == 90


@pytest.mark.parametrize("inner", [(40, 45), (40, 59), (30, 59)])
async def test_a_copy_within_another_stays_while_the_store_lacks_that_one(
    copied: Workbench, inner: tuple[int, int]
) -> None:
    """From the first offset of the inner copy on, the inner copy itself may answer."""
    start, end = inner
    outer = copied.segments[1]
    within = await finished_again(copied, start, end)
    copied.now_ms += copied.services.settings.remote_log.visible_after_ms
    answering = {one.metadata.segment_id for one in copied.state.answering_segments(PARTITION)}
    (gone,) = answering & {outer.segment_id, within}
    await copied.store.delete_log_segment_data(copied.metadata.segments[gone])
    with pytest.raises(RemoteStorageError, match="stays"):
        await copied.expire(POLICY)
    assert {outer.segment_id, within} <= {one.segment_id for one in copied.segments}


async def test_a_copy_ends_although_the_leader_changes_meanwhile(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(10)])

    def elect(*_: object) -> None:
        bench.log.leader_epoch += 1

    before(monkeypatch, bench.store, "copy_log_segment_data", elect)
    for _ in range(3):
        await bench.copy_all()
    assert bench.finished == [(0, 29), (30, 59), (60, 89)]
    assert bench.state.cuts(PARTITION) == []
    assert {one.state for one in bench.segments} == {RemoteLogSegmentState.COPY_SEGMENT_FINISHED}


async def test_retention_by_bytes_counts_no_copy_in_the_range_of_a_cut_one(bench: Workbench) -> None:
    """A copy of 0 to 64 ended late, after smaller copies of 0 to 54. A CUT cuts it at 60."""

    async def write(start: int, end: int, size_bytes: int, *states: RemoteLogSegmentState, epoch: int = 1) -> None:
        one = replace(segment_metadata.segment(PARTITION, start, end, epoch), segment_size_bytes=size_bytes)
        await bench.metadata.add_remote_log_segment_metadata(one)
        for state in states:
            await bench.metadata.update_remote_log_segment_metadata(segment_metadata.to(one, state))

    finished = RemoteLogSegmentState.COPY_SEGMENT_FINISHED
    late = segment_metadata.segment(PARTITION, 0, 64, epoch=1)
    await bench.metadata.add_remote_log_segment_metadata(late)
    deleted = RemoteLogSegmentState.DELETE_SEGMENT_STARTED, RemoteLogSegmentState.DELETE_SEGMENT_FINISHED
    await write(0, 29, 500, finished, *deleted)
    await write(30, 54, 500, finished)
    await bench.metadata.update_remote_log_segment_metadata(segment_metadata.to(late, finished))
    await bench.metadata.put_cut(PARTITION, 2, 60)
    for start in (60, 70, 80, 90):
        await write(start, start + 9, 300, finished, epoch=2)
    bounds = replace(await bench.log.bounds(PARTITION, 1000), log_start_offset=100)
    log_start = await bench.expiration_task.expire(replace(POLICY, retention_bytes=1000), bounds, 55, 0, 99)
    assert log_start == 60  # the later ones have 1200 bytes


async def test_the_time_of_any_copy_shows_that_the_clock_is_behind(copied: Workbench) -> None:
    """A merged copy is newer than the copies behind it."""
    merged = copied.segments[0]
    later_ms = copied.wall_ms + 10 * copied.services.settings.max_clock_skew_ms
    copied.metadata.segments[merged.segment_id] = replace(merged, event_timestamp_ms=later_ms)
    assert await copied.expire(replace(POLICY, retention_bytes=0)) == 0
    assert copied.state.log_starts(PARTITION) == []
