"""The proxy uses its own rights for a client only after the broker has authorized that client."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
from confluent_kafka.admin._acl import AclOperation
from kafka.errors import TopicAuthorizationFailedError
from kafka.protocol.admin import (
    AlterConfigsRequest,
    CreateTopicsRequest,
    DeleteRecordsRequest,
    DeleteTopicsRequest,
    DescribeConfigsRequest,
    IncrementalAlterConfigsRequest,
)
from kafka.protocol.consumer import FetchRequest, ListOffsetsRequest, OffsetForLeaderEpochRequest

from protocol.apis.list_offsets import NEXT_LOCAL_TIMESTAMP
from protocol.errors import ErrorCode
from proxy.config import load_config
from tests.support.rigs.security_rig import (
    READ,
    RECORDS,
    TIMEOUT_S,
    HalfTrimmed,
    as_user,
    chunk_reads,
    for_kafka_python,
    half_trimmed,
    proxy_before,
    read_by_kafka_python,
    section,
)
from tests.support.rigs.strict_consumer import local_log_start
from tests.support.servers.certificates import Authority
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.secure_kafka import PROXY, allow, allow_all, deny
from tests.support.servers.tidegate import TidegateProcess
from tiers.access.open_tier import open_tier
from tiers.broker.client import BrokerClient

pytestmark = pytest.mark.integration

TOPIC_RESOURCE = 2
DYNAMIC, FROM_FILE = 1, 4
"""The sources of a value in DescribeConfigs."""
REFUSED = ErrorCode.TOPIC_AUTHORIZATION_FAILED
AGAIN = {ErrorCode.REPLICA_NOT_AVAILABLE, ErrorCode.REQUEST_TIMED_OUT, ErrorCode.UNKNOWN_TOPIC_OR_PARTITION}
TIER_KEYS = (
    "local.retention.bytes",
    "local.retention.ms",
    "remote.log.copy.disable",
    "remote.log.delete.on.disable",
    "remote.storage.enable",
)
TIMESTAMPS = (-2, -3, -4, -5, 0)
"""The timestamps of ListOffsets that the remote tier affects, and a look-up by time."""
LAST_FETCH_BY_NAME = 12
Config = Mapping[str, str | None]


@pytest.fixture(scope="module")
def inside(secured: KafkaCluster, plain: TidegateProcess) -> HalfTrimmed:
    return half_trimmed(secured, "tiered-inside")


@pytest.fixture(scope="module")
def outside(secured: KafkaCluster, plain: TidegateProcess) -> HalfTrimmed:
    return half_trimmed(secured, "tiered-outside")


def of_partitions(answer: Any) -> list[int]:
    return [each.error_code for topic in answer.topics for each in topic.partitions]


async def asked(
    client: BrokerClient, request: Any, codes: Callable[[Any], Iterable[int]], max_version: int | None = None
) -> Any:
    """Sends a request. Retries as every client does, also while the broker does not know a new topic yet."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            answer = await client.request(None, request, max_version=max_version)
            if AGAIN.isdisjoint(codes(answer)):
                return answer
            await asyncio.sleep(0.05)


async def listed(client: BrokerClient, topic: str, timestamp: int, max_version: int | None = None) -> tuple[int, int]:
    of = ListOffsetsRequest.ListOffsetsTopic
    partition = of.ListOffsetsPartition(partition_index=0, current_leader_epoch=-1, timestamp=timestamp)
    request = ListOffsetsRequest(replica_id=-1, isolation_level=0, topics=[of(name=topic, partitions=[partition])])
    answer = (await asked(client, request, of_partitions, max_version)).topics[0].partitions[0]
    return answer.error_code, answer.offset


async def epoch_end(client: BrokerClient, topic: str) -> tuple[int, int]:
    of = OffsetForLeaderEpochRequest.OffsetForLeaderTopic
    partition = of.OffsetForLeaderPartition(partition=0, current_leader_epoch=-1, leader_epoch=0)
    request = OffsetForLeaderEpochRequest(replica_id=-1, topics=[of(topic=topic, partitions=[partition])])
    answer = (await asked(client, request, of_partitions)).topics[0].partitions[0]
    return answer.error_code, answer.end_offset


