"""No client of the proxy fences the owners or takes part in their group; all other ids work as without the proxy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from uuid import UUID

import pytest
from confluent_kafka import Consumer, ConsumerGroupTopicPartitions, KafkaException, TopicPartition
from confluent_kafka.admin import AdminClient

from protocol.api_keys import DECODED_APIS, ApiKey
from protocol.apis.coordinated_ids import GROUP_APIS, TRANSACTION_APIS
from protocol.errors import ErrorCode
from protocol.header import response_body_position
from protocol.message_schema import message_name
from protocol.primitives import write_string
from protocol.schema import compile_message
from tests.support.fakes.message_encoder import message_names, smallest
from tests.support.rigs.waiting import TIMEOUT_S, until
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.peer import Peer
from tests.support.servers.producing import create_topic, transactional_producer
from tests.support.servers.tidegate import tidegate_over

pytestmark = pytest.mark.integration

APIS = (*TRANSACTION_APIS, *GROUP_APIS, ApiKey.DELETE_GROUPS)
OF_PARTITIONS = (ApiKey.OFFSET_COMMIT, ApiKey.TXN_OFFSET_COMMIT)


def body(key: ApiKey, version: int, transactional_id: str, group_id: str, topic: str) -> bytes:
    """Returns a request of no producer and no member, with one partition where the API names partitions."""
    name = message_name(key, "Request")
    if name not in message_names():
        return write_string(group_id, compact=True) + b"\x01" + bytes(20)
    if key == ApiKey.DELETE_GROUPS:
        return smallest(name, version, GroupsNames=[group_id, f"{group_id}-other"])
    partition: dict[str, Any] = {
        "PartitionIndex": 0,
        "CommittedOffset": 0,
        "CommittedLeaderEpoch": -1,
        "CommittedMetadata": None,
    }
    fields: dict[str, Any] = {}
    if key in OF_PARTITIONS:
        fields["Topics"] = [{"Name": topic, "TopicId": UUID(int=1), "Partitions": [partition]}]
    if key in TRANSACTION_APIS:
        fields |= {"TransactionalId": transactional_id}
    if key == ApiKey.ADD_PARTITIONS_TO_TXN:
        topics = [{"Name": topic, "Partitions": [0]}]
        fields = {"V3AndBelowTransactionalId": transactional_id, "V3AndBelowTopics": topics}
    if key in (*GROUP_APIS, ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.TXN_OFFSET_COMMIT):
        fields |= {"GroupId": group_id}
    if key == ApiKey.INIT_PRODUCER_ID:
        fields |= {"TransactionTimeoutMs": 60_000} | ({"ProducerId": -1, "ProducerEpoch": -1} if version >= 3 else {})
    return smallest(name, version, **fields)


def codes(bootstrap: str, key: ApiKey, version: int, request: bytes) -> list[int]:
    """Sends a request, and returns the error codes of the answer, in wire order."""
    host, _, port = bootstrap.rpartition(":")
    with Peer((host, int(port))) as peer:
        payload = peer.ask_bytes(key, version, request)
    spans = compile_message(key, version, "Response").walk(payload, response_body_position(key, version, payload))
    assert spans[-1].end == len(payload)
    return [
        int.from_bytes(payload[span.start : span.end], signed=True)
        for span in spans
        if span.kind == "value" and str(span.path[-1]).endswith("ErrorCode")
    ]


def code_of(call: Callable[[], object]) -> int:
    with pytest.raises(KafkaException) as refused:
        call()
    return int(refused.value.args[0].code())


def members_of(bootstrap: str, group_id: str) -> set[str]:
    admin = AdminClient({"bootstrap.servers": bootstrap})  # it must outlive its request
    described = admin.describe_consumer_groups([group_id])[group_id].result(TIMEOUT_S)
    return {member.member_id for member in described.members}


def refusals(bootstrap: str, group_id: str, topic: str) -> None:
    """Each API in each version, with the owners' ids."""
    for key in APIS:
        for version in range(DECODED_APIS[key].min_version, DECODED_APIS[key].max_version + 1):
            if key in TRANSACTION_APIS:
                found = codes(bootstrap, key, version, body(key, version, f"{group_id}-0", "other", topic))
                assert set(found) == {ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED}, (key.name, version)
            if key not in TRANSACTION_APIS or key in (ApiKey.ADD_OFFSETS_TO_TXN, ApiKey.TXN_OFFSET_COMMIT):
                found = codes(bootstrap, key, version, body(key, version, "other", group_id, topic))
                if key == ApiKey.DELETE_GROUPS:
                    assert len(found) == 2
                    assert ErrorCode.GROUP_AUTHORIZATION_FAILED not in found[1:]
                    found = found[:1]
                assert set(found) == {ErrorCode.GROUP_AUTHORIZATION_FAILED}, (key.name, version)


