"""`MetadataFollower` after a time in which the topic may have removed tombstones that it has not read."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path

import lmdb
import pytest

from tests.support.tiers.following import Cluster, Following, finished, opened
from tests.support.tiers.metadata_state import NEIGHBOUR, NOW_MS, PARTITION, open_state, segment, to
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.records.serde import encode_key, nothing_key
from tiers.metadata.topic.metadata_topic import MIN_DELETE_RETENTION_MS
from tiers.model.segment_metadata import RemoteLogSegmentState as State

AN_HOUR_MS = 3_600_000
HALF_MS = 43_200_000
COMPACTED = (encode_key(nothing_key(PARTITION)), None)
OTHER = segment(7, 0, 9, partition=NEIGHBOUR)


async def read_to_the_end(cluster: Cluster, following: Following) -> None:
    cluster.logs = {0: finished(1, 0), 1: [OTHER, to(OTHER, State.COPY_SEGMENT_FINISHED)]}
    assert await following.poll()
    assert starts(following) == [0]


def expire(cluster: Cluster) -> None:
    """The owner deletes the segment. Compaction removes its records, and then their tombstones."""
    cluster.logs[0] = [COMPACTED, COMPACTED, COMPACTED, *finished(2, 10)]


def starts(following: Following) -> list[int]:
    return [each.start_offset for each in following.state.list_remote_log_segments(PARTITION)]


async def is_read_again(following: Following) -> None:
    """Its records are forgotten before anything is replayed, and it is not fresh until it is read to its end."""
    assert not await following.poll()
    assert starts(following) == []
    assert following.follower.fresh_at_ms(0) is None
    assert following.state.fresh_at_ms(0) is None
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await following.follower.ensure_fresh(0, 0, 1)
    assert following.follower.trouble is None
    assert await following.poll()
    assert starts(following) == [10]
    assert following.follower.is_fresh(0, 60_000)
    assert following.state.fresh_at_ms(0) is not None


async def goes_on(following: Following) -> None:
    assert await following.poll()
    assert starts(following) == [0, 10]


@pytest.mark.parametrize(
    ("monotonic_ms", "wall_ms", "is_again"),
    [(HALF_MS - 60_000, 0, False), (HALF_MS, 0, True), (0, HALF_MS + 1, True), (0, -AN_HOUR_MS, True)],
    ids=["for less", "for long", "a machine stood still", "a clock was set back"],
)
async def test_a_follower_cut_off_for_long_reads_that_partition_again(
    cluster: Cluster, following: Following, monotonic_ms: int, wall_ms: int, is_again: bool
) -> None:
    await read_to_the_end(cluster, following)
    following.now_ms += monotonic_ms
    following.wall_ms += wall_ms
    expire(cluster)
    other_at_ms = following.follower.fresh_at_ms(1) or 0
    await (is_read_again if is_again else goes_on)(following)
    assert following.state.remote_end_offset(NEIGHBOUR) == 9, "the other metadata partition is kept"
    assert following.state.next_offset(1) == 2
    assert (following.follower.fresh_at_ms(1) or 0) > other_at_ms


async def test_a_clock_set_while_the_answer_was_on_its_way_makes_older(
    cluster: Cluster, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The machine stood still after it had asked. Its wall clock is set right when the answer is there."""
    await read_to_the_end(cluster, following)
    fetched = cluster._fetched

    def late(*asked: int) -> object:
        following.wall_ms += HALF_MS // 2 + 1
        return fetched(*asked)

    with monkeypatch.context() as patch:
        patch.setattr(cluster, "_fetched", late)
        assert await following.poll()
    expire(cluster)
    assert not await following.poll()
    assert starts(following) == []


async def test_the_retention_of_tombstones_may_be_altered_meanwhile(cluster: Cluster, following: Following) -> None:
    await read_to_the_end(cluster, following)
    cluster.delete_retention_ms = MIN_DELETE_RETENTION_MS
    following.now_ms += MIN_DELETE_RETENTION_MS // 2
    expire(cluster)
    await is_read_again(following)


async def save(cluster: Cluster, folder: Path) -> None:
    with opened(cluster, folder) as before:
        await read_to_the_end(cluster, before)


async def test_a_saved_state_that_is_too_old_is_read_again(cluster: Cluster, tmp_path: Path) -> None:
    await save(cluster, tmp_path)
    with opened(cluster, tmp_path, later_ms=HALF_MS + 1) as after:
        expire(cluster)
        await is_read_again(after)


async def test_the_last_copy_of_lost_records_is_kept_however_old_it_is(cluster: Cluster, tmp_path: Path) -> None:
    await save(cluster, tmp_path)
    with opened(cluster, tmp_path, later_ms=10 * HALF_MS) as after:
        cluster.logs[0] = []
        assert not await after.poll()
        assert starts(after) == [0]
        assert after.follower.trouble is not None


async def test_a_restart_goes_on_with_the_read_from_the_start(cluster: Cluster, tmp_path: Path) -> None:
    await save(cluster, tmp_path)
    with opened(cluster, tmp_path, later_ms=HALF_MS + 1) as after:
        expire(cluster)
        assert not await after.poll()
    with closing(open_state(tmp_path)) as state:
        assert (state.next_offset(0), state.next_offset(1)) == (0, 2)
        assert state.reached(0).offset == 2, "a log that ends below has lost records"
        assert state.read_at_ms()[0] == NOW_MS + HALF_MS + 1


async def test_a_state_that_could_not_be_cleared_is_not_saved_as_read(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The map has no room to clear the records, but room for the times. The process ends meanwhile."""
    await save(cluster, tmp_path)

    def full(*cleared: object) -> None:
        raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL")

    with opened(cluster, tmp_path, later_ms=HALF_MS + 1) as after:
        expire(cluster)
        monkeypatch.setattr(after.state, "start_over_partitions", full)
        for _ in range(2):
            with pytest.raises(lmdb.MapFullError):
                await after.poll()
    with opened(cluster, tmp_path, later_ms=HALF_MS + 2) as again:
        await is_read_again(again)