async def fetched(client: BrokerClient, topic: str, offset: int) -> tuple[int, int]:
    """Returns the error code, and the size of the records."""
    of = FetchRequest.FetchTopic
    partition = of.FetchPartition(
        partition=0,
        current_leader_epoch=-1,
        fetch_offset=offset,
        last_fetched_epoch=-1,
        log_start_offset=-1,
        partition_max_bytes=1000,
    )
    request = FetchRequest(
        replica_id=-1,
        max_wait_ms=5_000,
        min_bytes=1,
        max_bytes=1000,
        isolation_level=0,
        session_id=0,
        session_epoch=-1,
        topics=[of(topic=topic, partitions=[partition])],
        forgotten_topics_data=[],
        rack_id="",
    )

    def codes(answer: Any) -> list[int]:
        return [each.error_code for topic in answer.responses for each in topic.partitions]

    answer = (await asked(client, request, codes, LAST_FETCH_BY_NAME)).responses[0].partitions[0]
    return answer.error_code, len(answer.records or b"")


async def deleted(client: BrokerClient, offset: int, *topics: str) -> list[int]:
    of = DeleteRecordsRequest.DeleteRecordsTopic
    named = [
        of(name=topic, partitions=[of.DeleteRecordsPartition(partition_index=0, offset=offset)]) for topic in topics
    ]
    answer = await asked(client, DeleteRecordsRequest(topics=named, timeout_ms=20_000), of_partitions)
    codes = {each.name: each.partitions[0].error_code for each in answer.topics}
    return [codes[topic] for topic in topics]


async def altered(client: BrokerClient, config: Config, *topics: str) -> list[int]:
    of = IncrementalAlterConfigsRequest.AlterConfigsResource
    entries = [of.AlterableConfig(name=name, config_operation=0, value=value) for name, value in config.items()]
    resources = [of(resource_type=TOPIC_RESOURCE, resource_name=topic, configs=entries) for topic in topics]
    request = IncrementalAlterConfigsRequest(resources=resources, validate_only=False)
    answer = await asked(client, request, lambda answer: [each.error_code for each in answer.responses])
    codes = {each.resource_name: each.error_code for each in answer.responses}
    return [codes[topic] for topic in topics]


async def replaced(client: BrokerClient, config: Config, topic: str) -> int:
    of = AlterConfigsRequest.AlterConfigsResource
    entries = [of.AlterableConfig(name=name, value=value) for name, value in config.items()]
    resource = of(resource_type=TOPIC_RESOURCE, resource_name=topic, configs=entries)
    request = AlterConfigsRequest(resources=[resource], validate_only=False)
    answer = await asked(client, request, lambda answer: [each.error_code for each in answer.responses])
    return int(answer.responses[0].error_code)


async def described(client: BrokerClient, topic: str) -> tuple[int, dict[str, tuple[str | None, int]]]:
    """Returns the error code, and the value and source of every entry."""
    of = DescribeConfigsRequest.DescribeConfigsResource
    resource = of(resource_type=TOPIC_RESOURCE, resource_name=topic, configuration_keys=None)
    request = DescribeConfigsRequest(resources=[resource], include_synonyms=True, include_documentation=False)
    answer = (await asked(client, request, lambda answer: [each.error_code for each in answer.results])).results[0]
    return answer.error_code, {each.name: (each.value, each.config_source) for each in answer.configs}


async def created(client: BrokerClient, topic: str, config: Config) -> Any:
    of = CreateTopicsRequest.CreatableTopic
    entries = [of.CreatableTopicConfig(name=name, value=value) for name, value in config.items()]
    new = of(name=topic, num_partitions=1, replication_factor=1, assignments=[], configs=entries)
    request = CreateTopicsRequest(topics=[new], timeout_ms=20_000, validate_only=False)
    return (await client.request(None, request)).topics[0]


def test_the_proxys_copies_are_served_only_to_authorized_clients(
    secured: KafkaCluster, plain: TidegateProcess, topic_name: str
) -> None:
    topic = f"tiered-{topic_name}"
    _, values, start = half_trimmed(secured, topic)
    allow(secured, "alice", topic, READ)
    allow(secured, "bob", topic, (AclOperation.DESCRIBE,))

    bob = for_kafka_python("bob", "SCRAM-SHA-256")
    before = chunk_reads(plain)
    for offset in (0, start - 1, start, RECORDS - 1):
        with pytest.raises(TopicAuthorizationFailedError):
            read_by_kafka_python(plain.bootstrap_servers, topic, 1, bob, offset)
    assert chunk_reads(plain) == before

    alice = for_kafka_python("alice", "SCRAM-SHA-256")
    assert read_by_kafka_python(plain.bootstrap_servers, topic, RECORDS, alice) == list(enumerate(values))
    assert chunk_reads(plain) > before
    assert local_log_start(secured, topic) >= start


