"""A member stores what its spool has of a partition that another member owns, and removes what is not needed."""

from __future__ import annotations

from uuid import uuid4

import pytest

from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.segments import build_segment
from tests.support.tiers.attempts import batches
from tests.support.tiers.workbench import PARTITION, Workbench
from tiers.errors import CorruptSegmentError, RemoteLogMetadataNotReadyError
from tiers.model.ids import RemoteLogSegmentId
from tiers.model.segment_metadata import (
    RemoteLogSegmentMetadata,
    RemoteLogSegmentState,
    RemotePartitionDeleteMetadata,
    RemotePartitionDeleteState,
)
from tiers.tasks.copy.copy_attempts import store_for_its_owner
from tiers.tasks.copy.segment_copy import announce, keep
from tiers.tasks.copy.spool import KeptSegment


@pytest.fixture
async def kept(bench: Workbench) -> KeptSegment:
    """Offsets 0 to 29, not announced. The leader's log has 0 to 99."""
    bench.log.append(*batches(0, 100))
    built = build_segment(bench.folder / "built", batches(0, 30), 0)
    return await keep(bench.services, RemoteLogSegmentId(PARTITION, uuid4()), built, 0)


async def test_an_attempt_is_stored_whenever_the_store_lacks_it(
    bench: Workbench, kept: KeptSegment, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The owner may be a long time finishing it. Each look costs one byte."""
    fetch, fetched = bench.store.fetch_log_segment, []

    async def counting(segment: RemoteLogSegmentMetadata, start: int, end: int | None = None) -> memoryview:
        found = await fetch(segment, start, end)
        fetched.append(len(found))
        return found

    monkeypatch.setattr(bench.store, "fetch_log_segment", counting)
    await announce(bench.services, kept.metadata)
    for _ in range(2):
        await store_for_its_owner(bench.services, kept)
        await store_for_its_owner(bench.services, kept)
        assert [key.rpartition(".")[2] for key in await bench.objects()] == ["indexes", "log"]
        await bench.store.delete_log_segment_data(kept.metadata)
    assert set(fetched) == {1}
    assert bench.services.spool.kept() == [kept]


async def test_an_object_that_the_store_damaged_stays_for_its_owner(bench: Workbench, kept: KeptSegment) -> None:
    await announce(bench.services, kept.metadata)
    await store_for_its_owner(bench.services, kept)
    [path] = (bench.folder / "remote").rglob("*.indexes")
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CorruptSegmentError):
        await store_for_its_owner(bench.services, kept)
    assert bench.services.spool.kept() == [kept]


@pytest.mark.parametrize(
    ("known", "is_kept", "is_stored"),
    [
        ("nothing", True, False),
        ("nothing, and a log start behind it", False, False),
        ("nothing, and a log start within it", True, False),
        ("an attempt", True, True),
        ("an attempt, and a log start behind it", True, True),  # its owner confirms the log start
        ("an attempt that a CUT voids", False, False),
        ("a finished copy", False, False),
        ("a deletion that has begun", True, False),
        ("a deleted topic", False, False),
    ],
)
async def test_only_attempts_are_stored(
    bench: Workbench, kept: KeptSegment, known: str, is_kept: bool, is_stored: bool
) -> None:
    services, attempt = bench.services, kept.metadata
    if not known.startswith("nothing"):
        await announce(services, attempt)
    if "log start" in known:
        bench.log.log_start_offset = 30 if "behind" in known else 29
        await bench.metadata.put_log_start(PARTITION, user_log_start(bench.log.log_start_offset, leader_epoch=0))
    if "CUT" in known:
        await bench.metadata.put_cut(PARTITION, 1, 0)
    if known == "a finished copy":
        await services.write_state(attempt, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)
    if known == "a deletion that has begun":
        await services.write_state(attempt, RemoteLogSegmentState.DELETE_SEGMENT_STARTED)
    if known == "a deleted topic":
        begun = RemotePartitionDeleteState.DELETE_PARTITION_MARKED
        await bench.metadata.put_remote_partition_delete_metadata(
            RemotePartitionDeleteMetadata(PARTITION, 0, bench.wall_ms, begun)
        )
    await store_for_its_owner(services, kept)
    assert (
        services.spool.kept() == [kept],
        any(str(attempt.segment_id.id) in key for key in await bench.objects()),
    ) == (is_kept, is_stored)


async def test_metadata_that_is_not_fresh_decides_nothing(bench: Workbench, kept: KeptSegment) -> None:
    await announce(bench.services, kept.metadata)
    await bench.services.write_state(kept.metadata, RemoteLogSegmentState.COPY_SEGMENT_FINISHED)
    bench.metadata.fresh = False
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await store_for_its_owner(bench.services, kept)
    assert bench.services.spool.kept() == [kept]
