"""The objects of a deleted segment are deleted once more after a day, and only then the segment is forgotten."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.interposed import before, refuse
from tests.support.tiers.topic_deletion_bench import put_segments
from tests.support.tiers.workbench import PARTITION, Workbench, with_retention
from tiers.errors import CircuitOpenError, OwnershipLostError, RemoteStorageError
from tiers.metadata.partition_facts import facts_of
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.storage.object_key import indexes_key, log_key, marker_key
from tiers.tasks.deletion import segment_deletion
from tiers.tasks.deletion.segment_deletion import forget_deleted_segments

DAY_MS = 86_400_000


@pytest.fixture
async def late(bench: Workbench) -> RemoteLogSegmentMetadata:
    """A deleted segment whose objects a paused process writes after the deletion."""
    bench.log.append(*(batch_of(10 * number, 10, value_bytes=15) for number in range(5)))
    await bench.copy_all()
    (segment,) = bench.segments
    assert await bench.expire(with_retention(retention_bytes=0)) == 1
    assert await bench.objects() == []
    for key in (log_key("cluster", segment), indexes_key("cluster", segment)):
        await bench.store.put_object(key, b"late")
    return segment


@pytest.mark.parametrize("skew_ms", [-50_000, 0, 50_000])
async def test_a_late_object_is_deleted_after_a_day_of_the_brokers_clock(
    bench: Workbench, late: RemoteLogSegmentMetadata, skew_ms: int
) -> None:
    """The brokers' clock is ahead of this machine's by `skew_ms`, which the proxy tolerates."""
    bench.metadata.skew_ms = skew_ms
    (deleted,) = bench.state.deleted_segments(PARTITION)
    assert (deleted.segment_id, deleted.state) == (late.segment_id, RemoteLogSegmentState.DELETE_SEGMENT_FINISHED)
    bench.wall_ms = deleted.event_timestamp_ms + DAY_MS - skew_ms - 1
    assert await forget_deleted_segments(bench.services) == 0
    assert len(await bench.objects()) == 2
    bench.wall_ms += 1
    assert await forget_deleted_segments(bench.services) == 1
    assert (await bench.objects(), bench.state.deleted_segments()) == ([], [])
    assert await forget_deleted_segments(bench.services) == 0


@pytest.mark.parametrize(
    ("refusal", "are_others_forgotten"),
    [(RemoteStorageError("403 Forbidden"), True), (CircuitOpenError("the circuit breaker is open"), False)],
)
async def test_a_segment_that_cannot_be_deleted_holds_up_no_other(
    bench: Workbench, monkeypatch: pytest.MonkeyPatch, refusal: RemoteStorageError, are_others_forgotten: bool
) -> None:
    monkeypatch.setattr(segment_deletion, "_FORGOTTEN_AT_ONCE", 10)
    await put_segments(bench, 25)
    await bench.expire(with_retention(retention_bytes=0))
    bench.wall_ms += 2 * DAY_MS
    known = {one.segment_id for one in bench.state.deleted_segments()}
    first = bench.state.deleted_segments()[0].segment_id
    asked = refuse(monkeypatch, bench.store, "delete_log_segment_data", refusal, lambda each: each.segment_id == first)
    with pytest.raises(type(refusal)):
        await forget_deleted_segments(bench.services)
    left = {one.segment_id for one in bench.state.deleted_segments()}
    assert len(known) == 25
    assert (left == {first}) is are_others_forgotten
    assert ({each.segment_id for each in asked} == known) is are_others_forgotten
    assert first in left


async def test_a_segment_that_is_announced_again_keeps_its_objects(
    bench: Workbench, late: RemoteLogSegmentMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job announces a segment again, while the list of the deleted segments is being worked on."""
    again = replace(late, state=RemoteLogSegmentState.COPY_SEGMENT_STARTED)
    announce = bench.metadata.add_remote_log_segment_metadata
    before(monkeypatch, bench.metadata, "clock_skew_ms", lambda _: announce(again))
    bench.wall_ms += DAY_MS
    assert await forget_deleted_segments(bench.services) == 0
    assert len(await bench.objects()) == 2


async def test_only_the_owner_forgets_in_its_place_by_a_clock_that_it_trusts(
    bench: Workbench, late: RemoteLogSegmentMetadata, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.wall_ms += DAY_MS
    bench.metadata.owned = False
    assert await forget_deleted_segments(bench.services) == 0
    bench.metadata.owned = True

    bench.metadata.skew_ms = 61_000
    assert await forget_deleted_segments(bench.services) == 0
    bench.metadata.skew_ms = 0

    async def unconfirmed(metadata: RemoteLogSegmentMetadata) -> bool:
        return False

    async def lost(metadata: RemoteLogSegmentMetadata) -> bool:
        bench.metadata.owned = False
        return True

    monkeypatch.setattr(bench.store, "delete_log_segment_data", unconfirmed)
    assert await forget_deleted_segments(bench.services) == 0
    monkeypatch.setattr(bench.store, "delete_log_segment_data", lost)
    with pytest.raises(OwnershipLostError):
        await forget_deleted_segments(bench.services)
    assert [one.segment_id for one in bench.state.deleted_segments()] == [late.segment_id]
    bench.metadata.owned = True
    await bench.store.delete_object(marker_key("cluster"))
    with pytest.raises(RemoteStorageError, match="another place"):
        await forget_deleted_segments(bench.services)


async def test_the_facts_call_a_kept_segment_dead(bench: Workbench, late: RemoteLogSegmentMetadata) -> None:
    """Otherwise `rebuild` would take its late objects for those of a newer segment, unless the log start passed it."""
    assert late.segment_id.id not in facts_of(bench.metadata.log, "cluster", PARTITION).dead
    bench.metadata.all_log_starts.clear()
    assert late.segment_id.id in facts_of(bench.metadata.log, "cluster", PARTITION).dead
