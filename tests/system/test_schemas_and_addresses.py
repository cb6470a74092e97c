"""The schemas equal Kafka's own, and the proxy rewrites the addresses in a real broker's answers."""

from __future__ import annotations

import struct
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

import pytest

from protocol.addresses import rewrite_addresses
from protocol.api_keys import DECODED_APIS, FLEXIBLE_FROM, HIDDEN_APIS, NEVER_FLEXIBLE, ApiKey
from protocol.apis.api_versions import intersect_api_versions, unsupported_version_response
from protocol.header import response_body_position
from protocol.message_schema import FieldSchema, load_schema, message_name, parse_schema
from protocol.primitives import write_string
from protocol.schema import compile_message
from tests.conftest import BROKER_HOST
from tests.support.fakes.message_encoder import Value, encode, message_names
from tests.support.servers.kafka import KafkaCluster, kafka_libs
from tests.support.servers.peer import Peer
from tests.support.servers.ports import PORTS
from tests.support.servers.producing import create_topic

pytestmark = pytest.mark.integration

CORRELATION_ID = 7
BROKERS = 3
MISMATCHED_ENDPOINT_TYPE = 114
FIRST_PORT = PORTS.stop
"""The first port above those of the brokers, so that every port changes."""
NO_NODE = b"\xff\xff\xff\xff"
UNKNOWN_TOPIC_OR_PARTITION = b"\x00\x03"
NOT_LEADER_OR_FOLLOWER = b"\x00\x06"


class SchemaPeer(Peer):
    """A connection to a broker. Requests are values of our schemas, and answers are whole payloads."""

    def ask_message(self, api_key: int, version: int, value: Value) -> bytes:
        return self.ask_bytes(api_key, version, bytes(encode(message_name(api_key, "Request"), version, value).data))

    def ask_for_brokers(self, api_key: int, version: int, value: Value) -> bytes:
        """Returns the first answer that names all brokers. A broker that was paused is missing for a while."""
        while (answer := self.ask_message(api_key, version, value)).count(BROKER_HOST.encode()) < BROKERS:
            time.sleep(0.1)
        return answer


@pytest.fixture
def peer(kafka_of_three: KafkaCluster) -> Iterator[SchemaPeer]:
    with SchemaPeer(kafka_of_three.address(1)) as peer:
        yield peer


def fields(api_key: int, version: int, payload: bytes) -> dict[tuple[str | int, ...], bytes]:
    """Returns every field of a response by its path. The walk must end at the end of the payload."""
    spans = compile_message(api_key, version, "Response").walk(
        payload, response_body_position(api_key, version, payload)
    )
    assert spans[-1].end == len(payload)
    return {span.path: payload[span.start : span.end] for span in spans if span.kind == "value"}


def versions_in(payload: bytes) -> dict[int, tuple[int, int]]:
    """Returns the version ranges in an ApiVersions v0 answer."""
    entries = struct.iter_unpack(">hhh", payload[10:])
    return {api_key: (first, last) for api_key, first, last in entries}


def assert_rewritten(api_key: int, version: int, payload: bytes, expected_addresses: int) -> None:
    rewritten = bytes(
        rewrite_addresses(api_key, version, payload, lambda node_id: (f"n{node_id}", FIRST_PORT + node_id))
    )
    before, after = fields(api_key, version, payload), fields(api_key, version, rewritten)
    assert BROKER_HOST.encode() not in rewritten
    changed = {path for path in before if before[path] != after[path]}
    assert {path[-1] for path in changed} == {"Host", "Port"}
    assert len(changed) == 2 * expected_addresses
    assert before.keys() == after.keys()
    for path in changed:
        node_id = next(after[(*path[:-1], name)] for name in ("NodeId", "BrokerId") if (*path[:-1], name) in after)
        (number,) = struct.unpack(">i", node_id)
        assert after[path] in (struct.pack(">i", FIRST_PORT + number), b"\x00\x02n%d" % number, b"\x03n%d" % number)


