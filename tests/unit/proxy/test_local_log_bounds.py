"""The leader is asked once for verified bounds of all callers. Bounds seen in answers only fill in."""

from __future__ import annotations

import asyncio

import pytest

from proxy.cluster.local_log_bounds import LocalLogBoundsCache, Watermarks
from tests.support.fakes.broker.cluster import FakeCluster, LocalLog
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_tier import TOPIC_ID
from tiers.errors import BrokerError
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds

P0 = TopicIdPartition(TOPIC_ID, 0, "orders")


class SlowCluster(FakeCluster):
    async def bounds(self, partition: TopicIdPartition, timeout_ms: int) -> LocalLogBounds:
        await asyncio.sleep(0)
        return await super().bounds(partition, timeout_ms)


@pytest.fixture
def cluster() -> SlowCluster:
    return SlowCluster(logs={P0: LocalLog([batch_of(10, 20)], 10)})


async def test_concurrent_callers_share_one_request(cluster: SlowCluster) -> None:
    now = [100]
    cache = LocalLogBoundsCache(cluster, lambda: now[0])
    answers = await asyncio.gather(*(cache.ask(P0, 100, 1000) for _ in range(5)))
    assert {answer.bounds.log_start_offset for answer in answers} == {10}
    assert cluster.bounds_asked == 1
    await cache.ask(P0, 90, 1000)
    assert cluster.bounds_asked == 1
    now[0] = 200
    assert (await cache.ask(P0, 101, 1000)).asked_at_ms == 200
    assert cluster.bounds_asked == 2


async def test_a_leader_that_does_not_answer_is_an_error(cluster: SlowCluster) -> None:
    cache = LocalLogBoundsCache(cluster, lambda: 0)
    cluster.is_reachable = False
    with pytest.raises(BrokerError):
        await cache.ask(P0, 0, 1000)
    assert cache.verified(P0) is None


async def test_bounds_from_a_passing_answer_are_the_younger_guess(cluster: SlowCluster) -> None:
    cache = LocalLogBoundsCache(cluster, lambda: 0)
    assert cache.expected_log_start(P0) is None
    assert cache.watermarks(P0) is None
    cache.see(P0, 5, Watermarks(40, 35))
    assert (cache.expected_log_start(P0), cache.watermarks(P0)) == (5, (40, 35))
    await cache.ask(P0, 0, 1000)
    assert (cache.expected_log_start(P0), cache.watermarks(P0)) == (10, (40, 35))
    cache.see(P0, -1, Watermarks(50, 50))
    cache.see(P0, 20, Watermarks(51, 50))
    assert (cache.expected_log_start(P0), cache.watermarks(P0)) == (20, (51, 50))
    verified = cache.verified(P0)
    assert verified is not None
    assert verified.bounds.log_start_offset == 10
