"""`MetadataFollower` with a full disk or a bug: it reports the trouble, and counts as not fresh."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import lmdb
import pytest

from tests.support.tiers.following import NODE, Cluster, Following, finished
from tests.support.tiers.metadata_state import NOW_MS, open_state, segment
from tests.support.tiers.waiting import until
from tiers.errors import RemoteLogMetadataError, RemoteLogMetadataNotReadyError
from tiers.metadata.records.serde import key_of
from tiers.metadata.state.layout import Databases
from tiers.metadata.state.replay import MetadataEvent, PartitionRead


@pytest.mark.parametrize(
    ("fails", "error"),
    [("apply", lmdb.MapFullError("mdb_put: MDB_MAP_FULL")), ("unfinished_rebuilds", ZeroDivisionError("unexpected"))],
    ids=["full", "broken"],
)
async def test_a_state_that_cannot_be_written_is_trouble_and_not_fresh(
    cluster: Cluster,
    following: Following,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    fails: str,
    error: Exception,
) -> None:
    cluster.logs[0] = finished(1, 0)
    works = getattr(following.state, fails)

    def raises(*arguments: Any) -> Any:
        raise error

    monkeypatch.setattr(following.state, fails, raises)
    reading = asyncio.create_task(following.follower.run())
    try:
        await until(lambda: following.follower.trouble is not None)
        assert str(error) in str(following.follower.trouble)
        assert following.follower.oldest_age_ms() is None
        with pytest.raises(RemoteLogMetadataNotReadyError):
            await following.follower.ensure_fresh(0, 60_000, 50)
        assert [each.message for each in caplog.records].count("the remote log metadata is not followed") == 1
        monkeypatch.setattr(following.state, fails, works)
        await following.follower.ensure_fresh(0, 60_000, 20_000)
        await until(lambda: following.follower.trouble is None)
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def test_a_write_that_has_room_ends_no_trouble_of_another_leader(
    cluster: Cluster, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The state has room for the times of the reads, and none for the records that one of two leaders has."""
    cluster.logs[0] = finished(1, 0)
    leadership, has_room = following.follower._leadership, False
    monkeypatch.setattr(leadership, "nodes", lambda: {NODE, NODE + 1})
    monkeypatch.setattr(leadership, "led_by", lambda node_id: [node_id - NODE])
    apply, poll = following.state.apply, following.follower._poll
    troubles: list[str | None] = []

    def apply_if_there_is_room(reads: Any) -> Any:
        if not has_room:
            raise lmdb.DiskError("No space left on device")
        return apply(reads)

    async def poll_and_look(node_id: int, partitions: Any) -> bool:
        is_whole = await poll(node_id, partitions)
        troubles.append(following.follower.trouble_of_all)
        return is_whole

    monkeypatch.setattr(following.state, "apply", apply_if_there_is_room)
    monkeypatch.setattr(following.follower, "_poll", poll_and_look)
    reading = asyncio.create_task(following.follower.run())
    try:
        await until(lambda: following.follower.trouble_of_all is not None)
        troubles.clear()
        await until(lambda: len(troubles) >= 5)
        assert all(troubles)
        has_room = True
        await until(lambda: following.follower.trouble_of_all is None)
    finally:
        reading.cancel()
        await asyncio.wait([reading])


async def test_a_full_disk_does_not_hinder_the_closing(
    following: Following, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert await following.poll()

    def full(read_at_ms: object) -> None:
        raise lmdb.DiskError("No space left on device")

    monkeypatch.setattr(following.state, "mark_read_to_end", full)
    following.follower.close()


def test_a_state_without_room_is_kept_and_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_one = open_state(tmp_path)
    made = segment(1, 0, 9)
    with_one.apply([PartitionRead(0, [MetadataEvent(0, NOW_MS, key_of(made), made)], 1)])
    with_one.close()

    def full(env: lmdb.Environment) -> None:
        raise lmdb.DiskError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Databases, "open", full)
        with pytest.raises(RemoteLogMetadataError, match="No space left"):
            open_state(tmp_path)
    again = open_state(tmp_path)
    assert again.next_offset(0) == 1
    again.close()