def test_the_schemas_are_those_in_kafkas_own_jar() -> None:
    def shape(fields: tuple[FieldSchema, ...], version: int) -> list[object]:
        return [
            (
                entry.name,
                # The name of a struct is not on the wire, and kafka-python corrects some names.
                entry.is_array if entry.fields else entry.type,
                version in entry.nullable_versions,
                entry.tag if version in entry.tagged_versions else None,
                version in (entry.flexible_versions or (0, 32767)),
                shape(entry.fields, version),
            )
            for entry in fields
            if version in entry.versions
        ]

    (jar,) = (path for path in Path(kafka_libs()).glob("kafka-clients-*.jar") if "test" not in path.name)
    with zipfile.ZipFile(jar) as archive:
        for name in message_names():
            kafkas, ours = parse_schema(archive.read(f"common/message/{name}.json").decode()), load_schema(name)
            assert (ours.api_key, ours.flexible_versions) == (kafkas.api_key, kafkas.flexible_versions)
            # The broker under test may be older or newer than the schemas. The common versions must be equal.
            known = range(ours.valid_versions.min_version, ours.valid_versions.max_version + 1)
            for version in (version for version in known if version in kafkas.valid_versions):
                assert shape(ours.fields, version) == shape(kafkas.fields, version), (name, version)
        for file in archive.namelist():
            if not (file.startswith("common/message/") and file.endswith("Request.json")):
                continue
            text = archive.read(file).decode()
            if '"validVersions": "none"' in text:
                continue
            schema = parse_schema(text)
            first, last = schema.flexible_versions
            assert schema.api_key is not None
            assert FLEXIBLE_FROM[schema.api_key] == (first if last > first else NEVER_FLEXIBLE), file


@pytest.mark.parametrize("version", range(5))
def test_api_versions(peer: SchemaPeer, version: int) -> None:
    offered = versions_in(peer.ask_bytes(ApiKey.API_VERSIONS, 0, b""))
    request: Value = {"ClientSoftwareName": "test", "ClientSoftwareVersion": "1"}
    answer = peer.ask_message(ApiKey.API_VERSIONS, version, request)
    cut = intersect_api_versions(answer, version)

    entries: dict[int, tuple[int, int]] = {}
    after = fields(ApiKey.API_VERSIONS, version, cut)
    for path, value in after.items():
        if path[-1] == "ApiKey":
            lowest, highest = (after[(*path[:-1], name)] for name in ("MinVersion", "MaxVersion"))
            entries[int.from_bytes(value)] = int.from_bytes(lowest), int.from_bytes(highest)
    assert entries.keys() == offered.keys() - set(HIDDEN_APIS)
    assert entries[ApiKey.PRODUCE] == (0, 13)
    assert entries[ApiKey.API_VERSIONS] == (0, 4)
    for api_key, (first, last) in entries.items():
        assert offered[api_key][0] <= first <= last <= offered[api_key][1]
        assert api_key not in DECODED_APIS or (first in DECODED_APIS[api_key] and last in DECODED_APIS[api_key])
    before = fields(ApiKey.API_VERSIONS, version, answer)
    assert {path: value for path, value in after.items() if path[0] != "ApiKeys"} == {
        path: value for path, value in before.items() if path[0] != "ApiKeys"
    }


def test_an_api_versions_version_that_the_broker_does_not_know(peer: SchemaPeer) -> None:
    answer = peer.ask_bytes(ApiKey.API_VERSIONS, 127, b"what only that version can read")
    assert intersect_api_versions(answer, 127) == unsupported_version_response(CORRELATION_ID)


