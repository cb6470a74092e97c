"""The topic of the remote log metadata is not for clients to make, change, widen or delete; every version."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.admin import (
    CreatePartitionsRequest,
    CreatePartitionsResponse,
    CreateTopicsRequest,
    CreateTopicsResponse,
)

from proxy.handlers.alter_configs import UNKNOWN_KEY
from proxy.handlers.guards import MetadataTopicGuard
from tests.support.proxy.topic_configs_bench import (
    METADATA_TOPIC,
    OTHER,
    Bench,
    alter,
    codes_of,
    incremental,
    sent,
)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with asyncio.TaskGroup() as group:
        yield Bench(group.create_task)


async def test_the_metadata_topic_cannot_be_altered(bench: Bench) -> None:
    request = incremental({METADATA_TOPIC: [("retention.ms", 0, "1")], "orders": [(OTHER, 0, "1")]})
    seen, response = await alter(bench, request)
    assert sent(seen) == {METADATA_TOPIC: [UNKNOWN_KEY], "orders": [OTHER]}
    assert codes_of(response) == {METADATA_TOPIC: 29, "orders": 0}


@pytest.mark.parametrize("version", [2, 7])
async def test_the_metadata_topic_cannot_be_created(bench: Bench, version: int) -> None:
    """Not by a client, with settings that lose records, while it is missing."""
    topic = CreateTopicsRequest.CreatableTopic
    request = CreateTopicsRequest(
        topics=[
            topic(name=name, num_partitions=1, replication_factor=1, assignments=[], configs=[])
            for name in (METADATA_TOPIC, "new")
        ],
        timeout_ms=5,
        validate_only=False,
    )

    def answer(seen: Any) -> Any:
        assert [[config.name for config in one.configs] for one in seen.topics] == [[UNKNOWN_KEY], []]
        one = CreateTopicsResponse.CreatableTopicResult
        return CreateTopicsResponse(
            throttle_time_ms=0,
            topics=[
                one(name=name, topic_id=UUID(int=0), error_code=code, error_message=None, topic_config_error_code=0,
                    num_partitions=-1, replication_factor=-1, configs=None)
                for name, code in ((METADATA_TOPIC, 36), ("new", 0))
            ],
        )  # fmt: skip

    _, response = await bench.pass_through(bench.alter, request, version, CreateTopicsResponse, answer)
    assert [(one.name, one.error_code) for one in response.topics] == [(METADATA_TOPIC, 29), ("new", 0)]


@pytest.mark.parametrize("version", [0, 3])
async def test_the_metadata_topic_cannot_be_widened(bench: Bench, version: int) -> None:
    guard = MetadataTopicGuard([METADATA_TOPIC], bench.cluster.topic_name)
    topic = CreatePartitionsRequest.CreatePartitionsTopic
    request = CreatePartitionsRequest(
        topics=[topic(name=name, count=9, assignments=None) for name in (METADATA_TOPIC, "orders")],
        timeout_ms=5,
        validate_only=False,
    )

    def answer(seen: Any) -> Any:
        one = CreatePartitionsResponse.CreatePartitionsTopicResult
        results = [one(name=each.name, error_code=0, error_message=None) for each in seen.topics]
        assert METADATA_TOPIC not in [each.name for each in results]
        return CreatePartitionsResponse(throttle_time_ms=0, results=results)

    _, response = await bench.pass_through(guard, request, version, CreatePartitionsResponse, answer)
    assert [(one.name, one.error_code) for one in response.results] == [(METADATA_TOPIC, 29), ("orders", 0)]
