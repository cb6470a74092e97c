"""Where the log of both tiers starts, holes included, and which epoch wrote what."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.tiered_partitions import TieredPartitions
from tests.fakes.record_batches import batch_of
from tests.fakes.remote_tier import TOPIC_ID, RemoteTier
from tiers.model.ids import TopicIdPartition

P0 = TopicIdPartition(TOPIC_ID, 0, "orders")


@pytest.fixture
async def tier(tmp_path: Path) -> RemoteTier:
    """Remote: 10 to 19 in epoch 1, 20 to 29 in epochs 1 and 4."""
    tier = RemoteTier(tmp_path)
    await tier.add(P0, [batch_of(10, 10, leader_epoch=1)], 10)
    await tier.add(P0, [batch_of(20, 5, leader_epoch=1), batch_of(25, 5, leader_epoch=4)], 20)
    return tier


async def test_the_first_offset_that_can_be_read(tier: RemoteTier) -> None:
    tiered = TieredPartitions(tier.rlmm, 1000)
    assert tiered.earliest_readable(TopicIdPartition(TOPIC_ID, 7), 30) is None
    assert tiered.earliest_readable(P0, 30) == 10
    await tier.rlmm.raise_log_start_offset(P0, 3)
    assert tiered.earliest_readable(P0, 30) == 10  # 3 to 9 are in neither tier
    assert tiered.earliest_readable(P0, 5) == 5
    await tier.rlmm.raise_log_start_offset(P0, 15)
    assert tiered.earliest_readable(P0, 30) == 15
    assert [tiered.holds(P0, offset) for offset in (14, 15, 29, 30)] == [False, True, True, False]
    await tier.rlmm.raise_log_start_offset(P0, 30)
    assert tiered.earliest_readable(P0, 40) == 40
    assert tiered.earliest_readable(P0, 20) == 30  # what was deleted stays deleted


async def test_the_epoch_that_wrote_an_offset(tier: RemoteTier) -> None:
    tiered = TieredPartitions(tier.rlmm, 1000)
    assert [tiered.leader_epoch_at(P0, offset) for offset in (9, 10, 24, 25, 29, 30)] == [-1, 1, 1, 4, 4, -1]
    assert tiered.last_leader_epoch(P0) == 4
    assert tiered.last_leader_epoch(TopicIdPartition(TOPIC_ID, 7)) is None


async def test_metadata_that_cannot_be_read_is_not_fresh(tier: RemoteTier) -> None:
    tiered = TieredPartitions(tier.rlmm, 1000)
    assert await tiered.ensure_fresh(P0, 10)
    tier.rlmm.fresh = False
    assert not await tiered.ensure_fresh(P0, 10)
