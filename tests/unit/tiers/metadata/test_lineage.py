"""A metadata topic that lost records and grew again is found by leader epochs, and does not count again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import lmdb
import pytest
from kafka.protocol.consumer import ListOffsetsRequest

from tests.support.tiers.following import Cluster, Following, finished
from tests.support.tiers.metadata_state import IDENTITY, PARTITION, open_state, segment
from tests.support.tiers.waiting import until
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
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


async def test_a_topic_that_lost_records_and_grew_again_is_noticed(cluster: Cluster, following: Following) -> None:
    await read_four(cluster, following)
    grown_again(cluster)
    cluster.logs[1] += [segment(3, 100, 109)]
    await is_never_believed(following)
    assert following.follower.is_fresh(1, 60_000), "the other partition is whole"
    assert following.follower.position(1) == 3


async def test_a_fetch_alone_notices_it(
    cluster: Cluster, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No election, as far as the metadata says."""
    await read_four(cluster, following)
    leaders = cluster.leaders
    grown_again(cluster)
    cluster.leaders = leaders
    await is_never_believed(following)


async def test_a_look_at_the_end_alone_notices_it(cluster: Cluster, following: Following) -> None:
    """No Fetch comes back, and the end of the log lies beyond what was read."""
    await read_four(cluster, following)
    grown_again(cluster)
    looking = asyncio.create_task(following.follower.ensure_fresh(0, 0, 60_000))
    await until(lambda: following.follower.trouble is not None)
    assert OTHER_RECORDS in str(following.follower.trouble)
    assert following.follower.fresh_at_ms(0) is None
    looking.cancel()
    await asyncio.wait([looking])


async def test_it_is_never_forgotten_not_even_when_all_records_are_there_again(
    cluster: Cluster, tmp_path: Path
) -> None:
    state = open_state(tmp_path)
    before = Following(cluster, state)
    await read_four(cluster, before)
    records = list(cluster.logs[0])
    grown_again(cluster)
    await before.poll()
    before.follower.close()
    state.close()
    cluster.logs[0], cluster.epoch_starts[0] = records, {0: 0}
    cluster.lead(7)
    assert cluster.epoch_end(0, 0).end_offset == 4
    for reopened in ("as it is", "after a contradiction"):
        state = RemoteLogMetadataStateWriter.open(
            tmp_path,
            IDENTITY,
            map_size_bytes=1 << 24,
        )
        following = Following(cluster, state)
        await is_never_believed(following)
        following.follower.close()
        if reopened == "after a contradiction":
            state.start_over("the saved state contradicts itself")
            assert list(state.diverged()) == [0]
        state.close()


async def test_a_saved_state_is_compared_with_the_topic_before_it_is_believed(cluster: Cluster, tmp_path: Path) -> None:
    state = open_state(tmp_path)
    before = Following(cluster, state)
    await read_four(cluster, before)
    before.follower.close()
    grown_again(cluster)
    after = Following(cluster, state)
    with pytest.raises(RemoteLogMetadataNotReadyError):
        await after.follower.ensure_fresh(0, 60_000, 50)
    await is_never_believed(after)
    after.follower.close()
    state.close()


async def test_records_read_before_a_new_start_count_too(cluster: Cluster, tmp_path: Path) -> None:
    """From offset 0 every Fetch is whole."""
    state = open_state(tmp_path)
    before = Following(cluster, state)
    await read_four(cluster, before)
    before.follower.close()
    state.start_over("it is old")
    assert state.reached(0) == OffsetAndEpoch(4, 0)
    grown_again(cluster)
    after = Following(cluster, state)
    await after.poll()
    assert OTHER_RECORDS in str(after.follower.trouble)
    assert after.follower.position(0) == 0
    assert not after.follower.is_fresh(0, 60_000)
    after.follower.close()
    state.close()


async def test_a_log_that_only_ends_early_may_be_whole_again(cluster: Cluster, following: Following) -> None:
    """A later leader has all records. The one in between had written nothing."""
    await read_four(cluster, following)
    records = list(cluster.logs[0])
    cluster.cut(0, 3)
    assert not await following.poll()
    assert "metadata partition 0 ends at 3 and was read to 4" in str(following.follower.trouble)
    assert following.follower.fresh_at_ms(0) is None
    cluster.logs[0], cluster.epoch_starts[0] = records, {0: 0}
    cluster.lead(7)
    assert await following.poll()
    assert following.follower.trouble is None
    assert following.follower.is_fresh(0, 60_000)
    assert following.state.diverged() == {}


async def test_a_log_that_ended_early_and_grows_past_it_is_not_whole_again(
    cluster: Cluster, following: Following
) -> None:
    """Its leader stays, and its end reaches what was read."""
    await read_four(cluster, following)
    cluster.cut(0, 3)
    assert not await following.poll()
    cluster.logs[0] += finished(8, 20)
    await is_never_believed(following)


async def test_an_emptied_log_that_grew_again_is_noticed(cluster: Cluster, following: Following) -> None:
    """Its leader knows no epoch as early as that of what was read."""
    await read_four(cluster, following)
    cluster.logs[0], cluster.epoch_starts[0] = [], {}
    cluster.lead(5)
    cluster.logs[0] += finished(8, 20) + finished(9, 30) + finished(10, 40)
    await following.poll()
    assert "now has other records from 0 on" in str(following.follower.trouble)
    assert list(following.state.diverged()) == [0]


async def test_a_cluster_whose_leader_epochs_went_back_is_noticed(cluster: Cluster, following: Following) -> None:
    """It was restored from an older copy: no leader knows the epoch that was read in."""
    cluster.lead(9)
    await read_four_in(9, cluster, following)
    cluster.leaders, cluster.epoch_starts = dict.fromkeys(cluster.leaders, cluster.leaders[1]), {0: {2: 0}, 1: {9: 0}}
    for _ in range(3):
        await following.poll()
    assert "metadata partition 0 was read to 4 in leader epoch 9" in str(following.follower.trouble)
    assert list(following.state.diverged()) == [0]


async def read_four_in(leader_epoch: int, cluster: Cluster, following: Following) -> None:
    cluster.logs = {0: finished(1, 0) + finished(2, 10), 1: []}
    cluster.epoch_starts = {0: {leader_epoch: 0}, 1: {leader_epoch: 0}}
    assert await following.poll()
    assert following.follower.read_to(0) == (4, leader_epoch)


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
        if isinstance(message, ListOffsetsRequest):
            return answer
        for topic in answer.topics:
            for partition in topic.partitions:
                partition.error_code = 74 if hasattr(partition, "end_offset") else partition.error_code
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
