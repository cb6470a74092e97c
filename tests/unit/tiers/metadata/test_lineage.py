"""A metadata topic that lost records and grew again is found by leader epochs, and does not count again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import lmdb
import pytest
from kafka.protocol.consumer import OffsetForLeaderEpochRequest

from protocol.errors import ErrorCode
from tests.support.tiers.following import Cluster, Following, finished, opened
from tests.support.tiers.metadata_state import PARTITION, segment
from tests.support.tiers.waiting import until
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.model.log_start import OffsetAndEpoch

OTHER_RECORDS = "metadata partition 0 was read to 4 in leader epoch 0, and now has other records from 3 on"
"""What is said after `grown_again`."""


def grown_again(cluster: Cluster) -> None:
    """Partition 0 loses the last of its four records, and three others are written."""
    cluster.cut(0, 3)
    cluster.logs[0] += [*finished(8, 20), segment(9, 30, 39)]


async def read_four(cluster: Cluster, following: Following) -> None:
    cluster.logs = {0: finished(1, 0) + finished(2, 10), 1: finished(3, 100)}
    assert await following.poll()
    assert following.follower.read_to(0) == (4, 0)
    assert following.state.remote_end_offset(PARTITION) == 109


async def is_never_believed(following: Following) -> None:
    follower = following.follower
    for _ in range(2):
        await following.poll()
        assert not follower.is_fresh(0, 60_000)
        assert follower.fresh_at_ms(0) is None
        with pytest.raises(RemoteLogMetadataNotReadyError, match="now has other records from 3 on"):
            await follower.ensure_fresh(0, 60_000, 50)
        assert OTHER_RECORDS in str(follower.trouble)
        assert "The metadata topic is lost" in str(follower.trouble)
    assert follower.position(0) == 4
    known = [each.segment_id.id.int for each in following.state.list_remote_log_segments(PARTITION)]
    assert known == [1, 2, 3], "what was read before is kept, and nothing is replayed"


@pytest.mark.parametrize("how", ["elected", "as the metadata says, nobody is elected", "seen before it grew"])
async def test_a_topic_that_lost_records_and_grew_again_is_noticed(
    cluster: Cluster, following: Following, how: str
) -> None:
    await read_four(cluster, following)
    leaders = cluster.leaders
    if how == "seen before it grew":
        cluster.cut(0, 3)
        assert not await following.poll()
        cluster.logs[0] += [*finished(8, 20), segment(9, 30, 39)]
    else:
        grown_again(cluster)
    if how.startswith("as"):
        cluster.leaders = leaders
    cluster.logs[1] += [segment(3, 100, 109)]
    await is_never_believed(following)
    assert following.follower.is_fresh(1, 60_000), "the other partition is whole"
    assert following.follower.position(1) == 3


@pytest.mark.parametrize("has_grown", [True, False])
async def test_a_look_at_the_end_alone_notices_it(cluster: Cluster, following: Following, has_grown: bool) -> None:
    """No Fetch comes back. The end of the log lies beyond what was read, or below it."""
    await read_four(cluster, following)
    if has_grown:
        grown_again(cluster)
    else:
        del cluster.logs[0][3:]
    looking = asyncio.create_task(following.follower.ensure_fresh(0, 0, 60_000))
    await until(lambda: following.follower.trouble is not None)
    said = OTHER_RECORDS if has_grown else "metadata partition 0 ends at 3 and was read to 4"
    assert said in str(following.follower.trouble)
    assert following.follower.fresh_at_ms(0) is None
    looking.cancel()
    await asyncio.wait([looking])


async def test_a_loss_counts_also_when_all_records_are_there_again(cluster: Cluster, tmp_path: Path) -> None:
    with opened(cluster, tmp_path) as before:
        await read_four(cluster, before)
        records = list(cluster.logs[0])
        grown_again(cluster)
        await before.poll()
    cluster.logs[0], cluster.epoch_starts[0] = records, {0: 0}
    cluster.lead(7)
    assert cluster.epoch_end(0, 0).end_offset == 4
    with opened(cluster, tmp_path, is_kept=False) as again:
        await is_never_believed(again)
        again.state.start_over("the saved state contradicts itself")
        assert list(again.state.diverged()) == [0]


@pytest.mark.parametrize("starts_over", [False, True])
async def test_a_saved_state_is_compared_with_the_topic(cluster: Cluster, tmp_path: Path, starts_over: bool) -> None:
    """After a new start every Fetch is whole, from offset 0."""
    with opened(cluster, tmp_path) as before:
        await read_four(cluster, before)
        if starts_over:
            before.state.start_over("it is old")
    grown_again(cluster)
    with opened(cluster, tmp_path) as after:
        assert after.state.reached(0) == OffsetAndEpoch(4, 0)
        with pytest.raises(RemoteLogMetadataNotReadyError):
            await after.follower.ensure_fresh(0, 60_000, 50)
        assert OTHER_RECORDS in str(after.follower.trouble)
        assert after.follower.position(0) == (0 if starts_over else 4)
        if not starts_over:
            await is_never_believed(after)


@pytest.mark.parametrize("is_emptied", [True, False])
async def test_a_log_that_lacks_the_epoch_is_noticed(cluster: Cluster, following: Following, is_emptied: bool) -> None:
    """It was emptied and grew again, or the cluster was restored from an older copy, with lower leader epochs."""
    cluster.lead(9)
    cluster.logs = {0: finished(1, 0) + finished(2, 10), 1: []}
    cluster.epoch_starts = {0: {9: 0}, 1: {9: 0}}
    assert await following.poll()
    assert following.follower.read_to(0) == (4, 9)
    if is_emptied:
        cluster.logs[0], cluster.epoch_starts[0] = [], {}
        cluster.lead(15)
        cluster.logs[0] += finished(8, 20) + finished(9, 30) + finished(10, 40)
    else:
        cluster.epoch_starts[0] = {2: 0}
    for _ in range(3):
        await following.poll()
    assert "metadata partition 0 was read to 4 in leader epoch 9" in str(following.follower.trouble)
    assert f"now has other records from {0 if is_emptied else 3} on" in str(following.follower.trouble)
    assert list(following.state.diverged()) == [0]


async def test_elections_that_lose_nothing_are_no_loss(cluster: Cluster, following: Following) -> None:
    await read_four(cluster, following)
    for leader_epoch in (1, 2, 5):
        cluster.lead(leader_epoch)
        assert await following.poll()
        cluster.logs[0] += finished(10 + leader_epoch, 100 * leader_epoch)
        await following.follower._leadership.confirm(1_000)
        assert await following.poll()
        await following.follower.ensure_fresh(0, 60_000, 60_000)
    assert following.follower.trouble is None
    assert following.follower.read_to(0) == (10, 5)
    assert following.state.consumed(0) == OffsetAndEpoch(10, 5)


async def test_no_record_is_replayed_before_its_leader_confirmed_the_epochs(
    cluster: Cluster, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    await read_four(cluster, following)
    answered = cluster.request

    async def silent(node_id: int, message: Any, timeout_ms: int, *, min_version: int) -> Any:
        answer = await answered(node_id, message, timeout_ms, min_version=min_version)
        if isinstance(message, OffsetForLeaderEpochRequest):
            for partition in answer.topics[0].partitions:
                partition.error_code = ErrorCode.FENCED_LEADER_EPOCH
        return answer

    cluster.lead(1)
    cluster.logs[0] += finished(8, 20)
    with monkeypatch.context() as patch:
        patch.setattr(cluster, "request", silent)
        assert not await following.poll()
        assert (following.follower.position(0), following.follower.trouble) == (4, None)
    assert await following.poll()
    assert following.follower.position(0) == 6


async def test_a_divergence_that_cannot_be_saved_is_saved_later(
    cluster: Cluster, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    await read_four(cluster, following)
    grown_again(cluster)

    def full(metadata_partition: int, reason: str) -> None:
        raise lmdb.MapFullError("mdb_put: MDB_MAP_FULL")

    with monkeypatch.context() as patch:
        patch.setattr(following.state, "mark_diverged", full)
        await is_never_believed(following)
        assert following.state.diverged() == {}
    await following.poll()
    assert list(following.state.diverged()) == [0]
