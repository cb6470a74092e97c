"""A rebuild of the metadata topic that has not ended: a process reads what is written, and believes none of it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.support.tiers.following import TOPIC, Cluster, Following, finished, opened
from tests.support.tiers.metadata_state import NEIGHBOUR, NOW_MS, PARTITION, segment, to
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.records.serde import KeyAndValue, key_and_value
from tiers.model.segment_state import RemoteLogSegmentState as State
from tiers.upkeep.importing import as_a_whole

OTHER = segment(7, 0, 9, partition=NEIGHBOUR)
REBUILT: dict[int, Sequence[KeyAndValue]] = {
    0: [each if isinstance(each, tuple) else key_and_value(each) for each in [*finished(1, 0), *finished(2, 10)]],
    1: [key_and_value(OTHER), key_and_value(to(OTHER, State.COPY_SEGMENT_FINISHED))],
}


def writes() -> list[tuple[int, KeyAndValue]]:
    """The records in the order in which `rebuild` writes them, each with its metadata partition."""
    announced, whole = as_a_whole(TOPIC, REBUILT, NOW_MS)
    return [(number, pair) for records in (announced, whole) for number, each in records.items() for pair in each]


async def is_not_believed(following: Following) -> None:
    for number in (0, 1):
        assert following.follower.fresh_at_ms(number) is None, "and so the process owns nothing there"
        assert following.state.fresh_at_ms(number) is None
        with pytest.raises(RemoteLogMetadataNotReadyError, match="has not written all records"):
            await following.follower.ensure_fresh(number, 60_000, 5)
    assert "delete the topic and rebuild it again" in str(following.follower.trouble)


@pytest.mark.parametrize("count", range(1, len(writes())))
async def test_a_rebuild_that_ended_early_is_believed_by_no_process(
    cluster: Cluster, tmp_path: Path, count: int
) -> None:
    for number, pair in writes()[:count]:
        cluster.logs[number].append(pair)
    for _ in range(2):
        with opened(cluster, tmp_path) as following:
            assert await following.poll()
            await is_not_believed(following)


async def test_a_rebuild_is_believed_from_its_end_on(cluster: Cluster, following: Following) -> None:
    for number, pair in writes():
        cluster.logs[number].append(pair)
        assert await following.poll()
        assert following.follower.is_fresh(0, 60_000) is ((number, pair) == writes()[-1])
    assert following.follower.trouble is None
    assert following.follower.is_fresh(1, 60_000)
    assert [each.start_offset for each in following.state.list_remote_log_segments(PARTITION)] == [0, 10]
    assert following.state.remote_end_offset(NEIGHBOUR) == 9
    assert set(following.state.partitions()) == {PARTITION, NEIGHBOUR}
