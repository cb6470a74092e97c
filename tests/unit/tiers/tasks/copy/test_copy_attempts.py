"""Attempts at copies that have not ended: whole, not known, or not whole."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from tests.support.fakes.segments import build_segment
from tests.support.tiers.attempts import batches, begun, copied
from tests.support.tiers.interposed import before, refuse
from tests.support.tiers.workbench import PARTITION, POLICY, ProcessEnded, Workbench
from tiers.errors import (
    EncryptionKeyError,
    RemoteResourceNotFoundError,
    RetriableRemoteStorageError,
)
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.log_start import LogGap
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.storage.object_key import log_key
from tiers.storage.remote_storage_manager import StoredObject
from tiers.tasks.copy.copy_attempts import KEPT_WITHOUT_RECORDS_MS
from tiers.tasks.copy.segment_copy import announce, keep
from tiers.tasks.copy.spool import Spool
from tiers.tasks.history.log_gap_task import MEMBER_RETURNS_WITHIN_MS

FINISHED = RemoteLogSegmentState.COPY_SEGMENT_FINISHED


@pytest.fixture
async def log(bench: Workbench) -> Workbench:
    """The leader has 0 to 99, and the metadata is proved."""
    bench.log.append(*batches(0, 100))
    await bench.check_facts()
    return bench


async def run(bench: Workbench, log_start: int = 0) -> None:
    await bench.attempts.run(await bench.log.bounds(PARTITION, 1000), log_start)


async def run_until_decided(bench: Workbench) -> None:
    await run(bench)
    bench.now_ms += bench.services.settings.remote_log.visible_after_ms
    await run(bench)


async def deletable(bench: Workbench, log_start: int = 0) -> list[UUID]:
    bounds = await bench.log.bounds(PARTITION, 1000)
    return [each.segment_id.id for each in await bench.attempts.give_up(bounds, log_start)]


def stored_file(bench: Workbench, attempt: RemoteLogSegmentMetadata, suffix: str) -> Path:
    [path] = [each for each in (bench.folder / "remote").rglob(f"*{suffix}") if str(attempt.segment_id.id) in each.name]
    return path


async def begun_not_whole(bench: Workbench, first: int, end: int) -> tuple[RemoteLogSegmentMetadata, Path, bytes]:
    """Makes an attempt that is not whole. Returns the missing file and its content, too."""
    attempt = await begun(bench, first, end)
    path = stored_file(bench, attempt, ".log")
    raw = path.read_bytes()
    path.unlink()
    await run_until_decided(bench)
    return attempt, path, raw


async def end_after(bench: Workbench, step: str) -> None:
    """The process ends after this step, and starts again with its spool."""
    bench.end_after = step
    with pytest.raises(ProcessEnded):
        await bench.copy()
    bench.end_after = ""
    bench.restart()
    await bench.services.spool.open()


def begins_at(first_offset: int) -> Callable[[RemoteLogSegmentMetadata], bool]:
    return lambda segment: segment.start_offset == first_offset


@pytest.mark.parametrize(
    ("others", "attempts", "log_start", "finished"),
    [
        ([], [(0, 30)], 0, [(0, 29)]),
        ([(0, 30)], [(20, 50)], 0, [(0, 29), (20, 49)]),
        ([], [(30, 60)], 0, []),  # the records before it come first
        ([], [(30, 60), (0, 30)], 0, [(0, 29), (30, 59)]),
        ([(0, 10)], [(50, 80)], 60, [(0, 9), (50, 79)]),
    ],
)
async def test_whole_attempts_are_finished_in_order_without_a_read(
    log: Workbench,
    others: list[tuple[int, int]],
    attempts: list[tuple[int, int]],
    log_start: int,
    finished: list[tuple[int, int]],
) -> None:
    for other in others:
        await copied(log, *other)
    for attempt in attempts:
        await begun(log, *attempt)
    await run(log, log_start)
    assert log.finished == finished
    assert log.log.reads == []


@pytest.mark.parametrize("is_refused", [True, False], ids=["refused", "of-a-later-release"])
async def test_an_attempt_that_is_not_known_is_neither_deleted_nor_replaced(
    log: Workbench, monkeypatch: pytest.MonkeyPatch, is_refused: bool
) -> None:
    attempt = await begun(log, 0, 30)
    indexes = stored_file(log, attempt, ".indexes")
    raw = indexes.read_bytes()
    with monkeypatch.context() as patched:
        if is_refused:
            refuse(patched, log.store, "fetch_indexes")
        else:
            indexes.write_bytes(raw[:5] + bytes([raw[5] + 1]) + raw[6:])
        log.log.log_start_offset = 20
        for _ in range(3):
            with pytest.raises(RetriableRemoteStorageError, match="it is not known whether the store has"):
                await log.copy()
            log.now_ms += KEPT_WITHOUT_RECORDS_MS
            log.wall_ms += KEPT_WITHOUT_RECORDS_MS
        assert log.segments == [attempt]
    indexes.write_bytes(raw)
    await run(log)
    assert log.finished == [(0, 29)]


@pytest.mark.parametrize("is_stored_late", [True, False])
async def test_no_gap_is_recorded_over_an_attempt_that_may_be_whole(
    log: Workbench, monkeypatch: pytest.MonkeyPatch, is_stored_late: bool
) -> None:
    await copied(log, 0, 30)
    await copied(log, 60, 90)
    if is_stored_late:
        _, path, raw = await begun_not_whole(log, 30, 60)
    else:
        await begun(log, 30, 60)
    log.log.log_start_offset = 60
    with monkeypatch.context() as patched:
        if not is_stored_late:
            refuse(patched, log.store, "fetch_log_segment", when=begins_at(30))
        await log.copy()
        log.now_ms += MEMBER_RETURNS_WITHIN_MS - 1
        await log.copy()
        assert log.metadata.state.gaps(PARTITION) == []
        log.now_ms += 1
        if is_stored_late:
            path.write_bytes(raw)
        await log.copy()
    assert log.metadata.state.gaps(PARTITION) == []
    log.now_ms += log.services.settings.remote_log.task_interval_ms
    await run(log)
    assert log.finished[:3] == [(0, 29), (30, 59), (60, 89)]


@pytest.mark.parametrize("suffix", [".log", ".indexes"])
@pytest.mark.parametrize("damage", ["missing", "short", "changed"])
async def test_an_attempt_is_not_whole_after_two_reads_that_are_far_enough_apart(
    log: Workbench, damage: str, suffix: str
) -> None:
    attempt = await begun(log, 0, 30)
    path = stored_file(log, attempt, suffix)
    raw = path.read_bytes()
    path.unlink()
    if damage != "missing":
        path.write_bytes(raw[:-10] if damage == "short" else raw[:-10] + b"?" + raw[-9:])
    await run(log)
    log.now_ms += log.services.settings.remote_log.visible_after_ms - 1
    await run(log)
    assert log.attempts.blocking(0, 1) == attempt
    log.now_ms += 1
    await run(log)
    assert log.attempts.blocking(0, 1) is None
    assert await deletable(log) == []
    await log.copy()
    assert log.finished == [(0, 29), (30, 59), (60, 89)]
    assert await deletable(log) == [attempt.segment_id.id]
    await log.copy()
    assert attempt.segment_id not in {one.segment_id for one in log.segments}


@pytest.mark.parametrize("is_stored_late", [False, True])
async def test_an_attempt_that_no_leader_has_is_given_up_after_12_hours(log: Workbench, is_stored_late: bool) -> None:
    attempt, path, raw = await begun_not_whole(log, 0, 30)
    log.wall_ms += KEPT_WITHOUT_RECORDS_MS
    assert await deletable(log) == []  # the leader has its records
    log.log.log_start_offset = 40
    log.wall_ms -= 1
    assert await deletable(log) == []
    log.wall_ms += 1
    if is_stored_late:
        path.write_bytes(raw)
    assert await deletable(log) == [attempt.segment_id.id] * (not is_stored_late)
    path.write_bytes(raw)  # the deletion of its objects may have begun
    log.now_ms += KEPT_WITHOUT_RECORDS_MS
    await run(log)
    assert log.finished == [(0, 29)] * is_stored_late


async def test_an_attempt_that_adds_no_record_is_deleted(log: Workbench) -> None:
    await copied(log, 0, 30)
    inside, passed = await begun(log, 10, 30), await begun(log, 30, 50)
    for attempt in (inside, passed):
        await log.store.delete_log_segment_data(attempt)
    await run(log, log_start=50)
    assert await deletable(log) == [inside.segment_id.id]
    assert await deletable(log, log_start=50) == [inside.segment_id.id, passed.segment_id.id]
    await log.store.delete_log_segment_data(log.segments[0])
    assert await deletable(log) == [], "the metadata may have lost the deletion of the other copy"


async def test_attempts_whose_key_is_missing_keep_no_other_waiting(
    log: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in (0, 10, 20):
        await begun(log, first, first + 10)
        refuse(monkeypatch, log.store, "fetch_indexes", EncryptionKeyError("no key"), begins_at(first))
    await begun(log, 30, 60)
    log.log.log_start_offset = 30
    await run(log)
    assert log.finished == [(30, 59)]


async def test_an_attempt_ends_the_gap_that_it_fills(log: Workbench) -> None:
    await copied(log, 0, 30)
    await copied(log, 60, 90)
    await log.metadata.put_log_gap(PARTITION, LogGap(30, 60), 0)
    log.log.log_start_offset = 60
    await begun(log, 30, 50)
    await run(log)
    assert log.finished == [(0, 29), (30, 49), (60, 89)]
    assert log.metadata.state.gaps(PARTITION) == [LogGap(30, 60)]
    await begun(log, 50, 60)
    await run(log)
    assert log.metadata.state.gaps(PARTITION) == []


@pytest.mark.parametrize(
    ("others", "epochs", "is_agreed"),
    [
        ([(0, 30, 3), (60, 90, 3)], [(3, 30)], True),
        ([(0, 30, 3), (60, 90, 5)], [(4, 30)], True),
        ([], [(0, 30)], True),
        ([(0, 30, 3)], [(2, 30)], False),
        ([(60, 90, 4)], [(3, 30), (5, 40)], False),
        ([(0, 40, 3)], [(3, 30), (4, 50)], True),
        ([(0, 40, 3)], [(4, 30)], False),
        ([(50, 90, 3)], [(3, 30), (4, 40)], False),
        ([(0, 20, 3), (70, 90, 5)], [(3, 30), (5, 40)], True),
        ([(0, 20, 3)], [(2, 30)], False),
        ([(70, 90, 4)], [(5, 30)], False),
    ],
)
async def test_leader_epochs_ascend_over_an_attempt_and_other_segments(
    bench: Workbench, others: Sequence[tuple[int, int, int]], epochs: Sequence[tuple[int, int]], *, is_agreed: bool
) -> None:
    for other in others:
        await copied(bench, *other)
    entries = tuple(LeaderEpochEntry(*each) for each in epochs)
    assert (
        RemoteLog(bench.state, PARTITION).agrees(replace(await begun(bench, 30, 60), segment_leader_epochs=entries), 59)
        is is_agreed
    )


@pytest.mark.parametrize("step", ["segment-kept", "copy-started-written"])
async def test_a_kept_segment_is_stored_after_a_restart(log: Workbench, step: str) -> None:
    await end_after(log, step)
    [kept] = log.services.spool.kept()
    log.log.log_start_offset = 40
    await log.copy()
    assert log.finished == [(0, 29)]
    assert log.segments[0].segment_id == kept.metadata.segment_id
    assert log.services.spool.kept() == []


async def test_a_kept_segment_below_the_log_start_is_not_announced(log: Workbench) -> None:
    await end_after(log, "segment-kept")
    assert not await log.attempts.announce_kept(30)
    assert (log.segments, log.spooled()) == ([], [])


@pytest.mark.parametrize("damaged", [".log", ".indexes", "a former PUT ended early"])
async def test_a_kept_segment_that_the_store_damaged_gets_another_uuid(log: Workbench, damaged: str) -> None:
    """The store refuses to replace an object."""
    is_former = not damaged.startswith(".")
    await end_after(log, "copy-started-written" if is_former else "objects-written")
    log.log.log_start_offset = 40
    [attempt] = log.segments
    if is_former:
        await log.store.put_object(log_key("cluster", attempt), b"cut short")
    else:
        path = stored_file(log, attempt, damaged)
        raw = path.read_bytes()
        path.unlink()
        path.write_bytes(raw[:-10])
    await run_until_decided(log)
    log.now_ms += 60_000
    await run(log)
    [finished] = [each for each in log.segments if each.state is FINISHED]
    assert (log.finished, finished.segment_id == attempt.segment_id) == ([(0, 29)], False)
    assert log.services.spool.kept() == []


async def test_a_kept_segment_of_a_deleted_attempt_gets_another_uuid(log: Workbench) -> None:
    await copied(log, 0, 30)
    await log.check_facts()
    await end_after(log, "objects-written")
    [attempt] = [one for one in log.segments if one.start_offset == 30]
    await log.services.write_state(attempt, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
    log.log.log_start_offset = 60
    for _ in range(3):
        await log.copy()
        assert log.metadata.state.gaps(PARTITION) == []
        log.now_ms += log.services.settings.gap_alarm_ms
    assert (30, 59) in log.finished


@pytest.mark.parametrize("suffix", [".log", ".indexes"])
@pytest.mark.parametrize("damage", ["changed", "missing"])
async def test_a_kept_segment_that_the_disk_damaged_is_read_again(log: Workbench, suffix: str, damage: str) -> None:
    await end_after(log, "copy-started-written")
    [attempt] = log.segments
    [path] = [each for each in log.spooled() if each.suffix == suffix]
    raw = path.read_bytes()
    path.unlink()
    if damage == "changed":
        path.write_bytes(raw[:-10] + b"?" + raw[-9:])
    await run_until_decided(log)
    assert log.attempts.start_behind(0, is_urgent=False) == 0
    await log.copy()
    assert log.finished == [(0, 29), (30, 59), (60, 89)]
    assert attempt.segment_id.id in await deletable(log)


async def test_only_urgent_records_are_copied_behind_an_attempt_not_stored(
    log: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    refuse(monkeypatch, log.store, "copy_log_segment_data", when=begins_at(0))
    with pytest.raises(RetriableRemoteStorageError, match="503"):
        await log.copy()
    with pytest.raises(RetriableRemoteStorageError, match="copying waits"):
        log.attempts.start_behind(0, is_urgent=False)
    assert log.attempts.start_behind(0, is_urgent=True) == 30
    monkeypatch.setattr(Spool, "is_full", True)
    bounds = await log.survey()
    await log.attempts.run(bounds, 0)
    while await log.copy_task.run(POLICY, bounds, log.attempts.start_behind(0, is_urgent=True), retention_share=0.5):
        pass
    assert [each.metadata.start_offset for each in log.services.spool.kept()] == [0, 30, 60, 90]
    assert log.finished == [], "the store is not asked"


async def test_copying_waits_for_an_attempt_of_another_owner(log: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    """The next segment would continue one that this owner does not have."""
    await begun(log, 0, 30)
    refuse(monkeypatch, log.store, "fetch_indexes")
    await run(log)
    with pytest.raises(RetriableRemoteStorageError, match=r"copying waits.*503"):
        log.attempts.start_behind(0, is_urgent=True)
    assert log.attempts.start_behind(30, is_urgent=False) == 30


async def test_a_cut_attempt_holds_up_no_record_behind_the_cut(log: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        refuse(patched, log.store, "fetch_indexes")
        with pytest.raises(RetriableRemoteStorageError):
            await log.copy()
        await log.metadata.put_cut(PARTITION, 1, 20)
        assert log.attempts.start_behind(0, is_urgent=False) == 20


async def test_a_store_in_trouble_is_not_asked_about_every_attempt(
    log: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for first in range(0, 50, 10):
        await begun(log, first, first + 10)
    log.log.log_start_offset = 50
    asked = refuse(monkeypatch, log.store, "fetch_indexes")
    await run(log)
    assert [each.start_offset for each in asked] == [0, 10, 20]
    await run(log)
    assert [each.start_offset for each in asked] == [0, 10, 20, 30, 40], "the first ones wait for their backoff"


async def test_a_copy_ends_before_the_metadata_drops_its_deletion(
    log: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> None:
        await asyncio.Event().wait()

    remote_log = log.services.settings.remote_log.model_copy(update={"deleted_segment_retention_ms": 20})
    log.services = replace(log.services, settings=replace(log.services.settings, remote_log=remote_log))
    log.restart()
    monkeypatch.setattr(log.store, "copy_log_segment_data", never)
    with pytest.raises(RetriableRemoteStorageError, match="the copy did not end within 10 ms"):
        await log.copy()
    assert log.attempts.in_progress is None


@pytest.mark.parametrize("custom_metadata", [b"found by it alone", None])
async def test_an_attempt_is_found_by_the_custom_metadata_of_the_listing(
    log: Workbench, monkeypatch: pytest.MonkeyPatch, custom_metadata: bytes | None
) -> None:
    """The record of an attempt has none, and a store may need it to find the objects."""
    attempt, listed = await begun(log, 0, 30), log.store.list_objects

    async def listing(prefix: str) -> AsyncIterator[StoredObject]:
        async for each in listed(prefix):
            yield replace(each, custom_metadata=custom_metadata)

    lost = RemoteResourceNotFoundError("which bucket?")
    refuse(monkeypatch, log.store, "fetch_indexes", lost, lambda segment: segment.custom_metadata is None)
    monkeypatch.setattr(log.store, "list_objects", listing)
    await run(log)
    assert log.finished == [(0, 29)] * (custom_metadata is not None)
    assert [each.custom_metadata for each in log.segments if each.segment_id == attempt.segment_id] == [custom_metadata]


@pytest.mark.parametrize(
    ("attempts", "start", "behind"),
    [([(30, 60)], 0, 0), ([(0, 30)], 30, 30), ([(0, 30), (30, 60)], 0, 60), ([(0, 30), (60, 90)], 0, 30)],
)
async def test_copying_continues_behind_kept_attempts_without_a_hole(
    log: Workbench, attempts: list[tuple[int, int]], start: int, behind: int
) -> None:
    for first, end in attempts:
        built = build_segment(log.folder / f"{first}.built", batches(first, end), first)
        await announce(
            log.services,
            (await keep(log.services, RemoteLogSegmentId(PARTITION, uuid4()), built, 0)).metadata,
        )
    assert log.attempts.start_behind(start, is_urgent=True) == behind


async def test_an_attempt_whose_deletion_begins_meanwhile_is_not_finished(
    log: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt, deleting = await begun(log, 0, 30), RemoteLogSegmentState.DELETE_SEGMENT_STARTED
    before(monkeypatch, log.log, "end_offset_for_epoch", lambda *_: log.services.write_state(attempt, deleting))
    await run(log)
    assert [each.state for each in log.segments] == [deleting]
