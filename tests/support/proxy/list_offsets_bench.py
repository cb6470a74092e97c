"""A bench for the ListOffsets handler: a remote tier with the offsets 0 to 3, and a broker with 4 and 5."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from struct import Struct

from protocol.api_keys import ApiKey
from protocol.apis.list_offsets import (
    ListOffsetsResponsePartition,
    parse_list_offsets_response,
)
from protocol.errors import ErrorCode
from protocol.header import build_request_header, build_response_header, response_body_position
from protocol.primitives import INT8, INT32, write_array_length, write_string
from proxy.cluster.local_log_bounds import LocalLogBoundsCache
from proxy.handlers.base import FetchSettings, HandlerTools
from proxy.handlers.list_offsets import ListOffsetsHandler
from proxy.wire.exchange import Forward
from tests.support.fakes.broker.cluster import FakeCluster, LocalLog
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.configured_topics import FakeConfigs, configured_topics
from tests.support.fakes.record_batches import build_batch, record
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tiers.broker.client import monotonic_ms
from tiers.config.topic_policy import TopicConfig
from tiers.model.ids import TopicIdPartition
from tiers.reader.remote_log_reader import RemoteLogReader

P0 = TopicIdPartition(TOPIC_ID, 0, "orders")
LATEST, EARLIEST, MAX, EARLIEST_LOCAL, LATEST_TIERED, PENDING = -1, -2, -3, -4, -5, -6
NEXT_LOCAL = -3
UNAVAILABLE = ErrorCode.REPLICA_NOT_AVAILABLE

ASKED_V1 = Struct(">iq")
_ASKED_V4 = Struct(">iiq")


def request_frame(version: int, timestamp: int, topic: str = "orders", replica_id: int = -1) -> bytes:
    compact = version >= 6
    tags = b"\x00" if compact else b""
    out = build_request_header(ApiKey.LIST_OFFSETS, version, 9, "test") + INT32.pack(replica_id)
    out += INT8.pack(1) if version >= 2 else b""
    out += write_array_length(1, compact) + write_string(topic, compact) + write_array_length(1, compact)
    out += _ASKED_V4.pack(0, 5, timestamp) if version >= 4 else ASKED_V1.pack(0, timestamp)
    out += tags + tags
    out += INT32.pack(10_000) if version >= 10 else b""
    return out + tags


def response_payload(
    version: int, offset: int, timestamp: int = -1, epoch: int = 5, error_code: int = 0, topic: str = "orders"
) -> bytes:
    compact = version >= 6
    tags = b"\x00" if compact else b""
    out = build_response_header(ApiKey.LIST_OFFSETS, version, 9)
    out += INT32.pack(0) if version >= 2 else b""
    out += write_array_length(1, compact) + write_string(topic, compact) + write_array_length(1, compact)
    out += Struct(">ihqq").pack(0, error_code, timestamp, offset)
    out += INT32.pack(epoch) if version >= 4 else b""
    return out + tags + tags + tags


class Bench:
    def __init__(self, tier: RemoteTier, cluster: FakeCluster, tools: HandlerTools) -> None:
        self.tier = tier
        self.cluster = cluster
        self.handler = ListOffsetsHandler(tools)

    async def ask(
        self,
        version: int,
        asked: int,
        *,
        offset: int,
        timestamp: int = -1,
        epoch: int = 5,
        error_code: int = 0,
        topic: str = "orders",
        is_new: bool = False,
    ) -> ListOffsetsResponsePartition:
        """`offset`, `timestamp`, `epoch` and `error_code` are the broker's answer.

        `is_new`: the proxy does not know the topic when the request arrives."""
        exchange = FakeExchange(self.cluster, request_frame(version, asked, topic))
        topics = self.cluster.topics
        self.cluster.topics = {} if is_new else topics
        action, respond = self.handler.on_request(exchange)
        self.cluster.topics = topics
        assert isinstance(action, Forward)
        self.forwarded = action.frame
        payload = response_payload(version, offset, timestamp, epoch, error_code, topic)
        if respond is not None:
            answer = respond(memoryview(payload))
            assert asyncio.iscoroutine(answer)
            payload = b"".join(await answer)
        body_position = response_body_position(ApiKey.LIST_OFFSETS, version, payload)
        return parse_list_offsets_response(payload, body_position, version).partitions[0]


@asynccontextmanager
async def bench_of(
    root: Path, settings: FetchSettings, *rules: TopicConfig, configs: FakeConfigs | None = None
) -> AsyncIterator[Bench]:
    tier = RemoteTier(root)
    await tier.add(P0, [build_batch(0, [record(0, 100), record(1, 300)], leader_epoch=2)], 0)
    await tier.add(P0, [build_batch(2, [record(2, 200), record(3, 250)], leader_epoch=3)], 2)
    cluster = FakeCluster(
        topics={"orders": TOPIC_ID}, logs={P0: LocalLog([build_batch(4, [record(4, 150), record(5, 260)])], 4)}
    )
    async with RemoteLogReader(tier.rlmm.log, tier.storage) as reader, asyncio.TaskGroup() as group:
        yield Bench(
            tier,
            cluster,
            HandlerTools(
                cluster,
                tier.rlmm.log,
                LocalLogBoundsCache(cluster, monotonic_ms),
                cluster,
                reader,
                settings,
                monotonic_ms,
                group.create_task,
                configured_topics(tier, cluster, *rules, configs=configs),
            ),
        )


def found(answer: ListOffsetsResponsePartition) -> tuple[int, int, int, int]:
    return answer.error_code, answer.timestamp, answer.offset, answer.leader_epoch
