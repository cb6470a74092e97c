"""The owner lists the store for offsets that neither a readable segment nor the leader has."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tests.support.tiers.workbench import PARTITION, Workbench
from tiers.errors import RetriableRemoteStorageError
from tiers.metadata.remote_log import RemoteLog
from tiers.model.log_start import LogGap
from tiers.storage.remote_storage_manager import StoredObject

MINUTE_MS = 60_000


def batches(first: int, end: int, leader_epoch: int = 0) -> list[bytes]:
    """Batches of ten records and about 300 bytes: three fill a segment of the test policy."""
    return [batch_of(at, 10, value_bytes=15, leader_epoch=leader_epoch) for at in range(first, end, 10)]


async def with_lost_segments(bench: Workbench, *lost: int) -> None:
    """Offsets 0 to 89 are copied. The broker has 90 to 299. The metadata lost the segments with these numbers."""
    bench.log.append(*batches(0, 100))
    await bench.check_facts()
    await bench.copy_all()
    bench.log.append(*batches(100, 300))
    bench.log.log_start_offset = 90
    for segment in [bench.segments[number] for number in lost]:
        del bench.metadata.segments[segment.segment_id]


async def copy_start(bench: Workbench) -> int | None:
    return await bench.gap_task.copy_start(await bench.log.bounds(PARTITION, 1000), await bench.log_start())


class Listings:
    """Counts the listings of the store, and refuses them on demand."""

    def __init__(self, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        self.is_refused = False
        self._list_objects = bench.store.list_objects
        monkeypatch.setattr(bench.store, "list_objects", self._listed)

    def _listed(self, prefix: str) -> AsyncIterator[StoredObject]:
        self.count += 1
        if self.is_refused:
            raise RetriableRemoteStorageError("503")
        return self._list_objects(prefix)


async def test_the_head_is_listed_again_after_a_failure_and_a_copy(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await with_lost_segments(bench, 0, 1, 2)
    listings = Listings(bench, monkeypatch)
    listings.is_refused = True
    await bench.copy_all()
    assert bench.finished[0] == (90, 119)
    listings.is_refused = False
    bench.now_ms += MINUTE_MS
    await copy_start(bench)
    assert "metadata was lost" in str(bench.gap_task.doubt)


async def test_the_head_is_listed_again_after_the_file_system_was_away(bench: Workbench) -> None:
    await with_lost_segments(bench, 0, 1, 2)
    root, away, mount_point = (bench.folder / name for name in ("remote", "away", "mount-point"))
    root.rename(away)
    (root / ".tmp").mkdir(parents=True)
    await copy_start(bench)
    root.rename(mount_point)
    away.rename(root)
    bench.now_ms += MINUTE_MS
    await copy_start(bench)
    assert "trimmed to 90" in str(bench.gap_task.doubt)


async def test_a_local_log_start_that_moves_costs_few_listings(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch
) -> None:
    await with_lost_segments(bench, 1, 2)
    listings = Listings(bench, monkeypatch)
    for local_log_start in range(90, 190):
        bench.log.log_start_offset = local_log_start
        await copy_start(bench)
        assert bench.gap_task.doubt is not None
        bench.now_ms += MINUTE_MS // 2
    assert listings.count < 10


async def test_two_holes_become_gaps_at_once(bench: Workbench) -> None:
    await with_lost_segments(bench)
    middle = bench.segments[1]
    await bench.store.delete_log_segment_data(middle)
    del bench.metadata.segments[middle.segment_id]
    bench.log.log_start_offset = 120
    assert await copy_start(bench) is None
    bench.now_ms += bench.services.settings.gap_alarm_ms
    assert await copy_start(bench) == 120
    assert bench.state.gaps(PARTITION) == [LogGap(30, 60), LogGap(90, 120)]


@pytest.mark.parametrize(("is_cut", "gaps"), [(False, [LogGap(30, 60)]), (True, [])])
async def test_an_attempt_of_another_history_leaves_the_earliest_offset_known(
    bench: Workbench, is_cut: bool, gaps: list[LogGap]
) -> None:
    bench.log.leader_epoch = 4
    bench.log.append(*batches(0, 300, 4))
    await bench.check_facts()
    await bench.record_log_start(0)
    bench.log.log_start_offset = 60
    await bench.copy_all()
    built = build_segment(bench.folder / "attempt", batches(30, 60, leader_epoch=5), 30)
    await bench.metadata.add_remote_log_segment_metadata(attempt := metadata_of(built, PARTITION))
    await bench.store.copy_log_segment_data(attempt, built.log_segment_data(attempt))
    if is_cut:
        await bench.metadata.put_cut(PARTITION, 6, 20)
    for _ in range(5):
        await bench.copy_all()
        bench.now_ms += MINUTE_MS
    void = [(30, 59)] * is_cut
    assert bench.finished[: len(void) + 1] == [*void, (60, 89)]
    assert bench.state.gaps(PARTITION) == gaps
    assert RemoteLog(bench.state, PARTITION).attempt_at_head(0, 60) is None


async def test_a_gap_is_recorded_over_an_attempt_that_a_cut_voids(bench: Workbench) -> None:
    await with_lost_segments(bench)
    built = build_segment(bench.folder / "attempt", batches(120, 150), 120)
    await bench.metadata.add_remote_log_segment_metadata(metadata_of(built, PARTITION))
    await bench.metadata.put_cut(PARTITION, 1, 110)
    bench.log.log_start_offset = 180
    for _ in range(3):
        await bench.copy_all()
        bench.now_ms += MINUTE_MS
    assert bench.state.gaps(PARTITION) == [LogGap(90, 180)]