@pytest.mark.full
async def test_a_client_without_rights_learns_and_changes_nothing(plain: TidegateProcess, inside: HalfTrimmed) -> None:
    topic = inside.topic
    async with as_user(plain, "bob") as bob, as_user(plain, PROXY) as owner:
        before = await listed(owner, topic, -2), await described(owner, topic)
        reads = await asyncio.to_thread(chunk_reads, plain)
        for timestamp in TIMESTAMPS:
            assert await listed(bob, topic, timestamp) == (REFUSED, -1)
        assert await listed(bob, topic, NEXT_LOCAL_TIMESTAMP, max_version=6) == (REFUSED, -1)
        assert await epoch_end(bob, topic) == (REFUSED, -1)
        for offset in (200, inside.local_log_start - 1, inside.local_log_start, RECORDS):
            assert await fetched(bob, topic, offset) == (REFUSED, 0)
        assert await deleted(bob, 150, topic) == [REFUSED]
        assert await altered(bob, {"remote.log.copy.disable": "true"}, topic) == [REFUSED]
        assert await replaced(bob, {"remote.log.copy.disable": "true"}, topic) == REFUSED
        # Only a client that may set the value may learn that the value is wrong.
        assert await altered(bob, {"local.retention.ms": "-7"}, topic) == [REFUSED]
        assert await replaced(bob, {"local.retention.ms": "-7"}, topic) == REFUSED
        assert await described(bob, topic) == (REFUSED, {})
        assert chunk_reads(plain) == reads
        assert (await listed(owner, topic, -2), await described(owner, topic)) == before


@pytest.mark.full
async def test_a_client_with_describe_gets_offsets_and_no_records(
    secured: KafkaCluster, plain: TidegateProcess, inside: HalfTrimmed
) -> None:
    topic = inside.topic
    allow(secured, "alice", topic, [AclOperation.DESCRIBE])
    async with as_user(plain, "alice") as alice, as_user(plain, PROXY) as owner:
        assert await listed(alice, topic, -2) == await listed(owner, topic, -2)
        assert await listed(alice, topic, 0) == await listed(owner, topic, 0)
        error_code, next_local = await listed(alice, topic, NEXT_LOCAL_TIMESTAMP, max_version=6)
        assert error_code == 0
        assert inside.local_log_start < next_local <= RECORDS
        assert await epoch_end(alice, topic) == (0, RECORDS)
        assert await deleted(alice, 150, topic) == [REFUSED]
        assert await altered(alice, {"local.retention.bytes": "88"}, topic) == [REFUSED]
        assert await described(alice, topic) == (REFUSED, {})
        reads = await asyncio.to_thread(chunk_reads, plain)
        for offset in (200, inside.local_log_start - 1, inside.local_log_start, RECORDS):
            assert await fetched(alice, topic, offset) == (REFUSED, 0)
        assert chunk_reads(plain) == reads


@pytest.mark.full
async def test_in_one_request_every_topic_is_allowed_by_itself(
    secured: KafkaCluster, plain: TidegateProcess, inside: HalfTrimmed, outside: HalfTrimmed
) -> None:
    mine, theirs = inside.topic, outside.topic
    allow(secured, "carol", mine, [AclOperation.DELETE, AclOperation.ALTER_CONFIGS, AclOperation.DESCRIBE])
    async with as_user(plain, "carol") as carol, as_user(plain, PROXY) as owner:
        assert await deleted(carol, 100, theirs, mine) == [REFUSED, 0]
        assert await listed(owner, mine, -2) == (0, 100)
        assert await listed(owner, theirs, -2) == (0, 0)
        assert await altered(carol, {"local.retention.bytes": "77"}, mine, theirs) == [0, REFUSED]
        assert (await described(owner, mine))[1]["local.retention.bytes"] == ("77", DYNAMIC)
        assert (await described(owner, theirs))[1]["local.retention.bytes"] == ("1", FROM_FILE)
        # The right to alter implies the right to describe, as on a broker. The other topic stays hidden.
        assert await described(carol, theirs) == (REFUSED, {})
        code, shown = await described(carol, mine)
        assert (code, shown["local.retention.bytes"]) == (0, ("77", DYNAMIC))
        assert set(TIER_KEYS) <= set(shown)