def others_pass(bootstrap: str, direct: str, topic: str) -> None:
    """Each API whose request has a schema, in its newest version, with other ids: as the broker answers it."""
    for key in (key for key in APIS if message_name(key, "Request") in message_names()):
        version = DECODED_APIS[key].max_version - (key == ApiKey.INIT_PRODUCER_ID)  # the newest is not released
        asked = body(key, version, "tidegate", f"tidegate-{topic}", topic)
        assert codes(bootstrap, key, version, asked) == codes(direct, key, version, asked), key.name


def test_the_owners_ids_are_refused_and_others_pass(kafka: KafkaCluster, topic_name: str, tmp_path: Path) -> None:
    metadata_topic = f"__metadata-{topic_name}"
    group_id = f"tidegate-{metadata_topic}"
    create_topic(kafka.bootstrap_servers, topic_name)
    proxy = tidegate_over(
        kafka, tmp_path, tiered=[topic_name], settings={"remote.log.metadata.topic.name": metadata_topic}
    )
    with proxy:
        bootstrap = proxy.bootstrap_servers
        until(lambda: bool(members_of(bootstrap, group_id)))
        members = members_of(bootstrap, group_id)

        refusals(bootstrap, group_id, topic_name)
        others_pass(bootstrap, kafka.bootstrap_servers, topic_name)
        librdkafka_is_refused(bootstrap, group_id, topic_name)
        librdkafka_commits(bootstrap, topic_name)

        assert members_of(bootstrap, group_id) == members


def librdkafka_is_refused(bootstrap: str, group_id: str, topic: str) -> None:
    transactional_id = ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED
    assert code_of(lambda: transactional_producer(bootstrap, f"{group_id}-1")) == transactional_id
    assert code_of(lambda: transactional_producer(bootstrap, f"{group_id}-tier-configs-1")) == transactional_id
    admin = AdminClient({"bootstrap.servers": bootstrap})
    refused = ErrorCode.GROUP_AUTHORIZATION_FAILED
    assert code_of(lambda: admin.delete_consumer_groups([group_id])[group_id].result(TIMEOUT_S)) == refused
    offsets = ConsumerGroupTopicPartitions(group_id, [TopicPartition(topic, 0, 0)])
    (altered,) = admin.alter_consumer_group_offsets([offsets]).values()
    (partition,) = altered.result(TIMEOUT_S).topic_partitions
    assert partition.error.code() == refused
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group_id})
    consumer.subscribe([topic])
    try:
        message = consumer.poll(TIMEOUT_S)
        assert message is not None
        error = message.error()
        assert error is not None
        assert error.code() == refused
    finally:
        consumer.close()


def librdkafka_commits(bootstrap: str, topic: str) -> None:
    """An ordinary transactional.id and an ordinary group."""
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": f"group-{topic}",
            "isolation.level": "read_committed",
            "auto.offset.reset": "earliest",
        }
    )
    consumer.subscribe([topic])
    try:
        producer = transactional_producer(bootstrap, f"writer-{topic}")
        producer.begin_transaction()
        producer.produce(topic, b"value")
        producer.flush(TIMEOUT_S)
        while not consumer.assignment():
            consumer.poll(0.1)
        producer.send_offsets_to_transaction([TopicPartition(topic, 0, 1)], consumer.consumer_group_metadata())
        producer.commit_transaction(TIMEOUT_S)
        (committed,) = consumer.committed([TopicPartition(topic, 0)], TIMEOUT_S)
        assert committed.offset == 1
    finally:
        consumer.close()
