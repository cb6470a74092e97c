"""`read_all` reads the whole metadata topic into an empty state."""

from __future__ import annotations

import pytest

from tests.support.tiers.following import TOPIC, Cluster, Following, finished
from tests.support.tiers.metadata_state import segment
from tiers.access.open_tier import read_all
from tiers.errors import RemoteLogMetadataNotReadyError


async def test_a_topic_is_read_to_its_end_for_as_long_as_more_of_it_comes(
    cluster: Cluster, following: Following, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A time longer than any wait for a record: a topic of a million segments takes minutes to read."""
    whole = cluster.logs[0] = finished(1, 0) + finished(2, 10) + finished(3, 20)
    ensure_fresh = following.follower.ensure_fresh
    waits: list[int] = []

    async def two_records_a_wait(metadata_partition: int, max_age_ms: int, timeout_ms: int) -> None:
        reached = following.follower.position(0)
        try:
            await ensure_fresh(metadata_partition, max_age_ms, 1 if reached < len(cluster.logs[0]) else timeout_ms)
        except RemoteLogMetadataNotReadyError:
            waits.append(reached)
            cluster.logs[0], all_of_it = whole[: reached + 2], cluster.logs[0]
            await following.poll()
            cluster.logs[0] = all_of_it
            raise

    monkeypatch.setattr(following.follower, "ensure_fresh", two_records_a_wait)
    await read_all(following.follower, TOPIC, 0, 30_000)
    assert waits == [0, 2, 4]
    assert following.state.remote_end_offset(segment(3, 20, 29).topic_id_partition) == 29
    cluster.logs[0] = whole + finished(4, 30)
    with pytest.raises(RemoteLogMetadataNotReadyError, match="metadata partition 0 was not read to its end"):
        await read_all(following.follower, TOPIC, 0, 30_000)
    assert waits == [0, 2, 4, 6], "nothing more came"