@pytest.mark.full
async def test_the_right_to_delete_a_topic_decides_what_is_recorded(
    secured: KafkaCluster, plain: TidegateProcess, topic_name: str
) -> None:
    topic = f"tiered-{topic_name}"
    await asyncio.to_thread(half_trimmed, secured, topic)
    allow(secured, "alice", topic, READ)
    allow(secured, "carol", topic, [AclOperation.DELETE])
    request = DeleteTopicsRequest(topic_names=[topic], timeout_ms=20_000)

    async def recorded() -> list[str]:
        async with open_tier(load_config(plain.config)) as tier:
            return [each.topic_id_partition.topic for each in tier.state.topic_deletions().values()]

    for user, code, deletions in (("alice", REFUSED, []), ("carol", 0, [topic])):
        async with as_user(plain, user) as client:
            answer = await asked(client, request, lambda answer: [each.error_code for each in answer.responses], 5)
        assert answer.responses[0].error_code == code
        assert await recorded() == deletions


@pytest.mark.full
async def test_a_prefix_gives_both_tiers_and_no_other_topic(
    secured: KafkaCluster, plain: TidegateProcess, inside: HalfTrimmed, outside: HalfTrimmed
) -> None:
    allow(secured, "bob", "tiered-out", READ, is_prefix=True)
    settings = for_kafka_python("bob", "SCRAM-SHA-512")
    expected = list(enumerate(outside.values))
    found = await asyncio.to_thread(read_by_kafka_python, plain.bootstrap_servers, outside.topic, RECORDS, settings)
    assert found == expected
    reads = await asyncio.to_thread(chunk_reads, plain)
    async with as_user(plain, "bob") as bob:
        for offset in (200, inside.local_log_start):
            assert await fetched(bob, inside.topic, offset) == (REFUSED, 0)
    assert chunk_reads(plain) == reads


@pytest.mark.full
async def test_tier_settings_of_a_new_topic_are_its_creators(
    secured: KafkaCluster, plain: TidegateProcess, topic_name: str
) -> None:
    mine, theirs = f"tiered-mine-{topic_name}", f"tiered-theirs-{topic_name}"
    allow(secured, "bob", f"tiered-mine-{topic_name}", [AclOperation.CREATE])
    async with as_user(plain, "bob") as bob, as_user(plain, PROXY) as owner:
        assert (await created(bob, theirs, {"local.retention.bytes": "77"})).error_code == REFUSED
        assert (await created(bob, theirs, {"local.retention.bytes": "-7"})).error_code == REFUSED
        assert (await created(owner, theirs, {})).error_code == 0
        assert (await described(owner, theirs))[1]["local.retention.bytes"] == ("1", FROM_FILE)

        answer = await created(bob, mine, {"local.retention.bytes": "77"})
        assert answer.error_code == 0
        # A client that may create but not describe sees no configuration.
        assert (answer.topic_config_error_code, answer.configs) == (REFUSED, [])
        assert (await described(owner, mine))[1]["local.retention.bytes"] == ("77", DYNAMIC)


@pytest.mark.full
def test_without_sasl_the_proxys_certificate_has_its_rights_in_both_tiers(
    secured: KafkaCluster, authority: Authority, tmp_path: Path, topic_name: str
) -> None:
    topic = f"tiered-{topic_name}"
    principal = f"CN=proxy-{topic_name[-8:]}"
    allow_all(secured, principal)
    more = section("upstream.tls", {"ca": authority.ca, "certificate": authority.identity(principal[3:])})
    more += section("listener.tls", {"certificate": authority.identity("served")})
    known = {"security_protocol": "SSL", "ssl_cafile": str(authority.ca)}
    with proxy_before(secured, tmp_path / topic_name[-8:], "SSL", more, [topic]) as proxy:
        trimmed = half_trimmed(secured, topic)
        expected = list(enumerate(trimmed.values))
        assert read_by_kafka_python(proxy.bootstrap_servers, topic, RECORDS, known) == expected
        reads = chunk_reads(proxy)  # a proxy that cannot read from the broker cannot copy either
        deny(secured, principal, topic, [AclOperation.READ])
        for offset in (0, trimmed.local_log_start):
            with pytest.raises(TopicAuthorizationFailedError):
                read_by_kafka_python(proxy.bootstrap_servers, topic, 1, known, offset)
        assert chunk_reads(proxy) == reads
