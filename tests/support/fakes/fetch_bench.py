"""A bench for the Fetch handler, with a fake client, a fake broker and a remote tier."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from opentelemetry.trace import Tracer

from protocol.api_keys import ApiKey
from protocol.apis.fetch.response import FetchResponse, parse_fetch_response
from protocol.header import response_body_position
from proxy.cluster.local_log_bounds import LocalLogBoundsCache
from proxy.handlers.base import FetchSettings, HandlerTools
from proxy.handlers.fetch.handler import FetchHandler
from proxy.wire.exchange import Answer, Forward, Prepare
from tests.support.fakes.broker.cluster import FakeCluster, LocalLog
from tests.support.fakes.broker.exchange import FakeExchange
from tests.support.fakes.broker.fetch_frames import Ask, fetch_frame, reference
from tests.support.fakes.configured_topics import FakeConfigs, configured_topics
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tiers.broker.client import monotonic_ms
from tiers.config.settings import RemoteLogConfig
from tiers.config.topic_policy import TopicConfig
from tiers.model.ids import TopicIdPartition
from tiers.reader.chunk_fetcher import RemoteLogReaderSettings
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.reader.remote_reads import TracedReads, TracedStore

P0 = TopicIdPartition(TOPIC_ID, 0, "orders")
P1 = TopicIdPartition(TOPIC_ID, 1, "orders")
LOCAL_ID = uuid.UUID(int=99)
LOCAL_0 = TopicIdPartition(LOCAL_ID, 0, "local")
VERSIONS = (4, 12, 18)
BATCH = 10
TRIMMED = 100
"""The local log start of P0. Lower offsets are only remote, and the local log ends at 200."""


@dataclass
class Bench:
    tier: RemoteTier
    cluster: FakeCluster
    handler: FetchHandler
    reader: RemoteLogReader
    batches: list[bytes]
    last: FakeExchange | None = None
    streamed: bool = False

    async def send(self, frame: bytes, connection_id: int = 1, may_forward: bool = True) -> FetchResponse:
        """Sends one request through the handler and the broker, as a connection does."""
        exchange = self.last = FakeExchange(self.cluster, frame, connection_id)
        exchange.may_forward = may_forward
        action, respond = self.handler.on_request(exchange)
        if isinstance(action, Prepare):
            action = await action.decide()
        version = exchange.request.api_version
        if isinstance(action, Answer):
            return parse(version, action.payload)
        assert isinstance(action, Forward)
        response = memoryview(self.cluster.answer(action.frame))
        self.streamed = action.hold_bytes is not None and len(response) + 4 > action.hold_bytes
        if self.streamed:
            if action.patcher is None:
                return parse(version, [response])
            patcher = action.patcher()
            out = [bytes(b) for n in range(0, len(response), 1000) for b in patcher.feed(response[n : n + 1000], 1000)]
            assert sum(map(len, out)) == len(response)
            return parse(version, out)
        assert respond is not None
        answer = respond(response)
        try:
            return parse(version, await answer if isinstance(answer, Coroutine) else answer)
        finally:
            if exchange.on_sent is not None:
                exchange.on_sent()

    async def fetch(self, version: int, *asks: Ask, connection_id: int = 1, **limits: Any) -> FetchResponse:
        return await self.send(fetch_frame(version, asks, **limits), connection_id)

    async def until_remote(self, version: int, *asks: Ask, **more: Any) -> FetchResponse:
        """Polls as a consumer does, until the first partition returns records."""
        while True:
            response = await self.fetch(version, *asks, **more)
            if records(response, 0):
                return response
            await asyncio.sleep(0.001)


def parse(version: int, payload: Sequence[Any]) -> FetchResponse:
    whole = b"".join(payload)
    return parse_fetch_response(whole, response_body_position(ApiKey.FETCH, version, whole), version)


def records(response: FetchResponse, index: int = 0) -> bytes:
    return bytes(response.records(response.partitions[index]))


def codes(response: FetchResponse) -> list[int]:
    return [partition.error_code for partition in response.partitions]


@asynccontextmanager
async def bench_of(
    root: Path,
    settings: FetchSettings | None = None,
    *rules: TopicConfig,
    configs: FakeConfigs | None = None,
    tracer: Tracer | None = None,
) -> AsyncIterator[Bench]:
    """Yields a bench. `rules` are the configuration's topic rules. `configs` are the brokers' topic configurations."""
    tier = RemoteTier(root)
    batches = await tier.fill(P0, segments=2, batches=6)
    batches += [batch_of(offset, BATCH, value_bytes=20, timestamp=1_000_000 + offset) for offset in range(120, 200, 10)]
    cluster = FakeCluster(
        topics={"orders": TOPIC_ID, "local": LOCAL_ID},
        logs={
            P0: LocalLog(batches, TRIMMED),
            P1: LocalLog([batch_of(0, BATCH)]),
            LOCAL_0: LocalLog([batch_of(0, BATCH)]),
        },
    )
    reader_settings = RemoteLogReaderSettings(max_get_bytes=6000)
    store = tier.storage if tracer is None else TracedStore(tier.storage, tracer)
    settings = settings or FetchSettings(local_poll_ms=20, remote_log=RemoteLogConfig(fetch_max_wait_ms=10_000))
    async with (
        RemoteLogReader(tier.rlmm.log, store, reader_settings) as reader,
        asyncio.TaskGroup() as group,
    ):
        tools = HandlerTools(
            topology=cluster,
            metadata=tier.rlmm.log,
            bounds=LocalLogBoundsCache(cluster, monotonic_ms),
            source=cluster,
            reader=reader if tracer is None else TracedReads(reader, tracer, tier.state),
            settings=settings,
            clock_ms=monotonic_ms,
            spawn=group.create_task,
            configured=configured_topics(tier, cluster, *rules, configs=configs),
            tracer=tracer,
        )
        yield Bench(tier, cluster, FetchHandler(tools), reader, batches)


def ask(version: int, offset: int, partition: int = 0, **more: Any) -> Ask:
    return Ask(reference(version, "orders", TOPIC_ID), partition, offset, **more)


def ask_local(version: int, offset: int, **more: Any) -> Ask:
    return Ask(reference(version, "local", LOCAL_ID), 0, offset, **more)
