"""The sliced reader of Metadata says the same as Kafka's schema, and works in slices of bounded size."""

from __future__ import annotations

import random
from typing import Any
from uuid import UUID

import pytest
from kafka.protocol.metadata import MetadataResponse

from protocol.apis.metadata import FIRST_VERSION, LAST_VERSION, MetadataReader, PartitionMetadata, TopicEntry
from protocol.errors import ProtocolError, TruncatedError

TOPIC = MetadataResponse.MetadataResponseTopic


def nodes(rnd: random.Random, most: int) -> list[int]:
    return [rnd.randrange(1 << 20) for _ in range(rnd.randrange(most + 1))]


def partition(rnd: random.Random, index: int) -> Any:
    return TOPIC.MetadataResponsePartition(
        error_code=rnd.choice([0, 5]),
        partition_index=index,
        leader_id=rnd.randrange(-1, 5),
        leader_epoch=rnd.randrange(-1, 1 << 30),
        replica_nodes=nodes(rnd, rnd.choice([3, 200])),
        isr_nodes=nodes(rnd, 3),
        offline_replicas=nodes(rnd, 1),
    )


def topic(rnd: random.Random, number: int) -> Any:
    indexes = list(range(rnd.choice([0, 1, 5, 40])))
    if rnd.random() < 0.3:
        rnd.shuffle(indexes)
    return TOPIC(
        error_code=0,
        name=f"topic-{number}",
        topic_id=UUID(int=rnd.getrandbits(128)),
        is_internal=rnd.random() < 0.5,
        partitions=[partition(rnd, index) for index in indexes],
        authorized_operations=rnd.choice([None, set(), {3, 4, 8}, {30}]),
    )


def response(rnd: random.Random, topics: list[Any]) -> MetadataResponse:
    broker = MetadataResponse.MetadataResponseBroker
    return MetadataResponse(
        throttle_time_ms=3,
        brokers=[broker(node_id=n, host=f"host-{n}", port=9092 + n, rack=rnd.choice([None, "r"])) for n in range(4)],
        cluster_id=rnd.choice([None, "cluster"]),
        controller_id=2,
        topics=topics,
    )


def encoded(message: MetadataResponse, version: int) -> bytes:
    return bytes(message.encode(version=version))


def read(body: bytes, version: int, slice_bytes: int = 1 << 20) -> tuple[MetadataReader, list[TopicEntry]]:
    reader = MetadataReader(body, version)
    return reader, [entry for entry in reader.read(slice_bytes) if entry is not None]


@pytest.mark.parametrize("version", range(FIRST_VERSION, LAST_VERSION + 1))
def test_the_reader_says_what_the_schema_says(version: int) -> None:
    rnd = random.Random(version)
    for _ in range(40):
        message = response(rnd, [topic(rnd, number) for number in range(rnd.randrange(6))])
        reader, topics = read(encoded(message, version), version, rnd.choice([1, 50, 1 << 20]))
        assert [tuple(one) for one in reader.brokers] == [(b.node_id, b.host, b.port, b.rack) for b in message.brokers]
        assert (reader.cluster_id, reader.controller_id) == (message.cluster_id, 2)
        assert [one[:4] for one in topics] == [
            (t.error_code, t.name, t.topic_id, t.is_internal) for t in message.topics
        ]
        for said, entry in zip(message.topics, topics, strict=True):
            operations = said.authorized_operations
            assert entry.operations == (None if operations is None else sum(1 << each for each in operations))
            columns = entry.partitions
            assert len(columns) == len(said.partitions)
            assert list(columns.values()) == [
                PartitionMetadata(one.partition_index, one.leader_id, one.leader_epoch, one.error_code)
                for one in said.partitions
            ]
            assert columns.get(len(said.partitions)) is None


def test_a_topic_that_is_unknown_by_its_id_has_no_name() -> None:
    unknown = TOPIC(error_code=100, name=None, topic_id=UUID(int=9), is_internal=False, partitions=[])
    _, (entry,) = read(encoded(response(random.Random(1), [unknown]), 12), 12)
    assert entry[:3] == (100, None, UUID(int=9))


def test_every_slice_is_bounded() -> None:
    rnd = random.Random(5)
    large = topic(rnd, 1)
    large.partitions = [partition(rnd, index) for index in range(3_000)]
    for one in large.partitions:
        one.replica_nodes = one.isr_nodes = [1, 2, 3]
    body = encoded(response(rnd, [large, *(topic(rnd, 2 + number) for number in range(50))]), 12)
    reader, slices, begun = MetadataReader(body, 12), [], 0
    for entry in reader.read(4_096):
        if entry is None:
            slices.append(reader.position - begun)
            begun = reader.position
    assert len(slices) > 20
    assert max(slices) <= 4_096 + 1_000  # one partition with 200 replicas at most
    assert reader.position == len(body)


def test_a_damaged_response_raises_a_protocol_error() -> None:
    rnd = random.Random(6)
    body = encoded(response(rnd, [topic(rnd, number) for number in range(3)]), 12)
    for end in range(0, len(body), 11):
        with pytest.raises(TruncatedError):
            read(body[:end], 12)
    with pytest.raises(ProtocolError, match="follow the end"):
        read(body + b"\x00", 12)
    with pytest.raises(ProtocolError, match="version 9"):
        read(body, 9)
