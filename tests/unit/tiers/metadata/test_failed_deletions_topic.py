"""Without a failure there is no topic of failed deletions, and every expiring segment asks for it."""

from __future__ import annotations

from uuid import UUID

import pytest
from kafka.protocol.metadata import MetadataRequest

from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tiers.broker.client import BrokerClient
from tiers.tasks.deletion.failed_deletions import FailedDeletionsTopic


async def test_the_cluster_is_asked_for_a_missing_topic_only_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("tiers.broker.metadata_reads._OTHER_BROKER_MS", 30_000)  # who is given up may be heard later
    now_ms = 1_000
    async with ScriptedBroker() as broker:
        client = BrokerClient([("127.0.0.1", broker.port)], client_id="test", clock_ms=lambda: now_ms)
        topic = FailedDeletionsTopic(client, 5_000, clock_ms=lambda: now_ms)
        await client.open()
        asked = []
        for now_ms in (1_000, 1_001, 5_999, 6_000, 6_001):
            await topic.retract(UUID(int=now_ms))
            asked.append(len(broker.received(MetadataRequest)))
        await client.close()
    first, *later = asked
    assert first > 1, "what was known may be older than the topic"
    assert later[0] == later[1] == first
    assert later[2] == later[3] > first
