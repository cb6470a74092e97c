"""A failing store gets one attempt per partition, not one per round, and copying resumes by itself."""

from __future__ import annotations

from uuid import UUID

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import Workbench
from tiers.errors import (
    RemoteLogMetadataError,
    RemoteStorageError,
    RetriableRemoteStorageError,
    SomeStoresInTroubleError,
)
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.storage.remote_storage_manager import LogSegmentData
from tiers.tasks.deletion.failed_deletions import FailedDeletions

ROUND_MS = 30_000
MINUTE_MS = 60_000
HOUR_MS = 60 * MINUTE_MS


class Outage:
    """A store with scripted answers, which counts attempts. `kept`: objects that it refuses to delete."""

    def __init__(self, bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.bench = bench
        self.error: RemoteStorageError | None = None
        self.kept: dict[UUID, RemoteStorageError] = {}
        self.started: list[UUID] = []
        copy, delete = bench.store.copy_log_segment_data, bench.store.delete_log_segment_data
        add = bench.metadata.add_remote_log_segment_metadata

        async def copying(metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
            if self.error is not None:
                raise self.error
            return await copy(metadata, data)

        async def deleting(metadata: RemoteLogSegmentMetadata) -> bool:
            error = self.error or self.kept.get(metadata.segment_id.id)
            if error is not None:
                raise error
            return await delete(metadata)

        async def adding(metadata: RemoteLogSegmentMetadata) -> None:
            self.started.append(metadata.segment_id.id)
            await add(metadata)

        monkeypatch.setattr(bench.store, "copy_log_segment_data", copying)
        monkeypatch.setattr(bench.store, "delete_log_segment_data", deleting)
        monkeypatch.setattr(bench.metadata, "add_remote_log_segment_metadata", adding)

    async def rounds(self, lasting_ms: int) -> int:
        """Every round fails; returns how many attempts they began."""
        before = len(self.started)
        for _ in range(lasting_ms // ROUND_MS):
            with pytest.raises(RemoteStorageError):
                await self.bench.copy()
            self.pass_time()
        return len(self.started) - before

    def pass_time(self) -> None:
        self.bench.now_ms += ROUND_MS
        self.bench.wall_ms += ROUND_MS


@pytest.fixture
def outage(bench: Workbench, monkeypatch: pytest.MonkeyPatch) -> Outage:
    """Offsets 0 to 89 make three segments; ten more are only local."""
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(10)])
    return Outage(bench, monkeypatch)


DOWN = RetriableRemoteStorageError("connection refused")
ONE_DOWN = SomeStoresInTroubleError("location 'east': connection refused")
DENIED = RemoteStorageError("403 AccessDenied")


async def test_copying_resumes_by_itself_after_the_store_was_down(bench: Workbench, outage: Outage) -> None:
    outage.error = DOWN
    assert await outage.rounds(15 * MINUTE_MS) == 1
    assert bench.steps == ["segment-built", "copy-started-written", "delete-started-written"]
    outage.error = None
    await bench.copy_all()
    assert bench.finished == [(0, 29), (30, 59), (60, 89)]
    assert len(bench.segments) == 3


async def test_attempts_become_rare_in_a_long_outage_and_restarts_begin_none(bench: Workbench, outage: Outage) -> None:
    outage.error = DOWN
    assert await outage.rounds(HOUR_MS) == 3
    for _ in range(3):
        bench.restart()
        object.__setattr__(bench.services, "failed_deletions", FailedDeletions(bench.failed_deletion_log))
        assert await outage.rounds(5 * MINUTE_MS) == 0
    assert await outage.rounds(6 * HOUR_MS) <= 7
    outage.error = None
    await bench.copy_all()
    assert bench.finished == [(0, 29), (30, 59), (60, 89)]


async def test_credentials_that_expired_get_few_attempts_too(bench: Workbench, outage: Outage) -> None:
    outage.error = DENIED
    assert await outage.rounds(HOUR_MS) <= 7


@pytest.mark.parametrize(("error", "waits_ms"), [(DENIED, MINUTE_MS), (ONE_DOWN, MINUTE_MS), (DOWN, 15 * MINUTE_MS)])
async def test_one_object_that_never_goes_holds_copying_up_once(
    bench: Workbench, outage: Outage, error: RemoteStorageError, waits_ms: int
) -> None:
    outage.error = DOWN
    await outage.rounds(ROUND_MS)
    (stuck,) = outage.started
    outage.error, outage.kept = None, {stuck: error}
    assert await outage.rounds(waits_ms) == 0
    await bench.copy_all()
    assert bench.finished == [(0, 29), (30, 59), (60, 89)]
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15) for n in range(10, 16)])
    await bench.copy_all()
    assert bench.finished[3:] == [(90, 119), (120, 149)]
    (left,) = [one for one in bench.segments if one.state is RemoteLogSegmentState.DELETE_SEGMENT_STARTED]
    assert left.segment_id.id == stuck


async def test_asking_how_the_store_is_publishes_nothing(bench: Workbench, outage: Outage) -> None:
    """The segment is published by its own backoff: five attempts take 30 + 60 + 120 + 240 seconds."""
    outage.error = DOWN
    await outage.rounds(8 * MINUTE_MS)
    assert bench.failed_deletion_log.published == {}
    await outage.rounds(MINUTE_MS)
    (published,) = bench.failed_deletion_log.published.values()
    assert published.attempts == 5


async def test_a_clock_that_was_put_back_does_not_hold_copying_up(bench: Workbench, outage: Outage) -> None:
    outage.error = DOWN
    await outage.rounds(ROUND_MS)
    (stuck,) = outage.started
    outage.error, outage.kept = None, {stuck: DOWN}
    with pytest.raises(RetriableRemoteStorageError, match="copying waits"):
        await bench.copy()
    bench.wall_ms -= 24 * HOUR_MS
    await bench.copy_all()
    assert len(bench.finished) == 3


async def test_a_record_that_cannot_be_taken_back_is_not_the_stores_trouble(bench: Workbench, outage: Outage) -> None:
    outage.error = DOWN
    await outage.rounds(9 * MINUTE_MS)
    assert len(bench.failed_deletion_log.published) == 1
    outage.error, bench.failed_deletion_log.failure = None, RemoteLogMetadataError("not writable")
    await bench.copy_all()
    assert len(bench.finished) == 3
