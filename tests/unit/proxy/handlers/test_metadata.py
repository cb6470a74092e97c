"""No Metadata request creates a topic of the remote log. All other requests stay as they are."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.metadata import MetadataRequest, MetadataResponse

from proxy.handlers.guards import MetadataHandler
from tests.support.proxy.topic_configs_bench import METADATA_TOPIC, Bench

FAILED_DELETIONS = "__delete_failed_remote_log_segments"
VERSIONS = (0, 1, 9, 13)


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    async with asyncio.TaskGroup() as group:
        yield Bench(group.create_task)


def request_for(version: int, *topics: str) -> Any:
    named = [MetadataRequest.MetadataRequestTopic(version=version, topic_id=UUID(int=0), name=name) for name in topics]
    return MetadataRequest(version=version, topics=named, allow_auto_topic_creation=True)


def as_a_broker(seen: Any) -> Any:
    """Every topic exists, except those with names that no topic can have."""
    topic, broker = MetadataResponse.MetadataResponseTopic, MetadataResponse.MetadataResponseBroker
    topics = [
        topic(
            error_code=17 if "/" in each.name else 0,
            name=each.name,
            topic_id=UUID(int=0),
            is_internal=False,
            partitions=[],
        )
        for each in seen.topics
    ]
    return MetadataResponse(
        throttle_time_ms=0,
        brokers=[broker(node_id=1, host="broker", port=9092, rack=None)],
        cluster_id="c",
        controller_id=1,
        topics=topics,
        error_code=0,
    )


async def asked(bench: Bench, version: int, *topics: str) -> tuple[Any, Any]:
    handler = MetadataHandler([METADATA_TOPIC, FAILED_DELETIONS])
    seen, response = await bench.pass_through(
        handler, request_for(version, *topics), version, MetadataResponse, as_a_broker
    )
    assert [(one.host, one.port) for one in response.brokers] == [("proxy", 19093)]
    return seen, response


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("own", [METADATA_TOPIC, FAILED_DELETIONS])
async def test_the_own_topics_are_not_created(bench: Bench, version: int, own: str) -> None:
    seen, response = await asked(bench, version, "orders", own, "payments")
    answers = [(one.name, one.error_code) for one in response.topics]
    if version >= 4:
        assert not seen.allow_auto_topic_creation
        assert [each.name for each in seen.topics] == ["orders", own, "payments"]
        assert answers == [("orders", 0), (own, 0), ("payments", 0)]
    else:
        assert [each.name for each in seen.topics][::2] == ["orders", "payments"]
        assert own not in [each.name for each in seen.topics]
        assert answers == [("orders", 0), (own, 29), ("payments", 0)]


@pytest.mark.parametrize("version", VERSIONS)
async def test_other_topics_may_be_created(bench: Bench, version: int) -> None:
    """Also a topic whose name has that of an own topic in it."""
    names = ["orders", f"{METADATA_TOPIC}2"]
    seen, response = await asked(bench, version, *names)
    assert seen.allow_auto_topic_creation
    assert [each.name for each in seen.topics] == names
    assert [(one.name, one.error_code) for one in response.topics] == [(name, 0) for name in names]
