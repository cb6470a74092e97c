"""A broker that answers from its `logs` and `topics`, except where a script changes its answers.

kafka-python decodes requests and encodes responses. A script is for one API and has
one step per request: `broker.script(ApiKey.FETCH, fetch.with_error(6), deliver=delivery.truncated(10))`.
"""

from __future__ import annotations

import io
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Any

from kafka.protocol.admin import (
    DeleteRecordsRequest,
    DescribeClusterRequest,
    DescribeConfigsRequest,
    DescribeLogDirsRequest,
    ListGroupsRequest,
)
from kafka.protocol.api_header import RequestHeader
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest, OffsetForLeaderEpochRequest
from kafka.protocol.metadata import ApiVersionsRequest, MetadataRequest
from kafka.protocol.producer import ProduceRequest

from protocol.api_keys import ApiKey
from tests.support.fakes.broker import cluster_apis, fetch, metadata, offset_apis, produce
from tests.support.fakes.broker.cluster import LocalLog
from tests.support.fakes.broker.cluster_apis import ShareGroup
from tests.support.fakes.broker.delivery import Deliver, whole
from tests.support.fakes.broker.fake_broker import FakeBroker
from tests.support.fakes.broker.wire import Wire
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.broker.share_groups import DescribeShareGroupOffsetsRequest

APIS: dict[int, tuple[Any, Callable[[ScriptedBroker, Any], Awaitable[Any]]]] = {
    request.API_KEY: (request, answer)
    for request, answer in (
        (ApiVersionsRequest, cluster_apis.api_versions),
        (MetadataRequest, metadata.answer),
        (ProduceRequest, produce.answer),
        (FetchRequest, fetch.answer),
        (ListOffsetsRequest, offset_apis.list_offsets),
        (OffsetForLeaderEpochRequest, offset_apis.offset_for_leader_epoch),
        (DeleteRecordsRequest, offset_apis.delete_records),
        (DescribeClusterRequest, cluster_apis.describe_cluster),
        (DescribeConfigsRequest, cluster_apis.describe_configs),
        (DescribeLogDirsRequest, cluster_apis.describe_log_dirs),
        (ListGroupsRequest, cluster_apis.list_groups),
        (DescribeShareGroupOffsetsRequest, cluster_apis.describe_share_group_offsets),
    )
}
ALL_CLUSTER_OPERATIONS = frozenset(range(3, 13))
"""READ to IDEMPOTENT_WRITE."""
Answer = Callable[[Any], Awaitable[Any]]
Edit = Callable[[Any], None]
"""Changes a response object of kafka-python."""


class ScriptedBroker(FakeBroker):
    """`answers` replaces the answers of an API. `requests` has every decoded request, in order."""

    def __init__(self, node_id: int = 1) -> None:
        super().__init__()
        self.node_id = node_id
        self.requests: list[Any] = []
        self.transcript: list[tuple[str | None, Any]] = []
        """The requests with their client ids."""
        self.scripted_client: str | None = None
        """The client id that scripts apply to. None: all clients."""
        self.correlation_skew = 0
        self.cluster_id = "cluster"
        self.topics: list[TopicMetadata] = []
        self.brokers: list[ScriptedBroker] = [self]
        self.logs: dict[tuple[str, int], LocalLog] = {}
        self.share_groups: list[ShareGroup] = []
        self.cluster_operations = ALL_CLUSTER_OPERATIONS
        """Kafka's numbers of the operations on the cluster that the client may do."""
        self.versions = {key: (0, request.max_version) for key, (request, _) in APIS.items()}
        self.answers: dict[int, Answer] = {key: partial(answer, self) for key, (_, answer) in APIS.items()}
        self._scripts: defaultdict[int, deque[tuple[tuple[Edit, ...], Deliver]]] = defaultdict(deque)

    @property
    def connections(self) -> int:
        return self.connections_made

    def script(self, key: ApiKey, *edits: Edit, deliver: Deliver = whole, times: int = 1) -> None:
        """Scripts the next `times` requests of an API that have no script yet."""
        self._scripts[key] += [(edits, deliver)] * times

    def received(self, request_class: type) -> list[Any]:
        return [request for request in self.requests if isinstance(request, request_class)]

    def sent_by(self, client_id: str, request_class: type) -> list[Any]:
        return [one for sender, one in self.transcript if sender == client_id and isinstance(one, request_class)]

    def topic_name(self, topic_id: object) -> str:
        return next((topic.name for topic in self.topics if topic.topic_id == topic_id), "")

    async def serve(self, wire: Wire) -> None:
        try:
            while True:
                deliver, payload = await self._respond(await wire.receive_when_it_comes())
                await deliver(wire, payload)
        finally:
            await wire.close()

    async def _respond(self, frame: bytes) -> tuple[Deliver, bytes]:
        key, version = int.from_bytes(frame[0:2], "big"), int.from_bytes(frame[2:4], "big")
        request_class, _ = APIS[key]
        data = io.BytesIO(frame)
        header = RequestHeader.decode(data, flexible=request_class.flexible_version_q(version))
        deliver: Deliver = whole
        if key == ApiKey.API_VERSIONS and version > self.versions[key][1]:
            response, version = cluster_apis.versions_of(self, error=35), 0
        else:
            request = request_class.decode(frame[data.tell() :], version=version)
            self.requests.append(request)
            self.transcript.append((header.client_id, request))
            response = await self.answers[key](request)
            if self._scripts[key] and self.scripted_client in (None, header.client_id):
                edits, deliver = self._scripts[key].popleft()
                for edit in edits:
                    edit(response)
        tags = b"\x00" if key != ApiKey.API_VERSIONS and request_class.flexible_version_q(version) else b""
        payload = (header.correlation_id + self.correlation_skew).to_bytes(4, "big") + tags
        return deliver, payload + bytes(response.encode(version=version))


@asynccontextmanager
async def scripted_cluster(*, timeout_ms: int = 60_000) -> AsyncIterator[tuple[list[ScriptedBroker], BrokerClient]]:
    """Yields two brokers, 1 and 2, that name each other, and a client that knows both."""
    async with AsyncExitStack() as stack:
        brokers = [await stack.enter_async_context(ScriptedBroker(node_id)) for node_id in (1, 2)]
        for broker in brokers:
            broker.brokers = brokers
        addresses = [("127.0.0.1", broker.port) for broker in brokers]
        client = BrokerClient(addresses, client_id="test", request_timeout_ms=timeout_ms)
        stack.push_async_callback(client.close)
        yield brokers, client
