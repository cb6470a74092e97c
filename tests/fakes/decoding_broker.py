"""A broker on a real socket that answers what a test tells it to."""

from __future__ import annotations

import asyncio
import io
from collections.abc import Awaitable, Callable
from typing import Any, Self

from kafka.protocol.admin import DeleteRecordsRequest, DescribeConfigsRequest
from kafka.protocol.api_header import RequestHeader
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest, OffsetForLeaderEpochRequest
from kafka.protocol.metadata import ApiVersionsRequest, ApiVersionsResponse, MetadataRequest, MetadataResponse

from tiers.broker.cluster_metadata import TopicMetadata

REQUEST_CLASSES = {
    request.API_KEY: request
    for request in (
        ApiVersionsRequest,
        MetadataRequest,
        FetchRequest,
        ListOffsetsRequest,
        OffsetForLeaderEpochRequest,
        DeleteRecordsRequest,
        DescribeConfigsRequest,
    )
}
Answer = Callable[[Any], Awaitable[Any]]


class DecodingBroker:
    """`answers` maps an api key to a coroutine function from the decoded request to kafka-python's response object.

    ApiVersions and Metadata are answered by default; every request is kept in `requests`, in order.
    """

    def __init__(self, node_id: int = 1) -> None:
        self.node_id = node_id
        self.port = 0
        self.requests: list[Any] = []
        self.connections = 0
        self.correlation_skew = 0
        self.cluster_id = "cluster"
        self.topics: list[TopicMetadata] = []
        self.brokers: list[DecodingBroker] = [self]
        self.versions = {key: (0, request.max_version) for key, request in REQUEST_CLASSES.items()}
        self.answers: dict[int, Answer] = {
            ApiVersionsRequest.API_KEY: self._api_versions,
            MetadataRequest.API_KEY: self._metadata,
        }
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def start(self) -> None:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", self.port)
        self.port = self._server.sockets[0].getsockname()[1]

    async def stop(self) -> None:
        assert self._server is not None
        self._server.close()
        self.drop_connections()
        await self._server.wait_closed()

    def drop_connections(self) -> None:
        for writer in list(self._writers):
            writer.transport.abort()

    def received(self, request_class: type) -> list[Any]:
        return [request for request in self.requests if isinstance(request, request_class)]

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self._writers.add(writer)
        try:
            while True:
                frame = await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))
                writer.write(await self._answer(frame))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            self._writers.discard(writer)
            writer.close()

    async def _answer(self, frame: bytes) -> bytes:
        key, version = int.from_bytes(frame[0:2], "big"), int.from_bytes(frame[2:4], "big")
        request_class = REQUEST_CLASSES[key]
        data = io.BytesIO(frame)
        header = RequestHeader.decode(data, flexible=request_class.flexible_version_q(version))
        if key == ApiVersionsRequest.API_KEY and version > self.versions[key][1]:
            response, version = self._api_versions_response(35), 0
        else:
            request = request_class.decode(frame[data.tell() :], version=version)
            self.requests.append(request)
            response = await self.answers[key](request)
        tags = b"\x00" if key != ApiVersionsRequest.API_KEY and request_class.flexible_version_q(version) else b""
        payload: bytes = (header.correlation_id + self.correlation_skew).to_bytes(4, "big") + tags
        payload += bytes(response.encode(version=version))
        return len(payload).to_bytes(4, "big") + payload

    def _api_versions_response(self, error: int) -> Any:
        keys = [
            ApiVersionsResponse.ApiVersion(api_key=key, min_version=low, max_version=high)
            for key, (low, high) in self.versions.items()
        ]
        return ApiVersionsResponse(error_code=error, api_keys=keys, throttle_time_ms=0)

    async def _api_versions(self, request: Any) -> Any:
        return self._api_versions_response(0)

    async def _metadata(self, request: Any) -> Any:
        response = MetadataResponse
        topic_class = response.MetadataResponseTopic
        return response(
            throttle_time_ms=0,
            cluster_id=self.cluster_id,
            controller_id=self.node_id,
            brokers=[
                response.MetadataResponseBroker(node_id=b.node_id, host="127.0.0.1", port=b.port, rack=None)
                for b in self.brokers
            ],
            topics=[
                topic_class(
                    error_code=topic.error,
                    name=topic.name,
                    topic_id=topic.topic_id,
                    is_internal=topic.is_internal,
                    partitions=[
                        topic_class.MetadataResponsePartition(
                            error_code=p.error,
                            partition_index=p.index,
                            leader_id=p.leader_id,
                            leader_epoch=p.leader_epoch,
                            replica_nodes=list(p.replicas),
                            isr_nodes=list(p.isr),
                            offline_replicas=[],
                        )
                        for p in topic.partitions.values()
                    ],
                )
                for topic in self.topics
            ],
        )
