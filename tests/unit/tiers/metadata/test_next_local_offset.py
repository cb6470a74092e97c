"""The next local offset for every order of the remote end, a gap and the local log."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.fakes.record_batches import build_batch, record
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.model.log_start import LogGap

P0 = TopicIdPartition(TOPIC_ID, 0, "orders")


@pytest.mark.parametrize(
    ("local_start", "lso", "gap_end", "expected"),
    [
        (3, 10, None, 4),
        (5, 10, None, 5),
        (5, 10, 7, 5),
        (7, 10, 7, 7),
        (8, 10, 7, 8),
        (2, 3, None, 3),
        (4, 4, None, 4),
        (6, 6, 7, 6),
        (0, 10, 7, 4),
    ],
)
async def test_behind_the_remote_end(
    tmp_path: Path, local_start: int, lso: int, gap_end: int | None, expected: int
) -> None:
    tier = RemoteTier(tmp_path)
    await tier.add(P0, [build_batch(0, [record(number) for number in range(4)], leader_epoch=2)], 0)
    if gap_end is not None:
        await tier.rlmm.put_log_gap(P0, LogGap(4, gap_end), 5)
    assert RemoteLog(tier.state, P0).next_local(LocalLogBounds(local_start, lso, 10, 5)) == expected


@pytest.mark.parametrize("local_start", [0, 8])
def test_where_the_log_begins_if_nothing_is_remote(tmp_path: Path, local_start: int) -> None:
    metadata = RemoteTier(tmp_path).rlmm
    assert RemoteLog(metadata.state, P0).next_local(LocalLogBounds(local_start, 10, 10, 5)) == local_start
