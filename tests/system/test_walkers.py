"""The tuned walkers and the record reader agree with a real broker's messages and log, at every version."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from uuid import UUID

import pytest
from confluent_kafka import Producer
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest

from protocol.api_keys import ApiKey
from protocol.apis.delete_records import parse_delete_records_response
from protocol.apis.fetch.request import FetchRequest as ParsedFetchRequest
from protocol.apis.fetch.request import parse_fetch_request, patch_fetch_request
from protocol.apis.fetch.response import FetchResponse, out_of_range, parse_fetch_response, rebuild_response
from protocol.apis.fetch.scan import plain_topics
from protocol.apis.fetch.stream import PartitionHead, PartitionPatch, StreamingFetchPatcher
from protocol.apis.list_offsets import ListOffsetsResponsePartition, parse_list_offsets_response
from protocol.header import response_body_position
from protocol.primitives import write_array_length, write_string
from protocol.records.record_batch import CODEC_GZIP, CODEC_LZ4, CODEC_NONE, CODEC_SNAPPY, CODEC_ZSTD, verify_batches
from protocol.records.record_reader import first_record_at_or_after, read_records
from protocol.steps import finished
from tests.support.rigs.record_deletion import delete_records
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import Peer, topic_id_of
from tests.support.servers.producing import TopicWith, create_topic, produce, produce_transaction

pytestmark = pytest.mark.integration

TIMEOUT_S = 300.0
CODECS = {"none": CODEC_NONE, "gzip": CODEC_GZIP, "snappy": CODEC_SNAPPY, "lz4": CODEC_LZ4, "zstd": CODEC_ZSTD}
Wanted = dict[int, int]
"""The fetch offsets by partition."""


@pytest.fixture
def peer(kafka: KafkaCluster) -> Iterator[Peer]:
    with Peer(kafka.address()) as peer:
        yield peer


def asked(peer: Peer, api_key: int, version: int, body: bytes) -> tuple[bytes, int]:
    """Returns the payload of the answer, and where its body begins."""
    response = peer.ask_bytes(api_key, version, body)
    return response, response_body_position(api_key, version, response)


def fetch_body(version: int, topic: str, topic_id: UUID, wanted: Wanted, isolation_level: int = 0) -> bytes:
    named = {"topic_id": topic_id} if version >= 13 else {"topic": topic}
    partitions = [
        FetchRequest.FetchTopic.FetchPartition(
            version=version, partition=partition, fetch_offset=offset, partition_max_bytes=1 << 20
        )
        for partition, offset in wanted.items()
    ]
    topics = [FetchRequest.FetchTopic(version=version, partitions=partitions, **named)]
    request = FetchRequest(
        version=version, max_wait_ms=100, min_bytes=1, isolation_level=isolation_level, topics=topics
    )
    return bytes(request.encode())


def fetch(
    peer: Peer, version: int, topic: str, topic_id: UUID, wanted: Wanted, isolation_level: int = 0
) -> tuple[FetchResponse, ParsedFetchRequest]:
    body = fetch_body(version, topic, topic_id, wanted, isolation_level)
    payload, position = asked(peer, ApiKey.FETCH, version, body)
    response = parse_fetch_response(payload, position, version)
    assert b"".join(rebuild_response(response)) == payload
    return response, parse_fetch_request(body, 0, version)


class ServedLater:
    """Patches as the proxy does for an unforeseen OUT_OF_RANGE in a streamed response."""

    def partition(self, head: PartitionHead) -> PartitionPatch | None:
        if head.error_code == 1:
            return PartitionPatch(error_code=0, high_watermark=60, last_stable_offset=60, log_start_offset=0)
        return PartitionPatch(log_start_offset=0)


def test_fetch_at_every_version(kafka: KafkaCluster, peer: Peer, topic_name: str) -> None:
    create_topic(kafka.bootstrap_servers, topic_name, partitions=2)
    values = [b"%d" % i for i in range(60)]
    for partition in (0, 1):
        produce(kafka.bootstrap_servers, topic_name, values, partition=partition)
    produce_transaction(
        kafka.bootstrap_servers, topic_name, values[:5], transactional_id=topic_name, commit=False, partition=1
    )
    assert delete_records(kafka.bootstrap_servers, topic_name, 30) == 30
    topic_id = topic_id_of(kafka.bootstrap_servers, topic_name)
    for version in range(4, 19):
        topic = topic_id if version >= 13 else topic_name

        response, _ = fetch(peer, version, topic_name, topic_id, {0: 30, 1: 0})
        assert [(p.topic, p.partition, p.error_code) for p in response.partitions] == [(topic, 0, 0), (topic, 1, 0)]
        assert [p.high_watermark for p in response.partitions] == [60, 66]
        assert [p.log_start_offset for p in response.partitions] == ([30, 0] if version >= 5 else [-1, -1])
        assert [response.aborted_transactions(p) for p in response.partitions] == [None, None]
        assert plain_topics(response.payload, response.body_position, version) == [topic]
        for partition, first_offset, next_offset in ((0, 30, 60), (1, 0, 66)):
            batches = verify_batches(response.records(response.partitions[partition]), first_offset)
            assert batches[-1].next_offset == next_offset

        response, _ = fetch(peer, version, topic_name, topic_id, {1: 55}, isolation_level=1)
        (partition_1,) = response.partitions
        ((producer_id, first_offset),) = response.aborted_transactions(partition_1) or ()
        marker = verify_batches(response.records(partition_1))[-1]
        assert marker.is_control
        assert (marker.producer_id, first_offset) == (producer_id, 60)

        response, request = fetch(peer, version, topic_name, topic_id, {0: 3, 1: 0})
        assert out_of_range(response) == [0]
        trimmed = response.partitions[0]
        assert (trimmed.high_watermark, trimmed.last_stable_offset, trimmed.records_bytes) == (-1, -1, 0)
        assert plain_topics(response.payload, response.body_position, version) is None

        patcher = StreamingFetchPatcher(version, ServedLater(), session_id=0, hide_node_endpoints=True)
        patched = b"".join(patcher.feed(response.payload))
        assert patcher.is_complete
        assert [head.partition for head in patcher.out_of_range] == [0]
        again = parse_fetch_response(patched, response.body_position, version)
        assert [(p.error_code, p.high_watermark) for p in again.partitions] == [(0, 60), (0, 66)]

        reduced = finished(request.with_only({1}))
        patch_fetch_request(reduced, 0, version, max_wait_ms=1, max_bytes=1, session_id=0, session_epoch=-1)
        payload, position = asked(peer, ApiKey.FETCH, version, bytes(reduced))
        (only,) = parse_fetch_response(payload, position, version).partitions
        assert (only.partition, only.error_code, only.high_watermark) == (1, 0, 66)
        assert len(verify_batches(parse_fetch_response(payload, position, version).records(only))) == 1


def test_records_and_look_ups_of_every_codec(kafka: KafkaCluster, peer: Peer, topic_name: str) -> None:
    create_topic(kafka.bootstrap_servers, topic_name, partitions=len(CODECS), config={"retention.ms": "-1"})
    topic_id = topic_id_of(kafka.bootstrap_servers, topic_name)
    timestamps = [1_600_000_000_000 + 10 * (i if i % 7 else i + 3) for i in range(40)]
    headers: list[tuple[str, str | bytes | None]] = [("h", b"1"), ("n", None)]
    for partition, codec in enumerate(CODECS):
        producer = Producer(
            {
                "bootstrap.servers": kafka.bootstrap_servers,
                "compression.type": codec,
                "linger.ms": 200,
                "enable.idempotence": True,
            }
        )
        for i, timestamp in enumerate(timestamps):
            producer.produce(
                topic_name,
                b"value-%d" % i * 20,
                b"key",
                partition,
                timestamp=timestamp,
                headers=headers,
            )
        assert producer.flush(TIMEOUT_S) == 0

        response, _ = fetch(peer, 17, topic_name, topic_id, {partition: 0})
        log = response.records(response.partitions[0])
        batches = verify_batches(log)
        assert {batch.codec for batch in batches} == {CODECS[codec]}
        records = [record for batch in batches for record in read_records(log, batch)]
        assert [r.offset for r in records] == list(range(40))
        assert [r.timestamp for r in records] == timestamps
        assert [r.value for r in records] == [b"value-%d" % i * 20 for i in range(40)]
        assert all(r.key == b"key" and r.headers == tuple(headers) for r in records)

        for timestamp in range(timestamps[0] - 5, max(timestamps) + 10, 25):
            hits = (first_record_at_or_after(log, batch, timestamp) for batch in batches)
            found = next((hit for hit in hits if hit is not None), None)
            answer = list_offsets(peer, 7, topic_name, partition, timestamp)
            assert (answer.timestamp, answer.offset) == (found or (-1, -1))


def test_list_offsets_at_every_version(kafka: KafkaCluster, peer: Peer, topic_name: str, topic_with: TopicWith) -> None:
    topic_with([b"v"] * 20)
    for version in range(1, 12):
        latest = list_offsets(peer, version, topic_name, 0, -1)
        assert (latest.topic, latest.error_code, latest.offset) == (topic_name, 0, 20)
        assert latest.leader_epoch == (0 if version >= 4 else -1)


def list_offsets(peer: Peer, version: int, topic: str, partition: int, timestamp: int) -> ListOffsetsResponsePartition:
    entry = ListOffsetsRequest.ListOffsetsTopic.ListOffsetsPartition(
        version=version, partition_index=partition, timestamp=timestamp
    )
    topics = [ListOffsetsRequest.ListOffsetsTopic(version=version, name=topic, partitions=[entry])]
    body = ListOffsetsRequest(version=version, replica_id=-1, isolation_level=0, topics=topics).encode()
    payload, position = asked(peer, ApiKey.LIST_OFFSETS, version, bytes(body))
    (answer,) = parse_list_offsets_response(payload, position, version).partitions
    return answer


@pytest.mark.parametrize("version", range(3))
def test_delete_records(kafka: KafkaCluster, peer: Peer, topic_name: str, topic_with: TopicWith, version: int) -> None:
    topic_with([b"v"] * 20)
    compact = version == 2
    tags = b"\x00" if compact else b""
    body = write_array_length(1, compact) + write_string(topic_name, compact) + write_array_length(1, compact)
    body += struct.pack(">iq", 0, 12) + tags + tags + struct.pack(">i", 10_000) + tags
    payload, position = asked(peer, ApiKey.DELETE_RECORDS, version, body)
    (answer,) = parse_delete_records_response(payload, position, version).partitions
    assert (answer.topic, answer.partition, answer.low_watermark, answer.error_code) == (topic_name, 0, 12, 0)
