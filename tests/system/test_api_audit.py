"""Every API that a broker offers to clients is known: the proxy decodes it, passes it opaquely, or hides it.

The tests compare with a real broker and with the messages in its jars. They fail first if a newer Kafka has another
API, a newer version of a decoded API, or another field for an address.
"""

from __future__ import annotations

import re
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from protocol.addresses import ADDRESS_FIELDS
from protocol.api_keys import DECODED_APIS, HIDDEN_APIS, ApiKey, VersionRange, supported_versions
from protocol.message_schema import FieldSchema, MessageSchema, parse_schema
from tests.support.servers.kafka import KafkaCluster, kafka_libs
from tiers.broker.client import monotonic_ms
from tiers.broker.connection import BrokerConnection

pytestmark = pytest.mark.integration

TIMEOUT_MS = 300_000

OF_BROKERS_ALONE = {
    ApiKey.INITIALIZE_SHARE_GROUP_STATE,
    ApiKey.READ_SHARE_GROUP_STATE,
    ApiKey.WRITE_SHARE_GROUP_STATE,
    ApiKey.DELETE_SHARE_GROUP_STATE,
    ApiKey.READ_SHARE_GROUP_STATE_SUMMARY,
}
"""APIs that a broker offers to clients and the proxy hides. A leader and a share coordinator use them.

They need CLUSTER_ACTION."""

VERSIONS_OF_BROKERS_ALONE = {ApiKey.ADD_PARTITIONS_TO_TXN: VersionRange(4, 5)}
"""The versions of a decoded API that brokers use among themselves. They need CLUSTER_ACTION."""

REMOVED_IN_4_0 = {4, 5, 6, 7}
"""LeaderAndIsr, StopReplica, UpdateMetadata and ControlledShutdown, which controllers used before KRaft."""

NO_BROKERS_ADDRESS = {
    ("ConsumerGroupDescribeResponse", "Groups.Members.ClientHost"): "where a client connects from",
    ("DescribeGroupsResponse", "Groups.Members.ClientHost"): "where a client connects from",
    ("ShareGroupDescribeResponse", "Groups.Members.ClientHost"): "where a client connects from",
    ("StreamsGroupDescribeResponse", "Groups.Members.ClientHost"): "where a client connects from",
    ("DeleteAclsResponse", "FilterResults.MatchingAcls.Host"): "a pattern for clients",
    ("DescribeAclsResponse", "Resources.Acls.Host"): "a pattern for clients",
    ("DescribeQuorumResponse", "Nodes.Listeners.Host"): "a controller's, which clients do not reach through a proxy",
    ("DescribeQuorumResponse", "Nodes.Listeners.Port"): "a controller's, which clients do not reach through a proxy",
    ("StreamsGroupDescribeResponse", "Groups.Members.UserEndpoint.Host"): "application.server of a Streams application",
    ("StreamsGroupDescribeResponse", "Groups.Members.UserEndpoint.Port"): "application.server of a Streams application",
    ("StreamsGroupHeartbeatResponse", "PartitionsByUserEndpoint.UserEndpoint.Host"): "application.server of another",
    ("StreamsGroupHeartbeatResponse", "PartitionsByUserEndpoint.UserEndpoint.Port"): "application.server of another",
}
"""The address fields that the proxy does not rewrite, and the reason."""

_ADDRESS = re.compile("host|port$|address|endpoint|listener|url|uri", re.IGNORECASE)


async def test_every_api_of_the_broker_is_known(kafka: KafkaCluster) -> None:
    connection = await BrokerConnection.connect(
        *kafka.address(), client_id="test", clock_ms=monotonic_ms, timeout_ms=TIMEOUT_MS
    )
    offered = connection.api_versions
    await connection.close()

    assert {key for key in offered if key not in set(ApiKey)} <= REMOVED_IN_4_0
    assert {key for key in offered if key in HIDDEN_APIS} <= OF_BROKERS_ALONE
    assert {
        ApiKey(key).name: (highest, DECODED_APIS[key].max_version)
        for key, (_, highest) in offered.items()
        if key in DECODED_APIS
        and highest > DECODED_APIS[key].max_version
        and highest not in VERSIONS_OF_BROKERS_ALONE.get(ApiKey(key), ())
    } == {}, "versions that clients could use and do not see"
    shown = {key for key in offered if (versions := supported_versions(key)) and offered[key][0] <= versions[1]}
    assert shown == offered.keys() - REMOVED_IN_4_0 - OF_BROKERS_ALONE


def test_every_address_in_the_brokers_messages_is_rewritten_or_no_brokers() -> None:
    seen: set[tuple[str, str]] = set()
    for schema in responses():
        if schema.api_key in HIDDEN_APIS or schema.api_key in REMOVED_IN_4_0:
            continue
        assert schema.api_key is not None
        rewritten = ADDRESS_FIELDS.get(schema.api_key, ())
        for path, versions in address_fields(schema.fields):
            if (schema.name, ".".join(path)) in NO_BROKERS_ADDRESS:
                seen.add((schema.name, ".".join(path)))
                continue
            assert path[-1] in ("Host", "Port"), (schema.name, path)
            for version in (v for v in shown_versions(schema) if v in versions):
                assert any(path[:-1] == fields.path and version in fields.versions for fields in rewritten), (
                    f"{schema.name} v{version} tells {path}"
                )
    assert ("DescribeAclsResponse", "Resources.Acls.Host") in seen


def shown_versions(schema: MessageSchema) -> range:
    """Returns the versions that the broker supports and that clients see."""
    assert schema.api_key is not None
    ours, brokers = supported_versions(schema.api_key), schema.valid_versions
    assert ours is not None
    return range(max(ours.min_version, brokers.min_version), min(ours.max_version, brokers.max_version) + 1)


def responses() -> Iterator[MessageSchema]:
    (jar,) = (path for path in Path(kafka_libs()).glob("kafka-clients-*.jar") if "test" not in path.name)
    with zipfile.ZipFile(jar) as archive:
        for file in archive.namelist():
            if file.startswith("common/message/") and file.endswith("Response.json"):
                text = archive.read(file).decode()
                if '"validVersions": "none"' not in text:
                    yield parse_schema(text)


def address_fields(
    fields: tuple[FieldSchema, ...], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], VersionRange]]:
    """Yields the paths and versions of the fields whose names suggest an address."""
    for field in fields:
        here = (*path, field.name)
        if field.fields:
            yield from address_fields(field.fields, here)
        elif _ADDRESS.search(field.name) and field.name not in ("EndpointType", "EndpointInformationEpoch"):
            yield here, field.versions
