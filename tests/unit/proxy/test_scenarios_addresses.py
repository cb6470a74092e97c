"""No client learns the address of a broker, whichever field of an answer has it.

The proxy's own questions about topics name the topics that a client uses, and no others."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.metadata import MetadataRequest

from protocol.api_keys import ApiKey
from protocol.apis.metadata import PartitionMetadata
from tests.support.fakes.broker import fetch, metadata, produce
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_tier import TOPIC_ID
from tests.support.proxy.scenario import ADVERTISED_HOST, BASE_PORT, TOPIC, Scenario, produce_request, scenario
from tiers.broker.cluster_metadata import TopicMetadata

NEW_NODE = 7
BROKERS_OWN = ("broker-7.internal", 9_092)


@pytest.fixture
async def cast(tmp_path: Path) -> AsyncIterator[Scenario]:
    async with scenario(tmp_path) as made:
        yield made


def metadata_request() -> Any:
    return MetadataRequest(topics=None, allow_auto_topic_creation=False)


def endpoints(response: Any) -> list[tuple[int, str, int, str | None]]:
    return [(one.node_id, one.host, one.port, one.rack) for one in response.node_endpoints or ()]


ADVERTISED = (NEW_NODE, ADVERTISED_HOST, BASE_PORT + NEW_NODE, "r")


@pytest.mark.parametrize("version", [10, 13])
async def test_a_produce_answer_that_names_the_new_leader(cast: Scenario, version: int) -> None:
    cast.broker.script(ApiKey.PRODUCE, produce.led_by(NEW_NODE, *BROKERS_OWN))
    async with cast.client() as client:
        answer = await client.ask(produce_request(version), version)
    (one,) = answer.responses[0].partition_responses
    assert (one.error_code, one.current_leader.leader_id) == (6, NEW_NODE)
    assert endpoints(answer) == [ADVERTISED]
    assert NEW_NODE in cast.listening_for, "it listens before the client can connect"


@pytest.mark.parametrize("version", [16, 18])
async def test_a_fetch_answer_that_names_the_new_leader_beside_remote_data(cast: Scenario, version: int) -> None:
    async with cast.client() as client:
        while True:
            cast.broker.script(ApiKey.FETCH, fetch.led_by(NEW_NODE, *BROKERS_OWN, partition=1))
            answers = await client.fetch(version, 0, 10)
            assert answers[1].error_code == 6
            assert answers[1].current_leader.leader_id == NEW_NODE
            assert endpoints(answers[-1]) == [ADVERTISED]
            if answers[0].records:
                break
    assert cast.records_from(0).startswith(bytes(answers[0].records))
    assert NEW_NODE in cast.listening_for


async def test_a_large_fetch_answer_hides_the_address_rather_than_tell_it(cast: Scenario) -> None:
    cast.broker.logs[TOPIC, 0].batches.append(batch_of(200, 1, value_bytes=300_000))
    cast.broker.script(ApiKey.FETCH, fetch.led_by(NEW_NODE, *BROKERS_OWN, partition=1))
    async with cast.client() as client:
        answers = await client.fetch(18, 200, 0)
    assert len(answers[0].records) > 300_000
    assert answers[1].current_leader.leader_id == NEW_NODE
    assert endpoints(answers[-1]) == []


async def test_metadata_with_an_unknown_node(cast: Scenario) -> None:
    cast.broker.script(ApiKey.METADATA, metadata.with_node(NEW_NODE, *BROKERS_OWN))
    async with cast.client() as client:
        answer = await client.ask(metadata_request(), 12)
    assert {(one.node_id, one.host, one.port) for one in answer.brokers} == {
        (1, ADVERTISED_HOST, BASE_PORT + 1),
        (NEW_NODE, ADVERTISED_HOST, BASE_PORT + NEW_NODE),
    }
    assert NEW_NODE in cast.listening_for


async def test_metadata_whose_leader_is_in_no_list(cast: Scenario) -> None:
    cast.broker.script(ApiKey.METADATA, metadata.led_by(NEW_NODE))
    async with cast.client() as client:
        answer = await client.ask(metadata_request(), 12)
    assert {one.leader_id for topic in answer.topics for one in topic.partitions} == {NEW_NODE}
    assert [(one.node_id, one.host, one.port) for one in answer.brokers] == [(1, ADVERTISED_HOST, BASE_PORT + 1)]


async def test_the_proxy_itself_hears_of_no_broker_and_serves_whom_it_knew(cast: Scenario) -> None:
    cast.broker.scripted_client = "tidegate"
    cast.broker.script(ApiKey.METADATA, metadata.without_brokers, times=1_000)
    await cast.topology.refresh()
    async with cast.client() as client:
        answers = await client.fetch(18, 150, 0)
    assert answers[0].error_code == answers[1].error_code == 0
    assert bytes(answers[0].records) == cast.records_from(150)


async def test_a_preferred_read_replica_is_the_brokers_to_name(cast: Scenario) -> None:
    cast.broker.script(ApiKey.FETCH, fetch.preferring(2))
    async with cast.client() as client:
        answers = await client.fetch(18, 150, 0)
    assert (answers[0].preferred_read_replica, answers[1].preferred_read_replica) == (2, 2)


@pytest.mark.parametrize("version", [4, 12, 17])
async def test_a_consumer_of_remote_data_costs_no_question_about_other_topics(cast: Scenario, version: int) -> None:
    for number in range(1_000, 1_100):
        other = TopicMetadata(f"other-{number}", UUID(int=number), {0: PartitionMetadata(0, 1, 5)})
        cast.broker.topics.append(other)
    async with cast.client() as client:
        found = 0
        while found < 5:
            found += bool((await client.fetch(version, 0, 10))[0].records)
    asked = [request.topics for request in cast.broker.sent_by("tidegate", MetadataRequest)]
    assert None not in asked
    assert {topic.name or topic.topic_id for topics in asked for topic in topics} <= {TOPIC, TOPIC_ID}
