"""How a broker reads the edges of a request: the length of the client id, and bytes behind the last field."""

from __future__ import annotations

import socket
import struct
from collections.abc import Callable
from typing import Any

import pytest
from kafka.protocol.admin import DeleteRecordsRequest
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest, OffsetForLeaderEpochRequest

from protocol.frame import REQUEST_HEAD_BYTES, frame_length
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic

pytestmark = pytest.mark.integration

CLIENT_ID = b"\0\1x"


def list_offsets(topic: str, version: int) -> Any:
    of_topic = ListOffsetsRequest.ListOffsetsTopic
    partition = of_topic.ListOffsetsPartition(version=version, partition_index=0, current_leader_epoch=-1, timestamp=-2)
    topics = [of_topic(version=version, name=topic, partitions=[partition])]
    return ListOffsetsRequest(version=version, replica_id=-1, isolation_level=0, timeout_ms=0, topics=topics)


def delete_records(topic: str, version: int) -> Any:
    of_topic = DeleteRecordsRequest.DeleteRecordsTopic
    partition = of_topic.DeleteRecordsPartition(version=version, partition_index=0, offset=0)
    topics = [of_topic(version=version, name=topic, partitions=[partition])]
    return DeleteRecordsRequest(version=version, timeout_ms=20_000, topics=topics)


def offset_for_leader_epoch(topic: str, version: int) -> Any:
    of_topic = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
    partition = of_topic.OffsetForLeaderPartition(version=version, partition=0, current_leader_epoch=-1, leader_epoch=0)
    topics = [of_topic(version=version, topic=topic, partitions=[partition])]
    return OffsetForLeaderEpochRequest(version=version, replica_id=-2, topics=topics)


def fetch(topic: str, version: int) -> Any:
    of_topic = FetchRequest.FetchTopic
    partition = of_topic.FetchPartition(version=version, partition=0, fetch_offset=0, partition_max_bytes=1000)
    return FetchRequest(
        version=version,
        replica_id=-1,
        max_wait_ms=0,
        min_bytes=0,
        max_bytes=1000,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=[of_topic(version=version, topic=topic, partitions=[partition])],
    )


def answer_to(address: tuple[str, int], payload: bytes) -> bytes:
    """Returns the answer with its length. Empty: the broker closed the connection instead."""
    with socket.create_connection(address, timeout=300) as peer, peer.makefile("rb") as answers:
        peer.sendall(frame_length(payload) + payload)
        length = answers.read(4)
        return length + answers.read(struct.unpack(">i", length)[0]) if length else b""


@pytest.mark.parametrize(
    ("request_of", "versions"),
    [(list_offsets, (1, 9)), (delete_records, (1, 2)), (offset_for_leader_epoch, (3, 4)), (fetch, (4, 12))],
    ids=["ListOffsets", "DeleteRecords", "OffsetForLeaderEpoch", "Fetch"],
)
def test_a_broker_reads_the_edges_of_a_request(
    kafka: KafkaCluster, request_of: Callable[[str, int], Any], versions: tuple[int, int]
) -> None:
    """The second version is flexible, and the first one is not."""
    topic = f"framing-{request_of.__name__}"
    create_topic(kafka.bootstrap_servers, topic)
    for version in versions:
        asked = request_of(topic, version)
        asked.API_VERSION = version
        asked.with_header(correlation_id=7, client_id="x")
        payload = bytes(asked.encode(header=True, framed=False))
        head, body = payload[:REQUEST_HEAD_BYTES], payload[REQUEST_HEAD_BYTES + len(CLIENT_ID) :]
        answer = answer_to(kafka.address(), payload)
        assert answer
        assert answer_to(kafka.address(), payload + b"\xff\x01\x02") == answer
        for length in (-1, -2, -(2**15)):
            assert answer_to(kafka.address(), head + struct.pack(">h", length) + body) == answer
        assert answer_to(kafka.address(), head + struct.pack(">h", 30_000) + body) == b""
