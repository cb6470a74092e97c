"""The proxy's own questions about topics name the topics that a client uses, and no others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from uuid import UUID

import pytest
from kafka.protocol.metadata import MetadataRequest

from protocol.apis.metadata import PartitionMetadata
from tests.support.fakes.remote_tier import TOPIC_ID
from tests.support.proxy.scenario import TOPIC, Scenario, scenario
from tiers.broker.cluster_metadata import TopicMetadata

ROUNDS = 5


@pytest.fixture
async def cast(tmp_path: Path) -> AsyncIterator[Scenario]:
    async with scenario(tmp_path) as made:
        made.broker.topics += [
            TopicMetadata(f"other-{number}", UUID(int=number), {0: PartitionMetadata(0, 1, 5)})
            for number in range(1_000, 1_100)
        ]
        yield made


@pytest.mark.parametrize("version", [4, 11, 12, 13, 17])
async def test_a_consumer_of_remote_data_costs_no_question_about_other_topics(cast: Scenario, version: int) -> None:
    async with cast.client() as client:
        found = 0
        while found < ROUNDS:
            found += bool((await client.fetch(version, 0, 10))[0].records)
    asked = [request.topics for request in cast.broker.sent_by("tidegate", MetadataRequest)]
    assert None not in asked
    assert {topic.name or topic.topic_id for topics in asked for topic in topics} <= {TOPIC, TOPIC_ID}
