"""Holds the simulated broker against a real one: the same random operations, the same answers."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from kafka.protocol.admin import CreateTopicsRequest

from tests.support.marks import full
from tests.support.servers.kafka import KafkaCluster
from tests.support.simulation.apis import SimApis
from tests.support.simulation.cluster import HOST, PORT, SimCluster, SimTopic
from tests.support.simulation.environment import WALL_START_MS, simulated_environment
from tests.support.simulation.groups import GroupCoordinator
from tests.support.simulation.loop import VirtualLoop
from tests.support.simulation.network import Network
from tests.support.simulation.same_answers import AnsweringBroker, Operation, operations
from tests.support.simulation.same_coordination import AnsweringCoordinators, GroupOperation, group_operations
from tests.support.simulation.transactions import TransactionCoordinator
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import ClusterMetadata

SEEDS = [*range(2), *full(*range(2, 6))]
OPERATIONS = 120
GROUP_SEEDS = [*range(2), *full(*range(2, 6))]
GROUP_OPERATIONS = 80


async def new_topic(client: BrokerClient, name: str) -> ClusterMetadata:
    """Creates a topic of one partition, and returns metadata that names its leader."""
    topic = CreateTopicsRequest.CreatableTopic(
        name=name, num_partitions=1, replication_factor=1, assignments=[], configs=[]
    )
    await client.request(None, CreateTopicsRequest(topics=[topic], timeout_ms=20_000, validate_only=False))
    while name not in (metadata := await client.metadata()).topics or not metadata.topics[name].partitions:
        continue
    return metadata


async def real_answers(kafka: KafkaCluster, asked: list[Operation]) -> list[Any]:
    name = f"simulated-{uuid.uuid4().hex[:8]}"
    client = BrokerClient([kafka.address()], client_id="simulated")
    try:
        found = (await new_topic(client, name)).topics[name]
        broker = AnsweringBroker(client, name, found.topic_id, found.partitions[0].leader_id, f"{name}-producer")
        await broker.wait_until_led()
        return await broker.answers(asked)
    finally:
        await client.close()


async def real_coordination(kafka: KafkaCluster, asked: list[GroupOperation]) -> list[Any]:
    name = f"simulated-{uuid.uuid4().hex[:8]}"
    client = BrokerClient([kafka.address()], client_id="simulated")
    try:
        await new_topic(client, name)
        return await AnsweringCoordinators(client, f"{name}-group", f"{name}-producer", name).answers(asked)
    finally:
        await client.close()


def simulated(seed: int, work: Callable[[BrokerClient, SimTopic], Awaitable[list[Any]]]) -> list[Any]:
    """Does the work with a client of a simulated cluster, which has one topic. Messages go over a wire."""
    loop, rng = VirtualLoop(), random.Random(seed)

    async def run() -> list[Any]:
        cluster = SimCluster(loop, rng, lambda: WALL_START_MS + loop.now_ms)
        apis = SimApis(cluster, GroupCoordinator(loop, rng), TransactionCoordinator(loop, rng, cluster))
        network = Network(loop, rng, cluster, apis, has_wire=True)
        topic = cluster.create_topic("simulated", 1, {})
        bootstrap = [(f"{HOST}{node}", PORT) for node in (1, 2, 3)]
        client = BrokerClient(bootstrap, client_id="simulated", connect=network.connector("simulated"))
        await client.open()
        answers = await work(client, topic)
        await client.close()
        return answers

    try:
        with simulated_environment(loop, seed, has_wire=True):
            answers: list[Any] = loop.run_virtual(run())
            return answers
    finally:
        loop.close()


def simulated_answers(seed: int, asked: list[Operation]) -> list[Any]:
    def work(client: BrokerClient, topic: SimTopic) -> Awaitable[list[Any]]:
        leader = topic.partitions[0].leader
        return AnsweringBroker(client, topic.name, topic.topic_id, leader, "producer").answers(asked)

    return simulated(seed, work)


def simulated_coordination(seed: int, asked: list[GroupOperation]) -> list[Any]:
    return simulated(
        seed, lambda client, topic: AnsweringCoordinators(client, "group", "producer", topic.name).answers(asked)
    )


@pytest.mark.parametrize("seed", SEEDS)
def test_the_simulated_broker_answers_as_a_real_one(kafka: KafkaCluster, seed: int) -> None:
    asked = operations(seed, OPERATIONS)
    ours = simulated_answers(seed, asked)
    theirs = asyncio.run(real_answers(kafka, asked))
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert our == their, f"operation {number} of {asked[: number + 1]}"


@pytest.mark.parametrize("seed", GROUP_SEEDS)
def test_the_simulated_coordinators_answer_as_real_ones(kafka: KafkaCluster, seed: int) -> None:
    asked = group_operations(seed, GROUP_OPERATIONS)
    ours = simulated_coordination(seed, asked)
    theirs = asyncio.run(real_coordination(kafka, asked))
    for number, (our, their) in enumerate(zip(ours, theirs, strict=True)):
        assert our == their, f"operation {number} of {asked[: number + 1]}"
