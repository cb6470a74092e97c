"""The orphans of a store, and the objects that look like orphans and are never deleted."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from uuid import uuid4

import pytest
import typer
from typer.testing import CliRunner

from proxy.commands.tier import orphans as command
from tests.support.fakes.segments import PARTITION
from tests.support.proxy.command_bench import CLUSTER_ID, CommandBench
from tiers.access.open_tier import RemoteTierError
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadataUpdate, RemoteLogSegmentState
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.locations import LocatedRemoteStorageManager, StorageLocation
from tiers.storage.object_key import facts_key, log_key, marker_key
from tiers.storage.remote_storage_manager import StoredObject, UnfinishedUpload
from tiers.upkeep.orphans import (
    FACTS,
    LOST,
    MISSING,
    ORPHAN,
    UNKNOWN,
    UPLOAD,
    Orphan,
    OrphanReport,
    delete_orphans,
    find_orphans,
)
from tiers.upkeep.rebuild import plan_rebuild
from tiers.upkeep.runner import HereRunner, OpenedStore

DAY_MS = 86_400_000
FUTURE_MS = 1 << 50


async def found(bench: CommandBench, older_than_ms: int = FUTURE_MS, grace_ms: int = DAY_MS) -> OrphanReport:
    return await find_orphans(bench.tier(), older_than_ms, grace_ms)


def what(report: OrphanReport) -> list[tuple[str, bool]]:
    return [(each.what, each.deletable) for each in report.orphans]


async def test_objects_without_a_record_are_deleted_when_they_are_old_and_shown(bench: CommandBench) -> None:
    kept, orphan = await bench.tiered(0), await bench.stored(0)
    assert what(await found(bench, older_than_ms=0)) == [(ORPHAN, False)] * 2
    report = await found(bench)
    assert what(report) == [(ORPHAN, True)] * 2
    assert {each.segment for each in report.orphans} == {str(orphan.segment_id.id)}
    before = len(bench.files())
    await delete_orphans(bench.tier(), report)
    assert (report.deleted, len(bench.files())) == (1, before - 2)
    assert await bench.storage.fetch_indexes(kept)
    assert what(await found(bench)) == []


async def test_an_object_without_a_time_counts_as_new(bench: CommandBench, monkeypatch: pytest.MonkeyPatch) -> None:
    await bench.tiered(0)
    await bench.stored(0)
    listed = bench.storage.list_objects

    async def timeless(prefix: str) -> AsyncIterator[StoredObject]:
        async for stored in listed(prefix):
            yield replace(stored, modified_ms=None)

    monkeypatch.setattr(bench.storage, "list_objects", timeless)
    assert what(await found(bench)) == [(ORPHAN, False)] * 2
    assert what(await found(bench, grace_ms=0)) == [(ORPHAN, True)] * 2


async def test_copies_in_progress_are_no_orphans(bench: CommandBench, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is announced before the look. Another one is copied during it."""
    await bench.tiered(0)
    await bench.put_facts()
    await bench.rlmm.add_remote_log_segment_metadata(await bench.stored(10))
    assert what(await found(bench)) == []

    async def copied(tier: object) -> None:
        await bench.tiered(20)

    monkeypatch.setattr(type(bench.tier()), "refresh", copied)
    assert what(await found(bench)) == []


async def test_the_objects_of_a_kept_segment_are_none_until_it_is_forgotten(bench: CommandBench) -> None:
    deleted = await bench.tiered(0)
    for state in (RemoteLogSegmentState.DELETE_SEGMENT_STARTED, RemoteLogSegmentState.DELETE_SEGMENT_FINISHED):
        update = RemoteLogSegmentMetadataUpdate(deleted.segment_id, 0, 0, state)
        await bench.rlmm.update_remote_log_segment_metadata(update)
    await bench.tiered(0)
    assert what(await found(bench)) == []
    await bench.rlmm.forget_deleted_segments([deleted.segment_id])
    assert what(await found(bench)) == [(ORPHAN, True)] * 2


async def test_an_object_that_got_a_record_is_not_deleted(bench: CommandBench) -> None:
    await bench.tiered(0)
    late = await bench.stored(10)
    report = await found(bench)
    await bench.rlmm.add_remote_log_segment_metadata(late)
    await delete_orphans(bench.tier(), report)
    assert report.deleted == 0
    assert await bench.storage.fetch_indexes(late)


async def test_metadata_that_lost_its_end_protects_the_partition(bench: CommandBench) -> None:
    """`rebuild` restores the segment behind the last known one, and what a position proves to be lost."""
    bench.topics = {PARTITION.topic_id}
    before = await bench.tiered(0)
    await bench.put_facts()
    lost = await bench.tiered(10)
    del bench.rlmm.segments[lost.segment_id]
    [plan] = (await plan_rebuild(OpenedStore(bench.storage, CLUSTER_ID, bench.ring), HereRunner())).plans
    assert [each.start_offset for each in plan.segments] == [0, 10]
    assert what(await found(bench, grace_ms=0)) == [(LOST, False)] * 2
    await bench.tiered(20)
    assert what(await found(bench, grace_ms=0)) == [(LOST, False)] * 2
    bench.topics = set()
    assert what(await found(bench, grace_ms=0)) == [(LOST, False)] * 2, "the brokers may hide the topic"
    await bench.tiered(10)
    assert what(await found(bench, grace_ms=0)) == [(ORPHAN, True)] * 2
    bench.rlmm.unconfirmed = {PARTITION}
    assert what(await found(bench, grace_ms=0)) == [(LOST, False)] * 2
    assert await bench.storage.fetch_indexes(before)