@pytest.mark.parametrize("version", range(14))
def test_metadata(kafka_of_three: KafkaCluster, peer: SchemaPeer, topic_name: str, version: int) -> None:
    create_topic(kafka_of_three.bootstrap_servers, topic_name)
    topic: Value = {"TopicId": UUID(int=0), "Name": topic_name}
    request: Value = {
        "Topics": [topic],
        "AllowAutoTopicCreation": False,
        "IncludeClusterAuthorizedOperations": True,
        "IncludeTopicAuthorizedOperations": True,
    }
    assert_rewritten(ApiKey.METADATA, version, peer.ask_for_brokers(ApiKey.METADATA, version, request), BROKERS)


@pytest.mark.parametrize("version", range(7))
def test_find_coordinator(peer: SchemaPeer, topic_name: str, version: int) -> None:
    request: Value = {"Key": topic_name, "KeyType": 0, "CoordinatorKeys": [topic_name, topic_name + "2"]}
    while True:
        answer = peer.ask_message(ApiKey.FIND_COORDINATOR, version, request)
        found = fields(ApiKey.FIND_COORDINATOR, version, answer)
        errors = {value for path, value in found.items() if path[-1] == "ErrorCode"}
        if errors == {b"\0\0"}:
            break
        # Until the offsets topic exists, entries have no node and stay unchanged.
        assert errors <= {b"\0\0", b"\x00\x0f"}
        if b"\0\0" in errors:  # one of the two keys may have an answer before the other
            continue
        assert rewrite_addresses(ApiKey.FIND_COORDINATOR, version, answer, lambda node_id: ("n", 1)) is answer
    assert_rewritten(ApiKey.FIND_COORDINATOR, version, answer, 2 if version >= 4 else 1)


@pytest.mark.parametrize("version", range(3))
def test_describe_cluster(peer: SchemaPeer, version: int) -> None:
    request: Value = {
        "IncludeClusterAuthorizedOperations": True,
        "EndpointType": 1,
        "IncludeFencedBrokers": True,
    }
    answer = peer.ask_for_brokers(ApiKey.DESCRIBE_CLUSTER, version, request)
    assert_rewritten(ApiKey.DESCRIBE_CLUSTER, version, answer, BROKERS)


def test_a_broker_names_no_controllers(peer: SchemaPeer) -> None:
    request: Value = {"IncludeClusterAuthorizedOperations": False, "EndpointType": 2, "IncludeFencedBrokers": False}
    answer = fields(ApiKey.DESCRIBE_CLUSTER, 2, peer.ask_message(ApiKey.DESCRIBE_CLUSTER, 2, request))
    assert int.from_bytes(answer["ErrorCode",]) == MISMATCHED_ENDPOINT_TYPE
    assert not any("Host" in path for path in answer)


def leader_and_topic_id(peer: SchemaPeer, topic: str) -> tuple[int, UUID]:
    """Waits until the broker knows a new topic. Returns its leader and its id."""
    request: Value = {
        "Topics": [{"TopicId": UUID(int=0), "Name": topic}],
        "AllowAutoTopicCreation": False,
        "IncludeTopicAuthorizedOperations": False,
    }
    while True:
        answer = fields(ApiKey.METADATA, 12, peer.ask_message(ApiKey.METADATA, 12, request))
        if (leader := answer.get(("Topics", 0, "Partitions", 0, "LeaderId"), NO_NODE)) != NO_NODE:
            return int.from_bytes(leader), UUID(bytes=answer["Topics", 0, "TopicId"])


@pytest.fixture
def follower(kafka_of_three: KafkaCluster, peer: SchemaPeer, topic_name: str) -> Iterator[tuple[SchemaPeer, UUID]]:
    """Yields a connection to a broker that does not lead the topic's only partition, and the topic's id."""
    create_topic(kafka_of_three.bootstrap_servers, topic_name)
    leader, topic_id = leader_and_topic_id(peer, topic_name)
    with SchemaPeer(kafka_of_three.address(leader % 3 + 1)) as other:
        leader_and_topic_id(other, topic_name)
        yield other, topic_id


