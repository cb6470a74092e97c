"""A whole proxy, with every handler and a remote tier, between a scripted broker and a client that is kafka-python's
codec on a socket.

Partition 0 of `orders` has offsets 0 to 119 in the remote tier and 100 to 199 on the broker; partition 1 has 0 to 9
on the broker alone. The proxy advertises node N as `ADVERTISED_HOST`, port `BASE_PORT` + N, and listens elsewhere.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from kafka.protocol.admin import DeleteRecordsRequest, DeleteRecordsResponse
from kafka.protocol.consumer import (
    FetchRequest,
    FetchResponse,
    ListOffsetsRequest,
    ListOffsetsResponse,
    OffsetForLeaderEpochRequest,
    OffsetForLeaderEpochResponse,
)
from kafka.protocol.metadata import MetadataRequest, MetadataResponse
from kafka.protocol.producer import ProduceRequest, ProduceResponse

from protocol.api_keys import ApiKey
from protocol.apis.metadata import PartitionMetadata
from protocol.header import build_request_header, response_body_position
from proxy.cluster.broker_listeners import ListenerAddresses
from proxy.cluster.local_log_bounds import LocalLogBoundsCache
from proxy.cluster.topology import Topology
from proxy.handlers.base import FetchSettings, HandlerTools
from proxy.handlers.delete_records import DeleteRecordsHandler
from proxy.handlers.drain_answers import DRAIN_ANSWERS
from proxy.handlers.fetch.handler import FetchHandler
from proxy.handlers.list_offsets import ListOffsetsHandler
from proxy.handlers.offset_for_leader_epoch import OffsetForLeaderEpochHandler
from proxy.handlers.produce import ProduceHandler
from proxy.metrics import ProxyMetrics
from proxy.process.app import pass_through_handlers
from proxy.wire.context import Endpoint, Router
from proxy.wire.limits import Limits
from proxy.wire.server import BrokerEndpoint, ProxyServer
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.scripted_broker import ScriptedBroker
from tests.support.fakes.broker.wire import Wire, connected
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.remote_tier import TOPIC_ID, RemoteTier
from tiers.broker.client import BrokerClient, monotonic_ms
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.config.settings import RemoteLogConfig
from tiers.log.broker_log import BrokerLogSource
from tiers.model.ids import TopicIdPartition
from tiers.reader.chunk_cache import Extent
from tiers.reader.remote_log_reader import RemoteLogReader
from tiers.reader.remote_reads import RemoteReads
from tiers.reader.shared.channel import SharedBuffers, listen
from tiers.reader.shared.lent_reads import RemoteReadClient, RemoteReadServer
from tiers.tasks.history.align import require_aligned

ADVERTISED_HOST = "proxy.example"
BASE_PORT = 20_000
CLIENT_ID = "client"
TOPIC = "orders"
P0 = TopicIdPartition(TOPIC_ID, 0, TOPIC)
TRIMMED = 100
END = 200
_RESPONSES = {
    FetchRequest: FetchResponse,
    ListOffsetsRequest: ListOffsetsResponse,
    OffsetForLeaderEpochRequest: OffsetForLeaderEpochResponse,
    DeleteRecordsRequest: DeleteRecordsResponse,
    MetadataRequest: MetadataResponse,
    ProduceRequest: ProduceResponse,
}


class Client:
    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self._correlation_id = 100

    async def send(self, request: Any, version: int) -> None:
        self._correlation_id += 1
        header = build_request_header(request.API_KEY, version, self._correlation_id, CLIENT_ID)
        await self.wire.send(header + bytes(request.encode(version=version)))

    async def ask(self, request: Any, version: int) -> Any:
        await self.send(request, version)
        payload = await self.wire.receive()
        assert int.from_bytes(payload[:4], "big") == self._correlation_id
        body = response_body_position(request.API_KEY, version, payload)
        return _RESPONSES[type(request)].decode(payload[body:], version=version)

    async def fetch(self, version: int, *offsets: int, **limits: Any) -> dict[int, Any]:
        """From partition 0, 1 and so on; answers by partition. The response itself is under -1."""
        response = await self.ask(fetch_request(version, *offsets, **limits), version)
        answers = {one.partition_index: one for topic in response.responses for one in topic.partitions}
        return {-1: response, **answers}


def fetch_request(version: int, *offsets: int, max_wait_ms: int = 50, max_bytes: int = 1 << 20) -> Any:
    named = {"topic_id": TOPIC_ID} if version >= 13 else {"topic": TOPIC}
    topic = FetchRequest.FetchTopic
    partitions = [
        topic.FetchPartition(
            version=version,
            partition=partition,
            current_leader_epoch=-1,
            fetch_offset=offset,
            last_fetched_epoch=-1,
            partition_max_bytes=max_bytes,
        )
        for partition, offset in enumerate(offsets)
    ]
    return FetchRequest(
        version=version,
        replica_id=-1,
        max_wait_ms=max_wait_ms,
        min_bytes=1,
        max_bytes=1 << 24,
        session_id=0,
        session_epoch=-1,
        topics=[topic(version=version, partitions=partitions, **named)],
        forgotten_topics_data=[],
        rack_id="",
    )


def produce_request(version: int, acks: int = -1) -> Any:
    topic = ProduceRequest.TopicProduceData
    named = {"topic_id": TOPIC_ID} if version >= 13 else {"name": TOPIC}
    partition = topic.PartitionProduceData(index=0, records=batch_of(0, 1))
    return ProduceRequest(
        transactional_id=None, acks=acks, timeout_ms=1_000, topic_data=[topic(partition_data=[partition], **named)]
    )


def list_offsets_request(timestamp: int) -> Any:
    topic = ListOffsetsRequest.ListOffsetsTopic
    partition = topic.ListOffsetsPartition(partition_index=0, current_leader_epoch=-1, timestamp=timestamp)
    return ListOffsetsRequest(replica_id=-1, isolation_level=0, topics=[topic(name=TOPIC, partitions=[partition])])


@dataclass
class Scenario:
    broker: ScriptedBroker
    tier: RemoteTier
    topology: Topology
    batches: list[bytes]
    port: int
    listening_for: list[int | None]

    @contextlib.asynccontextmanager
    async def client(self) -> AsyncIterator[Client]:
        async with connected(self.port) as wire:
            yield Client(wire)

    def records_from(self, offset: int) -> bytes:
        """The records of partition 0, as they were written."""
        return b"".join(self.batches[offset // 10 :])


async def _reader(
    stack: contextlib.AsyncExitStack, tier: RemoteTier, share: Callable[[Extent], Extent] = lambda extent: extent
) -> RemoteReads:
    reader = RemoteLogReader(tier.rlmm.log, tier.storage, share=share)
    return await stack.enter_async_context(reader)


async def _reader_apart(stack: contextlib.AsyncExitStack, tier: RemoteTier) -> RemoteReads:
    listener = stack.enter_context(listen())
    buffers = SharedBuffers()
    server = RemoteReadServer(listener, await _reader(stack, tier, buffers.share), buffers, lambda: None)
    await stack.enter_async_context(server)
    return await stack.enter_async_context(RemoteReadClient(listener.getsockname(), monotonic_ms))


@contextlib.asynccontextmanager
async def scenario(
    root: Path, limits: Limits | None = None, *, is_reader_apart: bool = False
) -> AsyncIterator[Scenario]:
    """Yields a proxy. It asks for remote records at a socket if `is_reader_apart`, as a worker does."""
    tier = RemoteTier(root)
    batches = await tier.fill(P0, segments=2, batches=6)
    batches += [batch_of(offset, 10, value_bytes=20, timestamp=1_000_000 + offset) for offset in range(120, END, 10)]
    settings = FetchSettings(
        metadata_timeout_ms=60_000,
        bounds_timeout_ms=60_000,
        local_poll_ms=20,
        list_offsets_timeout_ms=60_000,
        remote_log=RemoteLogConfig(fetch_max_wait_ms=10_000),
    )
    async with contextlib.AsyncExitStack() as stack:
        broker = await stack.enter_async_context(ScriptedBroker())
        broker.scripted_client = CLIENT_ID
        broker.topics = [TopicMetadata(TOPIC, TOPIC_ID, {n: PartitionMetadata(n, 1, 5) for n in range(2)})]
        broker.logs = {(TOPIC, 0): LocalLog(batches, TRIMMED), (TOPIC, 1): LocalLog([batch_of(0, 10)])}
        client = BrokerClient(broker.addresses, client_id="tidegate", request_timeout_ms=60_000)
        stack.push_async_callback(client.close)
        listening_for: list[int | None] = []

        def listen(host: str, port: int, endpoint: Endpoint) -> None:
            listening_for.append(endpoint.node_id)

        addresses = ListenerAddresses("127.0.0.1", ADVERTISED_HOST, BASE_PORT, BASE_PORT)
        topology = Topology(client, broker.addresses, [(addresses, listen)], clock_ms=monotonic_ms)
        handlers = pass_through_handlers()
        server = ProxyServer(
            Router(handlers, {ApiKey.PRODUCE: ProduceHandler()}),
            limits or Limits(),
            ProxyMetrics(),
            drain_answers=DRAIN_ANSWERS,
        )
        reader = await (_reader_apart if is_reader_apart else _reader)(stack, tier)
        await stack.enter_async_context(server)
        tools = HandlerTools(
            topology=topology.topics,
            metadata=tier.rlmm.log,
            bounds=LocalLogBoundsCache(BrokerLogSource(client), monotonic_ms),
            source=BrokerLogSource(client),
            reader=reader,
            settings=settings,
            clock_ms=monotonic_ms,
            spawn=server.spawn,
        )
        handlers |= {
            ApiKey.FETCH: FetchHandler(tools),
            ApiKey.LIST_OFFSETS: ListOffsetsHandler(tools),
            ApiKey.OFFSET_FOR_LEADER_EPOCH: OffsetForLeaderEpochHandler(tools),
            ApiKey.DELETE_RECORDS: DeleteRecordsHandler(
                tools,
                tier.rlmm,
                partial(require_aligned, BrokerLogSource(client), tier.state),
                ["__remote_log_metadata"],
            ),
        }
        assert await topology.refresh()
        endpoint = BrokerEndpoint(1, lambda: broker.addresses, topology.listeners[0].advertised_address)
        _, port = server.listen("127.0.0.1", 0, endpoint)
        yield Scenario(broker, tier, topology, batches, port, listening_for)
