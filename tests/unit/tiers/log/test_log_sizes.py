"""The sizes of logs: one request to each broker for all logs that it leads, and what happens if it refuses."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.admin import DescribeLogDirsRequest

from protocol.apis.metadata import PartitionMetadata
from protocol.errors import ErrorCode
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.describe_log_dirs import response
from tests.support.fakes.broker.scripted_broker import ALL_CLUSTER_OPERATIONS, ScriptedBroker
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.log.broker_log import BrokerLogSource
from tiers.model.ids import TopicIdPartition

ORDERS, CLICKS = UUID(int=7), UUID(int=8)
VALID_MS, LONGEST_VALID_MS = 5_000, 60_000
TIMEOUT_MS = 30_000
DESCRIBE = 8


class Brokers:
    """Broker 1 leads orders-0 and clicks-0, broker 2 leads orders-1."""

    def __init__(self, brokers: list[ScriptedBroker], client: BrokerClient) -> None:
        self.brokers = brokers
        self.client = client
        self.now_ms = 1_000
        self.source = BrokerLogSource(client, clock_ms=lambda: self.now_ms)
        for broker in brokers:
            broker.brokers = brokers
            broker.topics = [
                TopicMetadata("orders", ORDERS, {0: PartitionMetadata(0, 1, 3), 1: PartitionMetadata(1, 2, 3)}),
                TopicMetadata("clicks", CLICKS, {0: PartitionMetadata(0, 1, 3)}),
            ]
        self.set_sizes(500, 600, 700)

    def set_sizes(self, *sizes: int) -> None:
        for broker in self.brokers:
            names = ("orders", 0), ("orders", 1), ("clicks", 0)
            broker.logs = {name: LocalLog([bytes(size)]) for name, size in zip(names, sizes, strict=True)}

    async def ask(self, *partitions: tuple[UUID, int], timeout_ms: int = TIMEOUT_MS) -> list[int | None]:
        asked = [TopicIdPartition(topic_id, index, "") for topic_id, index in partitions]
        return list(await asyncio.gather(*(self.source.size_bytes(each, timeout_ms) for each in asked)))

    def asked(self) -> list[int]:
        """How often each broker was asked."""
        return [len(broker.received(DescribeLogDirsRequest)) for broker in self.brokers]


@pytest.fixture
async def brokers() -> AsyncIterator[Brokers]:
    async with AsyncExitStack() as stack:
        scripted = [await stack.enter_async_context(ScriptedBroker(node_id)) for node_id in (1, 2)]
        client = BrokerClient([("127.0.0.1", scripted[0].port)], client_id="test", request_timeout_ms=TIMEOUT_MS)
        stack.push_async_callback(client.close)
        yield Brokers(scripted, client)


async def test_one_request_asks_a_broker_for_all_its_logs(brokers: Brokers) -> None:
    all_logs = (ORDERS, 0), (ORDERS, 1), (CLICKS, 0)
    assert await brokers.ask(*all_logs) == [500, 600, 700]
    brokers.now_ms += VALID_MS - 1
    assert await brokers.ask(*all_logs) == [500, 600, 700]
    assert brokers.asked() == [1, 1]
    brokers.set_sizes(501, 601, 701)
    brokers.now_ms += 1
    assert await brokers.ask((CLICKS, 0)) == [701]
    assert await brokers.ask((ORDERS, 0)) == [501]
    assert brokers.asked() == [2, 1]


@pytest.mark.parametrize(("took_ms", "valid_ms"), [(1_000, 20_000), (10_000, LONGEST_VALID_MS)])
async def test_a_slow_answer_is_valid_for_longer(brokers: Brokers, took_ms: int, valid_ms: int) -> None:
    async def answers_late(request: Any) -> Any:
        brokers.now_ms += took_ms
        return response({("orders", 0): 9})

    brokers.brokers[0].answers[DescribeLogDirsRequest.API_KEY] = answers_late
    assert await brokers.ask((ORDERS, 0)) == [9]
    brokers.now_ms += valid_ms - 1
    assert await brokers.ask((ORDERS, 0)) == [9]
    assert brokers.asked() == [1, 0]
    brokers.now_ms += 1
    assert await brokers.ask((ORDERS, 0)) == [9]
    assert brokers.asked() == [2, 0]


@pytest.mark.parametrize(
    "answer",
    [
        response({("clicks", 0): 9}),
        response({("orders", 0): 9}, is_future=True),
        response({("orders", 0): 9}, ErrorCode.KAFKA_STORAGE_ERROR),
    ],
    ids=["not there", "moves there", "a folder that failed"],
)
async def test_a_log_without_a_size(brokers: Brokers, answer: Any) -> None:
    async def answered(request: Any) -> Any:
        return answer

    brokers.brokers[0].answers[DescribeLogDirsRequest.API_KEY] = answered
    assert await brokers.ask((ORDERS, 0)) == [None]


@pytest.mark.parametrize("version", [2, 4])
async def test_a_broker_that_refuses_is_a_warning_each_minute(
    brokers: Brokers, version: int, caplog: pytest.LogCaptureFixture
) -> None:
    first = brokers.brokers[0]
    first.versions[DescribeLogDirsRequest.API_KEY] = 0, version
    first.cluster_operations = ALL_CLUSTER_OPERATIONS - {DESCRIBE}
    caplog.set_level(logging.INFO, "tiers.log.log_sizes")
    for _ in range(3):
        assert await brokers.ask((ORDERS, 0), (CLICKS, 0)) == [None, None]
        brokers.now_ms += LONGEST_VALID_MS
    brokers.now_ms -= 1
    assert await brokers.ask((ORDERS, 0)) == [None]
    assert brokers.asked() == [3, 0]
    first.cluster_operations = ALL_CLUSTER_OPERATIONS
    brokers.now_ms += 1
    assert await brokers.ask((ORDERS, 0)) == [500]
    assert [each.levelname for each in caplog.records] == ["WARNING", "WARNING", "WARNING", "INFO"]
