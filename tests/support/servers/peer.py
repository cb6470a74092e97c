"""A connection that sends the requests of a test, at the version of the test, and does not interpret the answers."""

from __future__ import annotations

import socket
import struct
import time
from types import TracebackType
from typing import Any, Self
from uuid import UUID

from confluent_kafka import KafkaError, KafkaException, TopicCollection
from confluent_kafka.admin import AdminClient
from kafka.protocol.api_header import ResponseClassRegistry
from kafka.protocol.consumer import (
    FetchRequest,
    ListOffsetsRequest,
    OffsetForLeaderEpochRequest,
)

from protocol.api_keys import ApiKey
from protocol.apis.fetch.response import FetchResponse, parse_fetch_response
from protocol.frame import frame_length
from protocol.header import build_request_header, response_body_position

TIMEOUT_S = 300.0


class Peer:
    """A context manager. Requests and answers are objects of kafka-python."""

    def __init__(self, address: tuple[str, int]) -> None:
        self._socket = socket.create_connection(address, timeout=TIMEOUT_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        self._socket.close()

    def ask(self, request: Any, version: int) -> Any:
        """Sends a request, and returns the answer as an object of kafka-python."""
        payload = self.ask_raw(request, version)
        response_class = ResponseClassRegistry.get_response_class(request.header)
        return response_class.decode(payload[response_body_position(request.API_KEY, version, payload) :], version)

    def ask_raw(self, request: Any, version: int) -> bytes:
        """Sends a request, and returns the payload of the answer with its header."""
        request.API_VERSION = version
        request.with_header(correlation_id=7, client_id="peer")
        return self._answer(request.encode(header=True, framed=True))

    def ask_bytes(self, api_key: int, version: int, body: bytes) -> bytes:
        """Sends a request with this body, and returns the payload of the answer with its header."""
        payload = build_request_header(api_key, version, 7, "peer") + body
        return self._answer(frame_length(payload) + payload)

    def _answer(self, frame: bytes) -> bytes:
        self._socket.sendall(frame)
        (length,) = struct.unpack(">i", self._receive(4))
        return self._receive(length)

    def _receive(self, length: int) -> bytes:
        out = bytearray()
        while len(out) < length:
            data = self._socket.recv(length - len(out))
            assert data, "hung up"
            out += data
        return bytes(out)

    def fetch(
        self,
        version: int,
        topic: str,
        topic_id: UUID,
        offset: int,
        *,
        partition: int = 0,
        isolation_level: int = 0,
        max_bytes: int = 1 << 20,
        last_fetched_epoch: int = -1,
        current_leader_epoch: int = -1,
    ) -> FetchResponse:
        """Fetches one partition, without a session."""
        named = {"topic_id": topic_id} if version >= 13 else {"topic": topic}
        asked = FetchRequest.FetchTopic.FetchPartition(
            version=version,
            partition=partition,
            fetch_offset=offset,
            partition_max_bytes=max_bytes,
            last_fetched_epoch=last_fetched_epoch,
            current_leader_epoch=current_leader_epoch,
        )
        request = FetchRequest(
            version=version,
            max_wait_ms=100,
            min_bytes=1,
            max_bytes=max_bytes,
            session_epoch=-1,
            isolation_level=isolation_level,
            topics=[FetchRequest.FetchTopic(version=version, partitions=[asked], **named)],
        )
        payload = self.ask_raw(request, version)
        return parse_fetch_response(payload, response_body_position(ApiKey.FETCH, version, payload), version)

    def list_offsets(
        self,
        version: int,
        topic: str,
        asked: list[tuple[int, int]],
        *,
        isolation_level: int = 0,
        current_leader_epoch: int = -1,
        timeout_ms: int = 20_000,
        replica_id: int = -1,
    ) -> list[tuple[int, int, int, int, int]]:
        """Sends a ListOffsets request. `asked` are pairs (partition, timestamp).

        Returns (partition, error, timestamp, offset, leader epoch) for each partition, in wire order."""
        entries = [
            ListOffsetsRequest.ListOffsetsTopic.ListOffsetsPartition(
                version=version,
                partition_index=partition,
                timestamp=timestamp,
                current_leader_epoch=current_leader_epoch,
            )
            for partition, timestamp in asked
        ]
        topics = [ListOffsetsRequest.ListOffsetsTopic(version=version, name=topic, partitions=entries)]
        request = ListOffsetsRequest(
            version=version,
            replica_id=replica_id,
            isolation_level=isolation_level,
            timeout_ms=timeout_ms,
            topics=topics,
        )
        answer = self.ask(request, version)
        return [
            (one.partition_index, one.error_code, one.timestamp, one.offset, one.leader_epoch if version >= 4 else -1)
            for entry in answer.topics
            for one in entry.partitions
        ]

    def offset_for_leader_epoch(
        self, version: int, topic: str, leader_epoch: int, *, current_leader_epoch: int = -1
    ) -> tuple[int, int, int]:
        """Returns the error, epoch and end offset of partition 0."""
        asked = OffsetForLeaderEpochRequest.OffsetForLeaderTopic.OffsetForLeaderPartition(
            version=version, partition=0, current_leader_epoch=current_leader_epoch, leader_epoch=leader_epoch
        )
        topics = [OffsetForLeaderEpochRequest.OffsetForLeaderTopic(version=version, topic=topic, partitions=[asked])]
        request = OffsetForLeaderEpochRequest(version=version, replica_id=-1, topics=topics)
        (one,) = self.ask(request, version).topics[0].partitions
        return one.error_code, one.leader_epoch, one.end_offset


def topic_id_of(bootstrap: str, topic: str) -> UUID:
    """Returns the id of an existing topic. Retries, since the broker may learn of the topic a moment later."""
    admin = AdminClient({"bootstrap.servers": bootstrap})
    deadline = time.monotonic() + TIMEOUT_S
    while True:
        try:
            described = admin.describe_topics(TopicCollection([topic]))[topic].result(TIMEOUT_S)
            break
        except KafkaException as refused:
            if refused.args[0].code() != KafkaError.UNKNOWN_TOPIC_OR_PART or time.monotonic() > deadline:
                raise
        time.sleep(0.1)
    most, least = described.topic_id.get_most_significant_bits(), described.topic_id.get_least_significant_bits()
    return UUID(bytes=struct.pack(">qq", most, least))
