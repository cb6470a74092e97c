"""Finds the rights that the proxy needs at the brokers and does not have, before it needs them.

A broker reports the rights of the client that asks (KIP-430). It lists no topic that the proxy may not even describe,
and refuses such a topic only if the request names it. So this module names each topic that a rule names in full. It
cannot report missing rights on a topic that only a pattern matches.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, NamedTuple
from uuid import UUID

from kafka.protocol.admin import CreateTopicsRequest
from kafka.protocol.metadata import FindCoordinatorRequest, MetadataRequest

from protocol.apis.metadata import FIRST_VERSION, LAST_VERSION, MetadataReader
from protocol.errors import ErrorCode, ProtocolError
from proxy.config import TidegateConfig
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import SLICE_BYTES
from tiers.broker.share_groups import may_describe_cluster
from tiers.config.settings import RemoteLogConfig
from tiers.config.topic_policy import is_internal
from tiers.errors import BrokerError
from tiers.metadata.topic.settings import metadata_group_id
from tiers.tasks.deletion.failed_deletions import FAILED_DELETIONS_TOPIC

# Kafka's numbers of operations: the bits of `authorized operations`.
_READ, _WRITE, _DELETE, _DESCRIBE_CONFIGS = 3, 4, 6, 10
_NAMES: Final = {_READ: "READ", _WRITE: "WRITE", _DELETE: "DELETE", _DESCRIBE_CONFIGS: "DESCRIBE_CONFIGS"}
_OF_OWN_TOPICS: Final = (_READ, _WRITE, _DESCRIBE_CONFIGS)
_OF_TIERED_TOPICS: Final = (_READ, _DELETE, _DESCRIBE_CONFIGS)
_GROUP, _TRANSACTION = 0, 1
_WILDCARDS: Final = frozenset("*?[")
"""No name of a topic has one of these."""
_HEARD_WITHIN_MS = 5_000
"""How long a broker may not know a topic that was just created."""
_ASK_AGAIN_MS = 100


class _Topic(NamedTuple):
    """A broker's answer about a topic. `granted` is None if the broker does not report rights."""

    error: int
    granted: int | None


def principal_of(config: TidegateConfig) -> str:
    """Names the principal that the proxy has at the brokers, in the words of the settings."""
    if config.upstream.sasl is not None:
        return f"the user {config.upstream.sasl.username or 'of the token'} of [upstream.sasl]"
    if has_certificate_alone(config):
        return "the certificate of [upstream.tls]"
    return "the proxy, without [upstream.sasl],"


def has_certificate_alone(config: TidegateConfig) -> bool:
    """Whether the brokers know the proxy by its certificate alone. They then take each client for the proxy."""
    tls = config.upstream.tls
    return config.upstream.sasl is None and tls is not None and tls.certificate is not None


async def missing_permissions(
    client: BrokerClient, config: TidegateConfig, timeout_ms: int
) -> tuple[list[str], list[str]]:
    """Returns the missing rights, one line each: the essential ones, then the others.

    Without the essential rights the remote tier cannot run. Without the others, some topics cannot be tiered, or failed
    deletions cannot be published. Raises `BrokerError`."""
    own, rules = {config.remote_log.metadata_topic, FAILED_DELETIONS_TOPIC}, config.topics

    def is_tiered(topic: str) -> bool:
        return not is_internal(topic) and any(rule.matches(topic) for rule in rules)

    said = await _ask(client, None, timeout_ms, lambda topic: topic in own or is_tiered(topic))
    essential = await _may_keep_metadata(client, config.remote_log, said, timeout_ms)
    others = await _may_keep(client, FAILED_DELETIONS_TOPIC, said, timeout_ms)
    tiered = sorted(said.keys() - own)
    others += [line for topic in tiered for line in _lacking(topic, said[topic].granted, _OF_TIERED_TOPICS)]
    named = dict.fromkeys(
        rule.pattern for rule in rules if rule.remote_storage_enable and not _WILDCARDS & set(rule.pattern)
    )
    for topic in named:
        if topic not in said and not is_internal(topic):
            others += await _may_describe(client, topic, timeout_ms)
    if not await may_describe_cluster(client, timeout_ms):
        others.append(
            "DESCRIBE on the cluster, without which nothing is trimmed, since a share group may be hidden, and all"
            " segments are small, since brokers do not answer the sizes of their logs"
        )
    return essential, others


