"""Needless attempts are deleted several at a time while the store deletes, and one at a time while it fails."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from uuid import UUID

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.tiers.workbench import PARTITION, Workbench
from tiers.errors import (
    CircuitOpenError,
    OwnershipLostError,
    RemoteLogMetadataError,
    RemoteStorageError,
    RetriableRemoteStorageError,
)
from tiers.model.copy_plan import CopyPlan
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentMetadataUpdate, RemoteLogSegmentState
from tiers.storage.object_key import marker_key
from tiers.tasks.deletion.segment_deletion import delete_attempts, delete_segment

DEADLINE_S = 60


class Store:
    """Deletes a single object at once, and others only when eight deletions are in progress."""

    def __init__(self, bench: Workbench, monkeypatch: pytest.MonkeyPatch, *, alone: frozenset[int]) -> None:
        self.refused: set[int] = set()
        """By the place in the order of asking, as `alone`."""
        self.asked = self.under_way = self.most_under_way = 0
        eight, delete = asyncio.Barrier(8), bench.store.delete_log_segment_data

        async def slowly(metadata: RemoteLogSegmentMetadata) -> bool:
            place = self.asked
            self.asked += 1
            self.under_way += 1
            self.most_under_way = max(self.most_under_way, self.under_way)
            if place in alone:
                assert self.under_way == 1
            else:
                async with asyncio.timeout(DEADLINE_S):
                    await eight.wait()
            self.under_way -= 1
            if place in self.refused:
                raise RetriableRemoteStorageError("AccessDenied")
            return await delete(metadata)

        monkeypatch.setattr(bench.store, "delete_log_segment_data", slowly)


async def leave(bench: Workbench, tiles: int, attempts: int) -> None:
    """The segments that a plan announced, and no executor copied."""
    bounds = tuple(range(0, 10 * tiles + 1, 10))
    await bench.metadata.put_copy_plan(CopyPlan(PARTITION, "a", bench.wall_ms, UUID(int=1), attempts, 0, 0, bounds))
    assert len(bench.segments) == tiles * attempts


async def test_all_attempts_of_a_plan_go_eight_at_a_time(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    await leave(bench, tiles=11, attempts=3)
    store = Store(bench, monkeypatch, alone=frozenset({0}))
    assert await delete_attempts(bench.services, PARTITION, bench.segments) == store.asked == 33
    assert store.most_under_way == 8
    assert (bench.segments, bench.state.copy_plans(PARTITION)) == ([], [])


async def test_after_a_failure_one_alone_tells_how_the_store_is(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leave(bench, tiles=18, attempts=1)
    store = Store(bench, monkeypatch, alone=frozenset({0, 9}))
    store.refused = {8}
    assert await delete_attempts(bench.services, PARTITION, bench.segments) == 17
    assert (store.asked, len(bench.segments)) == (18, 1)
    assert bench.state.copy_plans(PARTITION) != []


async def test_a_store_that_goes_down_meanwhile_is_left_alone(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leave(bench, tiles=30, attempts=1)
    store = Store(bench, monkeypatch, alone=frozenset({0}))
    store.refused = set(range(1, 100))
    assert await delete_attempts(bench.services, PARTITION, bench.segments) == 1
    assert store.asked == 9


async def test_deletions_in_progress_end_before_an_error_is_raised(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first error is raised. Later errors say less."""
    error = RemoteLogMetadataError("timed out")
    await leave(bench, tiles=30, attempts=1)
    update, written = bench.metadata.update_remote_log_segment_metadata, 0
    ended: list[RemoteLogSegmentMetadataUpdate] = []

    async def fail_twice(one: RemoteLogSegmentMetadataUpdate) -> None:
        nonlocal written
        written += 1
        if written == 3:  # after both of the first segment, which went alone
            raise error
        if written == 4:
            await asyncio.sleep(0)
            raise OwnershipLostError("not owned any more")
        await update(one)
        ended.append(one)

    monkeypatch.setattr(bench.metadata, "update_remote_log_segment_metadata", fail_twice)
    with pytest.raises(type(error)) as raised:
        await delete_attempts(bench.services, PARTITION, bench.segments)
    assert raised.value is error
    assert len(ended) == 2 + 2 * 6
    assert len(bench.segments) == 30 - 7


async def test_a_copy_that_another_owner_finished_is_no_leftover(
    bench: Workbench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ownership was lost and regained while the store took its time with the first."""
    begun = []
    for start in (0, 10, 20):
        built = build_segment(tmp_path / str(start), [batch_of(start, 10)], base_offset=start)
        segment = metadata_of(built, PARTITION)
        await bench.metadata.add_remote_log_segment_metadata(segment)
        await bench.store.copy_log_segment_data(segment, built.log_segment_data(segment))
        begun.append(segment)
    delete = bench.store.delete_log_segment_data

    async def slowly(segment: RemoteLogSegmentMetadata) -> bool:
        monkeypatch.undo()
        first, second = (one for one in begun if one.segment_id != segment.segment_id)
        await bench.services.write_state(first, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)
        await bench.services.write_state(second, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
        await bench.services.write_state(second, RemoteLogSegmentState.DELETE_SEGMENT_FINISHED)
        return await delete(segment)

    monkeypatch.setattr(bench.store, "delete_log_segment_data", slowly)
    assert await delete_attempts(bench.services, PARTITION, begun) == 1
    [left] = bench.segments
    assert left.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
    assert await bench.remote_bytes() == batch_of(left.start_offset, 10)


@pytest.mark.parametrize(
    ("answer", "failures"), [(False, 1), (RetriableRemoteStorageError("503"), 1), (CircuitOpenError("open"), 0)]
)
async def test_only_what_the_store_confirms_is_deleted(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, answer: bool | RemoteStorageError, failures: int
) -> None:
    """A store that was not asked has not failed."""
    await leave(bench, tiles=1, attempts=1)

    async def answers(metadata: RemoteLogSegmentMetadata) -> bool:
        if isinstance(answer, bool):
            return answer
        raise answer

    monkeypatch.setattr(bench.store, "delete_log_segment_data", answers)
    assert await delete_attempts(bench.services, PARTITION, bench.segments) == 0
    assert (len(bench.segments), bench.services.failed_deletions.count) == (1, failures)


async def test_the_store_is_asked_only_by_the_owner_in_the_right_place(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await leave(bench, tiles=2, attempts=1)
    begun, stored = bench.segments[0], list[bytes | None]()
    await bench.services.write_state(begun, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)

    async def ask(metadata: RemoteLogSegmentMetadata) -> bool:
        stored.append(metadata.custom_metadata)
        return True

    monkeypatch.setattr(bench.store, "delete_log_segment_data", ask)
    assert await delete_attempts(bench.services, PARTITION, bench.segments[1:], lambda segment: False) == 0
    bench.metadata.owned = False
    with pytest.raises(OwnershipLostError):
        await delete_attempts(bench.services, PARTITION, ())
    bench.metadata.owned = True
    marker = await bench.store.get_object(marker_key("cluster"))
    await bench.store.delete_object(marker_key("cluster"))
    with pytest.raises(RemoteStorageError, match="another place"):
        await delete_attempts(bench.services, PARTITION, ())
    await bench.store.put_object(marker_key("cluster"), marker)
    assert stored == []
    recorded = replace(bench.segments[1], custom_metadata=b"recorded")
    await delete_segment(bench.services, recorded)
    await delete_segment(bench.services, replace(begun, custom_metadata=b"recorded"), b"of no record")
    assert stored == [b"recorded", b"of no record"]
