"""Holds the simulated broker against a real one: the same random operations, the same answers."""

from __future__ import annotations

import asyncio
import random
import uuid
from typing import Any

import pytest
from kafka.protocol.admin import CreateTopicsRequest

from tests.support.servers.kafka import KafkaCluster
from tests.support.simulation.apis import SimApis
from tests.support.simulation.cluster import HOST, PORT, SimCluster
from tests.support.simulation.environment import WALL_START_MS, simulated_environment
from tests.support.simulation.groups import GroupCoordinator
from tests.support.simulation.loop import VirtualLoop
from tests.support.simulation.network import Network
from tests.support.simulation.same_answers import AnsweringBroker, Operation, operations
from tests.support.simulation.transactions import TransactionCoordinator
from tiers.broker.client import BrokerClient

SEEDS = range(6)
OPERATIONS = 120


async def real_answers(kafka: KafkaCluster, asked: list[Operation]) -> list[Any]:
    name = f"simulated-{uuid.uuid4().hex[:8]}"
    client = BrokerClient([kafka.address()], client_id="simulated")
    try:
        await client.open()
        topic = CreateTopicsRequest.CreatableTopic(
            name=name, num_partitions=1, replication_factor=1, assignments=[], configs=[]
        )
        await client.request(None, CreateTopicsRequest(topics=[topic], timeout_ms=20_000, validate_only=False))
        while name not in (metadata := await client.metadata(0)).topics or not metadata.topics[name].partitions:
            continue
        found = metadata.topics[name]
        node_id = found.partitions[0].leader_id
        broker = AnsweringBroker(client, name, found.topic_id, node_id, f"{name}-producer")
        await broker.wait_until_led()
        return await broker.answers(asked)
    finally:
        await client.close()


def simulated_answers(seed: int, asked: list[Operation]) -> list[Any]:
    loop, rng = VirtualLoop(), random.Random(seed)

    async def run() -> list[Any]:
        cluster = SimCluster(loop, rng, lambda: WALL_START_MS + loop.now_ms)
        apis = SimApis(cluster, GroupCoordinator(loop, rng), TransactionCoordinator(loop, rng, cluster))
        network = Network(loop, rng, cluster, apis)
        topic = cluster.create_topic("simulated", 1, {})
        bootstrap = [(f"{HOST}{node}", PORT) for node in (1, 2, 3)]
        client = BrokerClient(bootstrap, client_id="simulated", connect=network.connector("simulated"))
        await client.open()
        node_id = topic.partitions[0].leader
        answers = await AnsweringBroker(client, topic.name, topic.topic_id, node_id, "producer").answers(asked)
        await client.close()
        return answers

    try:
        with simulated_environment(loop, seed):
            answers: list[Any] = loop.run_virtual(run())
            return answers
    finally:
        loop.close()


@pytest.mark.parametrize("seed", SEEDS)
def test_the_simulated_broker_answers_as_a_real_one(kafka: KafkaCluster, seed: int) -> None:
    asked = operations(seed, OPERATIONS)
    simulated = simulated_answers(seed, asked)
    real = asyncio.run(real_answers(kafka, asked))
    for number, (ours, theirs) in enumerate(zip(simulated, real, strict=True)):
        assert ours == theirs, f"operation {number} of {asked[: number + 1]}"