EMPTY_BATCH = bytes.fromhex(
    "0000000000000000 00000031 00000000 02 00000000 0000 00000000"
    "ffffffffffffffff ffffffffffffffff ffffffffffffffff ffff ffffffff 00000000"
)


@pytest.mark.parametrize("version", range(10, 14))
def test_produce_to_a_broker_that_does_not_lead_names_the_one_that_does(
    follower: tuple[SchemaPeer, UUID], topic_name: str, version: int
) -> None:
    peer, topic_id = follower
    request: Value = {
        "TransactionalId": None,
        "Acks": -1,
        "TimeoutMs": 1000,
        "TopicData": [
            {
                "Name": topic_name,
                "TopicId": topic_id,
                "PartitionData": [{"Index": 0, "Records": EMPTY_BATCH}],
            }
        ],
    }
    answer = peer.ask_message(ApiKey.PRODUCE, version, request)
    assert NOT_LEADER_OR_FOLLOWER in fields(ApiKey.PRODUCE, version, answer).values()
    assert_rewritten(ApiKey.PRODUCE, version, answer, 1)


@pytest.mark.parametrize("version", range(16, 19))
def test_fetch_from_a_broker_that_does_not_lead_names_the_one_that_does(
    follower: tuple[SchemaPeer, UUID], version: int
) -> None:
    peer, topic_id = follower
    partition: Value = {
        "Partition": 0,
        "CurrentLeaderEpoch": -1,
        "FetchOffset": 0,
        "LastFetchedEpoch": -1,
        "LogStartOffset": -1,
        "PartitionMaxBytes": 1000,
    }
    request: Value = {
        "MaxWaitMs": 0,
        "MinBytes": 0,
        "MaxBytes": 1000,
        "IsolationLevel": 0,
        "SessionId": 0,
        "SessionEpoch": -1,
        "Topics": [{"TopicId": topic_id, "Partitions": [partition]}],
        "ForgottenTopicsData": [],
        "RackId": "",
    }
    answer = peer.ask_message(ApiKey.FETCH, version, request)
    assert_rewritten(ApiKey.FETCH, version, answer, 1)


@pytest.mark.parametrize("version", [1, 2])
def test_share_fetch_and_acknowledge_at_a_broker_that_does_not_lead(
    follower: tuple[SchemaPeer, UUID], topic_name: str, version: int
) -> None:
    peer, topic_id = follower
    member_id = str(uuid4())

    def session(epoch: int) -> bytes:
        return write_string(topic_name, True) + write_string(member_id, True) + struct.pack(">i", epoch)

    limits = struct.pack(">iiiii", 0, 0, 1000, 10, 10)
    modes = b"\x00\x00" if version >= 2 else b""
    partition = b"\x02" + topic_id.bytes + b"\x02" + struct.pack(">i", 0)
    nothing_acknowledged = b"\x01\x00\x00"
    nothing_forgotten = b"\x01\x00"
    body = session(0) + limits + modes + partition + nothing_acknowledged + nothing_forgotten
    answer = peer.ask_bytes(ApiKey.SHARE_FETCH, version, body)
    assert NOT_LEADER_OR_FOLLOWER in fields(ApiKey.SHARE_FETCH, version, answer).values()
    assert_rewritten(ApiKey.SHARE_FETCH, version, answer, 1)

    renew = b"\x00" if version >= 2 else b""
    first_record_accepted = b"\x02" + struct.pack(">qq", 0, 0) + b"\x02\x01\x00\x00\x00\x00"
    answer = peer.ask_bytes(ApiKey.SHARE_ACKNOWLEDGE, version, session(1) + renew + partition + first_record_accepted)
    # A member that never acquired a record there gets an unknown partition, and no address.
    assert UNKNOWN_TOPIC_OR_PARTITION in fields(ApiKey.SHARE_ACKNOWLEDGE, version, answer).values()
    assert rewrite_addresses(ApiKey.SHARE_ACKNOWLEDGE, version, answer, lambda node_id: ("n", 1)) is answer
