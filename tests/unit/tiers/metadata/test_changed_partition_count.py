"""A metadata topic whose number of partitions was changed, together with the number in the settings.

The records of a user partition are then in two metadata partitions. Their order decides which of two
segments answers, and whether a tombstone comes after its record. So nothing that was read is believed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiers.following import TOPIC, Cluster, Following, finished, opened
from tests.support.tiers.metadata_state import NOW_MS, PARTITION, cut
from tiers.errors import RemoteLogMetadataNotReadyError
from tiers.metadata.records.serde import key_and_value
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import UnfinishedRebuildUpdate

HOME = 1


@pytest.fixture
def settled(cluster: Cluster, tmp_path: Path) -> Iterator[Following]:
    """Every user partition belongs to the second metadata partition."""
    with opened(cluster, tmp_path, lambda partition: HOME) as following:
        yield following


async def test_records_in_their_places_are_believed(cluster: Cluster, settled: Following) -> None:
    own = TopicIdPartition(TOPIC.topic_id, 0, TOPIC.name)
    cluster.logs = {0: [], HOME: finished(1, 0)}
    assert await settled.poll()
    assert settled.follower.is_fresh(0, 60_000)
    cluster.logs[0] += [key_and_value(UnfinishedRebuildUpdate(own, "a", NOW_MS))]
    assert await settled.poll(), "a record about a metadata partition is in that partition"
    assert settled.follower.trouble_of_all is None


async def test_after_a_record_in_another_place_nothing_is_believed(cluster: Cluster, settled: Following) -> None:
    """The order of the records decides which segment answers."""
    cluster.logs = {0: finished(1, 0), HOME: [cut(1, 5)]}
    for _ in range(2):
        await settled.poll()
        for number in (0, HOME):
            assert settled.follower.fresh_at_ms(number) is None
            with pytest.raises(RemoteLogMetadataNotReadyError, match="belong to metadata partition 1 of 2"):
                await settled.follower.ensure_fresh(number, 60_000, 5)
        assert "Rebuild the metadata into a new topic" in str(settled.follower.trouble_of_all)
        assert list(settled.state.list_remote_log_segments(PARTITION)) == []