async def _ask(
    client: BrokerClient, topic: str | None, timeout_ms: int, counts: Callable[[str], bool] = lambda _: True
) -> Mapping[str, _Topic]:
    """Returns what a broker says of `topic`, or of those of all topics that `counts`. It reads the answer in slices.

    Raises `BrokerError`."""
    message = MetadataRequest(
        topics=None if topic is None else [MetadataRequest.MetadataRequestTopic(topic_id=UUID(int=0), name=topic)],
        allow_auto_topic_creation=False,
        include_topic_authorized_operations=True,
    )
    body, version = await client.request_raw(
        None, message, timeout_ms, min_version=FIRST_VERSION, max_version=LAST_VERSION
    )
    said: dict[str, _Topic] = {}
    try:
        for entry in MetadataReader(body, version).read(SLICE_BYTES):
            if entry is None:
                await asyncio.sleep(0)
            elif entry.name is not None and counts(entry.name):
                said[entry.name] = _Topic(entry.error, entry.operations)
    except ProtocolError as error:
        raise BrokerError(f"a response to Metadata v{version} cannot be read: {error}") from error
    return said


async def _may_keep_metadata(
    client: BrokerClient, remote_log: RemoteLogConfig, said: Mapping[str, _Topic], timeout_ms: int
) -> list[str]:
    if not remote_log.is_topic_based:
        return []
    name = remote_log.metadata_topic
    key = metadata_group_id(name)
    return [
        *await _may_keep(client, name, said, timeout_ms),
        *await _may_coordinate(client, key, _GROUP, f"READ on group {key}", timeout_ms),
        *await _may_coordinate(
            client, key, _TRANSACTION, f"WRITE on transactional ids that begin with {key}", timeout_ms
        ),
    ]


def _lacking(topic: str, granted: int | None, needed: tuple[int, ...]) -> Iterator[str]:
    if granted is not None:
        yield from (f"{_NAMES[each]} on topic {topic}" for each in needed if not granted & 1 << each)


async def _may_describe(client: BrokerClient, topic: str, timeout_ms: int) -> list[str]:
    found = (await _ask(client, topic, timeout_ms)).get(topic)
    is_refused = found is not None and found.error == ErrorCode.TOPIC_AUTHORIZATION_FAILED
    return [f"{', '.join(_NAMES[each] for each in _OF_TIERED_TOPICS)} on topic {topic}"] if is_refused else []


async def _may_keep(client: BrokerClient, topic: str, said: Mapping[str, _Topic], timeout_ms: int) -> list[str]:
    if topic in said:
        return list(_lacking(topic, said[topic].granted, _OF_OWN_TOPICS))
    return await _may_create(client, topic, timeout_ms)


async def _may_create(client: BrokerClient, topic: str, timeout_ms: int) -> list[str]:
    asked = CreateTopicsRequest.CreatableTopic(
        name=topic, num_partitions=1, replication_factor=1, assignments=[], configs=[]
    )
    message = CreateTopicsRequest(topics=[asked], timeout_ms=timeout_ms, validate_only=True)
    response: Any = await client.request(None, message, timeout_ms, min_version=1)
    match response.topics[0].error_code:
        case ErrorCode.TOPIC_AUTHORIZATION_FAILED | ErrorCode.CLUSTER_AUTHORIZATION_FAILED:
            return [f"CREATE, {', '.join(_NAMES[each] for each in _OF_OWN_TOPICS)} on topic {topic}"]
        case ErrorCode.TOPIC_ALREADY_EXISTS:
            return await _may_use(client, topic, timeout_ms)
    return []


async def _may_use(client: BrokerClient, topic: str, timeout_ms: int) -> list[str]:
    """Checks a topic that exists, but that the broker did not list.

    Either the proxy may not describe the topic, or another proxy created it a moment ago."""
    clock_s = asyncio.get_running_loop().time
    deadline_s = clock_s() + _HEARD_WITHIN_MS / 1000
    while True:
        answer = (await _ask(client, topic, timeout_ms)).get(topic)
        if answer is not None and answer.error == ErrorCode.NONE:
            return list(_lacking(topic, answer.granted, _OF_OWN_TOPICS))
        is_refused = answer is not None and answer.error == ErrorCode.TOPIC_AUTHORIZATION_FAILED
        if is_refused or clock_s() >= deadline_s:
            return [f"DESCRIBE on topic {topic}"]
        await asyncio.sleep(_ASK_AGAIN_MS / 1000)


async def _may_coordinate(client: BrokerClient, key: str, key_type: int, right: str, timeout_ms: int) -> list[str]:
    message = FindCoordinatorRequest(key=key, key_type=key_type)
    try:
        # From version 4 on, the request has a list of keys.
        response: Any = await client.request(None, message, timeout_ms, min_version=1, max_version=3)
    except BrokerError as error:
        if error.retriable:
            return []
        raise
    code = response.error_code
    refused = (ErrorCode.GROUP_AUTHORIZATION_FAILED, ErrorCode.TRANSACTIONAL_ID_AUTHORIZATION_FAILED)
    return [right] if code in refused else []
