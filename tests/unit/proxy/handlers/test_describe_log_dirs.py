"""DescribeLogDirs shows the remote tier only where a broker answers for all of its partitions."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from kafka.protocol.admin import DescribeLogDirsRequest, DescribeLogDirsResponse

from protocol.api_keys import DECODED_APIS, ApiKey
from protocol.apis.log_dirs import PartitionSizes
from protocol.header import build_request_header, build_response_header, response_body_position
from proxy.handlers.describe_log_dirs import DescribeLogDirsHandler
from proxy.wire.exchange import Forward
from tests.support.fakes.broker.cluster import FakeCluster
from tests.support.fakes.broker.exchange import FakeExchange

VERSIONS = (DECODED_APIS[ApiKey.DESCRIBE_LOG_DIRS].min_version, 5)
REFUSED, OFFLINE = 31, 56
ORDERS: PartitionSizes = {"orders": {0: 7}}
DIR = DescribeLogDirsResponse.DescribeLogDirsResult
TOPIC = DIR.DescribeLogDirsTopic
PARTITION = TOPIC.DescribeLogDirsPartition


class Sizes:
    def __init__(self, sizes: PartitionSizes) -> None:
        self.sizes = sizes
        self.asked: list[int] = []

    async def led_by(self, node_id: int, timeout_ms: int) -> PartitionSizes:
        self.asked.append(node_id)
        return self.sizes


def disk(error: int = 0, topic: str = "orders") -> Any:
    log = PARTITION(partition_index=0, partition_size=9, offset_lag=0, is_future_key=False)
    return DIR(
        error_code=error,
        log_dir="/disk",
        topics=[] if error else [TOPIC(name=topic, partitions=[log])],
        total_bytes=100,
        usable_bytes=50,
        is_cordoned=False,
    )


def from_broker(*dirs: Any, error: int = 0) -> Any:
    return DescribeLogDirsResponse(throttle_time_ms=0, error_code=error, results=list(dirs))


async def shown(
    sizes: Sizes, version: int, response: Any, *, topics: Any = None, node_id: int | None = 1
) -> tuple[bytes, bytes, Any]:
    """Returns the broker's response and the client's, and the latter decoded."""
    key = ApiKey.DESCRIBE_LOG_DIRS
    request = DescribeLogDirsRequest(topics=topics)
    frame = build_request_header(key, version, 9, "ui") + request.encode(version=version)
    exchange = FakeExchange(FakeCluster(), frame)
    exchange.node_id = node_id
    action, respond = DescribeLogDirsHandler(sizes.led_by, "remote://s3").on_request(exchange)
    assert isinstance(action, Forward)
    assert bytes(action.frame) == frame
    sent = build_response_header(key, version, 9) + bytes(response.encode(version=version))
    if respond is None:
        return sent, sent, None
    result = respond(memoryview(sent))
    out = b"".join(await result if asyncio.iscoroutine(result) else result)
    body = out[response_body_position(key, version, out) :]
    return sent, out, DescribeLogDirsResponse.decode(body, version=version)


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_remote_tier_is_one_more_directory(version: int) -> None:
    sizes = Sizes({"orders": {0: 1 << 40, 3: 7}, "payments": {1: 5}})
    _, _, seen = await shown(sizes, version, from_broker(disk()))
    assert [one.log_dir for one in seen.results] == ["/disk", "remote://s3"]
    remote = seen.results[1]
    assert {
        topic.name: {each.partition_index: each.partition_size for each in topic.partitions} for topic in remote.topics
    } == {"orders": {0: 1 << 40, 3: 7}, "payments": {1: 5}}
    assert {(each.offset_lag, each.is_future_key) for topic in remote.topics for each in topic.partitions} == {
        (0, False)
    }
    assert remote.error_code == 0
    if version >= 4:
        assert [(one.total_bytes, one.usable_bytes) for one in seen.results] == [(100, 50), (-1, -1)]
    if version >= 5:
        assert [one.is_cordoned for one in seen.results] == [False, False]
    assert sizes.asked == [1]


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_request_that_names_topics_is_relayed(version: int) -> None:
    named = DescribeLogDirsRequest.DescribableLogDirTopic(topic="orders", partitions=[0])
    for topics in ([named], []):
        sent, out, _ = await shown(Sizes({"orders": {0: 7}}), version, from_broker(disk()), topics=topics)
        assert sent == out


@pytest.mark.parametrize(
    ("version", "response", "sizes", "node_id"),
    [
        pytest.param(VERSIONS[0], from_broker(), ORDERS, 1, id="refused"),
        pytest.param(5, from_broker(error=REFUSED), ORDERS, 1, id="refused with a code"),
        pytest.param(5, from_broker(disk(OFFLINE)), ORDERS, 1, id="no directory is usable"),
        pytest.param(5, from_broker(disk()), ORDERS, None, id="on the bootstrap port"),
        pytest.param(5, from_broker(disk()), {}, 1, id="no remote partitions"),
    ],
)
async def test_nothing_is_added(version: int, response: Any, sizes: PartitionSizes, node_id: int | None) -> None:
    sent, out, _ = await shown(Sizes(sizes), version, response, node_id=node_id)
    assert sent == out


async def test_an_offline_directory_hides_no_other() -> None:
    _, _, seen = await shown(Sizes({"orders": {0: 7}}), 5, from_broker(disk(OFFLINE), disk()))
    assert [one.log_dir for one in seen.results] == ["/disk", "/disk", "remote://s3"]


async def test_a_large_answer_is_built_off_the_loop() -> None:
    partitions = dict.fromkeys(range(20_000), 7)
    _, _, seen = await shown(Sizes({"orders": partitions}), 5, from_broker(disk()))
    assert len(seen.results[1].topics[0].partitions) == 20_000
