"""The missing rights of the proxy, as the brokers report them."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from types import SimpleNamespace
from typing import Any, cast
from uuid import UUID

import pytest
from kafka.protocol.admin import CreateTopicsRequest, DescribeClusterRequest
from kafka.protocol.metadata import MetadataRequest, MetadataResponse

from protocol.errors import ErrorCode
from proxy.cluster.permissions import missing_permissions
from proxy.config import TidegateConfig
from tests.support.proxy.parsed_config import parse_config
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import SLICE_BYTES

METADATA_TOPIC = "metadata"
ALL, READ_ONLY = {3, 4, 6, 8, 10}, {3, 8}
VERSION = 12
TOPIC = MetadataResponse.MetadataResponseTopic


def topic(name: str, granted: Collection[int] | None, error: int = ErrorCode.NONE, partitions: int = 0) -> Any:
    return TOPIC(
        error_code=error,
        name=name,
        topic_id=UUID(int=1),
        is_internal=False,
        partitions=[
            TOPIC.MetadataResponsePartition(
                error_code=0,
                partition_index=index,
                leader_id=1,
                leader_epoch=0,
                replica_nodes=[1],
                isr_nodes=[1],
                offline_replicas=[],
            )
            for index in range(partitions)
        ],
        authorized_operations=granted,
    )


def answer(topics: Collection[Any]) -> memoryview:
    response = MetadataResponse(throttle_time_ms=0, brokers=[], cluster_id="c", controller_id=1, topics=list(topics))
    return memoryview(bytes(response.encode(version=VERSION)))


class Brokers:
    """Brokers that list `topics`, then say of the metadata topic what `later` has, one answer after the other.

    If they do not list the metadata topic, it is there already, and they had not heard of it."""

    def __init__(self, topics: Collection[Any] = (), later: Collection[tuple[int, set[int] | None]] = ()) -> None:
        self.listed = answer(topics)
        self._later = iter(later)
        self.on_cluster = ALL
        self.hidden: set[str] = set()
        """The topics that the proxy may not describe."""

    async def request_raw(self, node_id: int | None, message: Any, timeout_ms: int, **versions: int) -> Any:
        assert isinstance(message, MetadataRequest)
        assert message.include_topic_authorized_operations
        if message.topics is None:
            return self.listed, VERSION
        (asked,) = message.topics
        if asked.name != METADATA_TOPIC:
            is_hidden = asked.name in self.hidden
            error = ErrorCode.TOPIC_AUTHORIZATION_FAILED if is_hidden else ErrorCode.UNKNOWN_TOPIC_OR_PARTITION
            return answer([topic(asked.name, None, error)]), VERSION
        code, granted = next(self._later)
        return answer([topic(METADATA_TOPIC, granted, code)]), VERSION

    async def request(self, node_id: int | None, message: Any, timeout_ms: int, **versions: int) -> Any:
        if isinstance(message, CreateTopicsRequest):
            is_there = message.topics[0].name == METADATA_TOPIC
            code = ErrorCode.TOPIC_ALREADY_EXISTS if is_there else ErrorCode.NONE
            return SimpleNamespace(topics=[SimpleNamespace(error_code=code)])
        if isinstance(message, DescribeClusterRequest):
            return SimpleNamespace(error_code=ErrorCode.NONE, authorized_operations=self.on_cluster)
        return SimpleNamespace(error_code=ErrorCode.NONE)


def tiering(*topics: str) -> TidegateConfig:
    text = f'remote.log.metadata.topic.name = "{METADATA_TOPIC}"\n[upstream]\nbootstrap.servers = "127.0.0.1:1"\n'
    text += '[storage]\nimplementation = "local"\npath = "/tier"\n'
    return parse_config(text + "".join(f'[[topics]]\npattern = "{each}"\n' for each in topics))


async def missing(brokers: Brokers, *topics: str) -> tuple[list[str], list[str]]:
    return await missing_permissions(cast(BrokerClient, brokers), tiering(*topics), 1000)


UNHEARD_OF = (ErrorCode.UNKNOWN_TOPIC_OR_PARTITION, None)


@pytest.mark.parametrize(
    ("answers", "lacked"),
    [
        ([(ErrorCode.NONE, ALL)], []),
        ([UNHEARD_OF, UNHEARD_OF, (ErrorCode.NONE, ALL)], []),
        ([UNHEARD_OF, (ErrorCode.NONE, READ_ONLY)], ["WRITE on topic metadata", "DESCRIBE_CONFIGS on topic metadata"]),
        ([(ErrorCode.TOPIC_AUTHORIZATION_FAILED, None)], ["DESCRIBE on topic metadata"]),
        ([UNHEARD_OF, (ErrorCode.TOPIC_AUTHORIZATION_FAILED, None)], ["DESCRIBE on topic metadata"]),
    ],
)
async def test_a_topic_that_another_proxy_made_a_moment_ago_is_no_missing_right(
    monkeypatch: pytest.MonkeyPatch, answers: list[tuple[int, set[int] | None]], lacked: list[str]
) -> None:
    monkeypatch.setattr("proxy.cluster.permissions._HEARD_WITHIN_MS", 60_000)
    assert await missing(Brokers(later=answers)) == (lacked, [])


async def test_only_the_rights_on_own_and_on_tiered_topics_count() -> None:
    brokers = Brokers(
        [
            topic(METADATA_TOPIC, {3, 4}),
            topic("orders-eu", {3, 6}),
            topic("orders-us", None),
            topic("payments", set()),
            topic("__consumer_offsets", set()),
        ]
    )
    assert await missing(brokers, "orders-*", "__*") == (
        ["DESCRIBE_CONFIGS on topic metadata"],
        ["DESCRIBE_CONFIGS on topic orders-eu"],
    )


async def test_a_topic_that_a_rule_names_and_the_broker_hides_lacks_all_rights() -> None:
    brokers = Brokers([topic(METADATA_TOPIC, ALL)])
    brokers.hidden = {"orders", "payments", "__hidden"}
    assert await missing(brokers, "orders", "pay*", "not-created-yet", "__hidden") == (
        [],
        ["READ, DELETE, DESCRIBE_CONFIGS on topic orders"],
    )


async def test_a_proxy_to_which_share_groups_may_be_hidden_lacks_a_right() -> None:
    brokers = Brokers([topic(METADATA_TOPIC, ALL)])
    brokers.on_cluster = ALL - {8}
    _, (right,) = await missing(brokers)
    assert right.startswith("DESCRIBE on the cluster")


async def test_the_rights_on_a_large_cluster_are_read_in_slices() -> None:
    brokers = Brokers([topic(METADATA_TOPIC, ALL), topic("orders", ALL, partitions=4_000)])
    turns = 0

    async def other_work() -> None:
        nonlocal turns
        while True:
            await asyncio.sleep(0)
            turns += 1

    other = asyncio.create_task(other_work())
    assert await missing(brokers, "orders") == ([], [])
    other.cancel()
    assert turns >= len(brokers.listed) // (SLICE_BYTES + 100) - 1  # the first slice ends before the other task begins