async def test_metadata_that_knows_nothing_deletes_nothing(bench: CommandBench) -> None:
    await bench.stored(0)
    report = await found(bench)
    assert what(report) == [(ORPHAN, True)] * 2
    with pytest.raises(RemoteTierError, match="it was lost"):
        await delete_orphans(bench.tier(), report)
    assert len(bench.files()) == 2


async def test_strange_objects_are_shown_and_those_of_other_clusters_counted(bench: CommandBench) -> None:
    await bench.tiered(0)
    await bench.storage.put_object("notes.txt", b"mine")
    other = TopicIdPartition(PARTITION.topic_id, 9)
    for cluster_id in (CLUSTER_ID, "another"):
        await bench.storage.put_object(facts_key(cluster_id, other, 0, 5, uuid4()), b"facts")
        await bench.storage.put_object(marker_key(cluster_id), b"{}")
    report = await found(bench)
    assert sorted(what(report)) == [(UNKNOWN, False), (FACTS, False)]
    assert report.other_clusters == 2
    await bench.storage.delete_object("notes.txt")
    await bench.storage.put_object(f".check-{uuid4()}", b"a probe in progress")
    assert what(await found(bench, older_than_ms=0)) == [(FACTS, False)]
    assert sorted(what(await found(bench))) == [(UNKNOWN, False), (FACTS, False)]


async def test_a_record_without_its_objects_is_named(bench: CommandBench) -> None:
    lost = await bench.tiered(0)
    for path in bench.files():
        if path.suffix == ".log":
            path.unlink()
    report = await found(bench)
    assert what(report) == [(MISSING, False)]
    assert report.orphans[0].segment == str(lost.segment_id.id)
    assert report.orphans[0].key.endswith(".log")


class Uploads(LocalRemoteStorageManager):
    """A store that keeps parts of objects."""

    pending: list[UnfinishedUpload]

    async def list_uploads(self) -> AsyncIterator[UnfinishedUpload]:
        for upload in self.pending:
            yield upload

    async def abort_upload(self, upload: UnfinishedUpload) -> None:
        self.pending.remove(replace(upload, location=""))


async def test_uploads_that_nothing_else_ends_are_aborted(bench: CommandBench) -> None:
    finished = await bench.tiered(0)
    started = RemoteLogSegmentState.COPY_SEGMENT_STARTED
    under_way = replace(finished, segment_id=RemoteLogSegmentId(PARTITION, uuid4()), state=started)
    await bench.rlmm.add_remote_log_segment_metadata(under_way)
    nobodys = replace(finished, segment_id=RemoteLogSegmentId(PARTITION, uuid4()))
    uploads = Uploads({"path": str(bench.root), "cluster.id": CLUSTER_ID})
    await uploads.open()
    bench.storage = LocatedRemoteStorageManager(bench.storage, [StorageLocation("east", uploads)])
    keys = [*(log_key(CLUSTER_ID, each) for each in (finished, under_way, nobodys)), log_key("another", nobodys)]
    uploads.pending = [UnfinishedUpload(key, key, started_ms=1000) for key in (*keys, "notes.txt")]

    report = await found(bench, older_than_ms=999)
    assert what(report) == [(UPLOAD, False)] * 3
    report = await found(bench, older_than_ms=1000)
    assert what(report) == [(UPLOAD, True), (UPLOAD, True), (UPLOAD, False)]
    assert report.other_clusters == 1
    await delete_orphans(bench.tier(), report)
    assert (report.deleted, report.aborted) == (0, 2)
    assert [each.key for each in uploads.pending] == [keys[1], keys[3], "notes.txt"]
    assert await bench.storage.fetch_indexes(finished)


@pytest.mark.parametrize(("deleted", "exit_code"), [(1, 0), (0, 1)])
def test_a_deletion_that_the_store_did_not_confirm_is_still_a_finding(
    deleted: int, exit_code: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    report = OrphanReport([Orphan("a.log", 10, 0, ORPHAN, "a", deletable=True)], deleted=deleted)
    monkeypatch.setattr(command, "load_config", lambda path: None)
    monkeypatch.setattr(command, "run_command", lambda work: report)
    app = typer.Typer()
    app.command()(command.orphans)
    answered = CliRunner().invoke(app, ["--config", "tidegate.toml", "--delete", "--yes"])
    assert answered.exit_code == exit_code
    assert f"{deleted} segments were deleted" in answered.stderr
