"""The start of the log of both tiers, with gaps, and the leader epoch of each offset."""

from __future__ import annotations

from pathlib import Path

import pytest

from proxy.handlers.base import FetchSettings
from tests.support.fakes.log_starts import user_log_start
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tests.support.tiers.segment_metadata import copied, segment
from tiers.config.settings import RemoteLogConfig
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import TopicIdPartition
from tiers.model.log_start import LogGap, LogStart, LogStartReason, OffsetAndEpoch

P0 = TopicIdPartition(TOPIC_ID, 0, "orders")


@pytest.fixture
async def tier(tmp_path: Path) -> RemoteTier:
    """Remote: 10 to 19 in epoch 1, 20 to 29 in epochs 1 and 4."""
    tier = RemoteTier(tmp_path)
    await tier.add(P0, [batch_of(10, 10, leader_epoch=1)], 10)
    await tier.add(P0, [batch_of(20, 5, leader_epoch=1), batch_of(25, 5, leader_epoch=4)], 20)
    return tier


async def test_the_first_offset_that_can_be_read(tier: RemoteTier) -> None:
    log = RemoteLog(tier.state, P0)
    assert RemoteLog(tier.state, TopicIdPartition(TOPIC_ID, 7)).earliest(30) is None
    assert log.earliest(30) == 10
    await tier.rlmm.put_log_start(P0, user_log_start(3))
    assert log.earliest(30) == 10  # 3 to 9 are in neither tier
    assert log.earliest(5) == 5
    await tier.rlmm.put_log_start(P0, user_log_start(15))
    assert log.earliest(30) == 15
    assert [log.remote_position(offset) for offset in (14, 15, 29, 30)] == [None, 15, 29, None]
    await tier.rlmm.put_log_start(P0, user_log_start(30))
    assert log.earliest(40) == 40
    assert log.earliest(20) == 10  # the broker does not confirm the log start


async def test_a_partition_without_copies_begins_at_the_local_log_start(tier: RemoteTier) -> None:
    seen = TopicIdPartition(TOPIC_ID, 3)
    log = RemoteLog(tier.state, seen)
    await tier.rlmm.put_log_start(seen, LogStart(5, 5, LogStartReason.SEEN))
    assert (log.log_start(), log.earliest(30)) == (0, 30)
    assert log.is_at_head(7, 0)
    assert log.lost_trim(0) is None


async def test_a_trim_tells_that_there_were_segments(tier: RemoteTier) -> None:
    log = RemoteLog(tier.state, P0)
    lost, trim = TopicIdPartition(TOPIC_ID, 3), OffsetAndEpoch(9, 5)
    await tier.rlmm.put_local_log_start(P0, OffsetAndEpoch(20, 5))
    await tier.rlmm.put_local_log_start(lost, trim)
    assert [RemoteLog(tier.state, lost).lost_trim(log_start) for log_start in (0, 8, 9)] == [trim, trim, None]
    assert log.lost_trim(0) is None
    await copied(tier.rlmm, segment(lost, 12, 19))
    assert RemoteLog(tier.state, lost).lost_trim(0) == trim, "the records of the trim are not in a later segment"
    assert [log.is_at_head(offset, 0) for offset in (9, 10, 30)] == [True, False, False]
    assert [log.is_at_head(offset, 30) for offset in (30, 40)] == [True, True]
    await tier.rlmm.put_local_log_start(lost, OffsetAndEpoch(0, 5))
    assert RemoteLog(tier.state, lost).lost_trim(0) is None


async def test_the_way_out_of_a_gap(tier: RemoteTier) -> None:
    """Lost: 30 to 39, then 40 to 49, and 60 to 69."""
    log = RemoteLog(tier.state, P0)
    assert not log.has_gap_behind()
    for gap in (LogGap(30, 40), LogGap(40, 50), LogGap(60, 70)):
        await tier.rlmm.put_log_gap(P0, gap, 4)
    assert log.gap_exit(29) is None
    assert log.gap_exit(35) == log.gap_exit(49) == (50, None)
    assert log.remote_position(35) is None
    assert log.has_gap_behind()
    await tier.add(P0, [batch_of(50, 10, leader_epoch=6)], 50)
    assert log.gap_exit(35) == (50, 50)
    assert [log.remote_position(offset) for offset in (9, 29, 30, 49, 50, 60)] == [None, 29, 50, 50, 50, None]
    assert [log.epoch_before_gap(offset) for offset in (29, 30, 45, 65)] == [-1, 4, -1, 6]
    await tier.rlmm.end_log_gap(P0, LogGap(40, 50))
    exit_ = log.gap_exit(35)
    assert exit_ is not None
    assert not exit_.is_remote  # no record explains the offsets 40 to 49
    assert log.remote_position(35) is None


async def test_the_epoch_that_wrote_an_offset(tier: RemoteTier) -> None:
    log = RemoteLog(tier.state, P0)
    assert [log.epoch_at(offset) for offset in (9, 10, 24, 25, 29, 30)] == [-1, 1, 1, 4, 4, -1]
    assert log.last_epoch() == 4
    assert RemoteLog(tier.state, TopicIdPartition(TOPIC_ID, 7)).last_epoch() is None


@pytest.mark.parametrize(("owners_ms", "ours_ms"), [(10_000, 10_000), (10_000, 60_000), (60_000, 10_000), (900, 900)])
def test_no_metadata_is_fresh_for_longer_than_other_owners_wait(owners_ms: int, ours_ms: int) -> None:
    ours = FetchSettings(RemoteLogConfig(visible_after_ms=ours_ms))
    assert ours.metadata_max_age_ms <= owners_ms // 2


@pytest.mark.parametrize(("deleted_to", "is_explained"), [((9, 5), True), ((8, 5), False), ((20, 4), False)])
async def test_a_deletion_after_a_trim_explains_that_there_are_no_segments(
    tier: RemoteTier, deleted_to: tuple[int, int], is_explained: bool
) -> None:
    """The leader denies the deletion, since an unclean election replaced the history of the leader that made it."""
    lost, trim = TopicIdPartition(TOPIC_ID, 3), OffsetAndEpoch(9, 5)
    await tier.rlmm.put_local_log_start(lost, trim)
    await tier.rlmm.put_log_start(lost, LogStart(*deleted_to, LogStartReason.USER))
    assert RemoteLog(tier.state, lost).lost_trim(0) == (None if is_explained else trim)
