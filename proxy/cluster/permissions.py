"""Finds the rights that the proxy needs at the brokers and does not have, before it needs them.

A broker reports the rights of the client that asks (KIP-430). If the proxy may not even describe a topic, the topic
looks as if it did not exist, so this module cannot report missing rights on it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final
from uuid import UUID

from kafka.protocol.admin import CreateTopicsRequest
from kafka.protocol.metadata import FindCoordinatorRequest, MetadataRequest

from protocol.errors import ErrorCode
from proxy.config import TidegateConfig
from tiers.access.open_tier import RemoteTierError
from tiers.broker.client import BrokerClient
from tiers.config.settings import RemoteLogConfig
from tiers.errors import BrokerError
from tiers.metadata.topic.settings import metadata_group_id
from tiers.tasks.deletion.failed_deletions_topic import FAILED_DELETIONS_TOPIC

logger = logging.getLogger(__name__)

# Kafka's numbers of operations: the bits of `authorized operations`.
_READ, _WRITE, _DELETE, _DESCRIBE_CONFIGS = 3, 4, 6, 10
_NAMES: Final = {_READ: "READ", _WRITE: "WRITE", _DELETE: "DELETE", _DESCRIBE_CONFIGS: "DESCRIBE_CONFIGS"}
_OF_OWN_TOPICS: Final = (_READ, _WRITE, _DESCRIBE_CONFIGS)
_OF_TIERED_TOPICS: Final = (_READ, _DELETE, _DESCRIBE_CONFIGS)
_MIN_METADATA_VERSION = 8
_GROUP, _TRANSACTION = 0, 1
_HEARD_WITHIN_MS = 5_000
"""How long a broker may not know a topic that was just created."""
_ASK_AGAIN_MS = 100


def principal_of(config: TidegateConfig) -> str:
    """Names the principal that the proxy has at the brokers, in the words of the settings."""
    if config.upstream.sasl is not None:
        return f"the user {config.upstream.sasl.username or 'of the token'} of [upstream.sasl]"
    if config.upstream.tls is not None and config.upstream.tls.certificate is not None:
        return "the certificate of [upstream.tls]"
    return "the proxy, without [upstream.sasl],"


async def check_permissions(client: BrokerClient, config: TidegateConfig, timeout_ms: int) -> None:
    """Checks the rights at the start of the process that maintains the metadata's state.

    Raises `RemoteTierError` if an essential right is missing. Logs other missing rights, and a failure to read them."""
    try:
        essential, others = await missing_permissions(client, config, timeout_ms)
    except BrokerError as error:
        logger.warning("the proxy's own rights cannot be read: %s", error)
        return
    if essential:
        raise RemoteTierError(f"{principal_of(config)} lacks {'; '.join(essential)}")
    for right in others:
        logger.error("%s lacks %s", principal_of(config), right)


async def missing_permissions(
    client: BrokerClient, config: TidegateConfig, timeout_ms: int
) -> tuple[list[str], list[str]]:
    """Returns the missing rights, one line each: the essential ones, then the others.

    Without the essential rights the remote tier cannot run. Without the others, some topics cannot be tiered, or failed
    deletions cannot be published. Raises `BrokerError`."""
    message = MetadataRequest(topics=None, allow_auto_topic_creation=False, include_topic_authorized_operations=True)
    response: Any = await client.request(None, message, timeout_ms, min_version=_MIN_METADATA_VERSION)
    rights = {topic.name: topic.authorized_operations for topic in response.topics}
    essential = await _may_keep_metadata(client, config.remote_log, rights, timeout_ms)
    rules = config.topics
    others = await _may_keep(client, FAILED_DELETIONS_TOPIC, rights, timeout_ms)
    others += [
        line
        for topic, granted in sorted(rights.items())
        if not topic.startswith("__") and any(rule.matches(topic) for rule in rules)
        for line in _lacking(topic, granted, _OF_TIERED_TOPICS)
    ]
    return essential, others


async def _may_keep_metadata(
    client: BrokerClient, remote_log: RemoteLogConfig, rights: Mapping[str, Collection[int] | None], timeout_ms: int
) -> list[str]:
    if not remote_log.is_topic_based:
        return []
    name = remote_log.metadata_topic
    key = metadata_group_id(name)
    return [
        *await _may_keep(client, name, rights, timeout_ms),
        *await _may_coordinate(client, key, _GROUP, f"READ on group {key}", timeout_ms),
        *await _may_coordinate(
            client, key, _TRANSACTION, f"WRITE on transactional ids that begin with {key}", timeout_ms
        ),
    ]


def _lacking(topic: str, granted: Collection[int] | None, needed: tuple[int, ...]) -> Iterator[str]:
    """`granted` is None if the broker does not report rights."""
    if granted is not None:
        yield from (f"{_NAMES[each]} on topic {topic}" for each in needed if each not in granted)


async def _may_keep(
    client: BrokerClient, topic: str, rights: Mapping[str, Collection[int] | None], timeout_ms: int
) -> list[str]:
    if topic in rights:
        return list(_lacking(topic, rights[topic], _OF_OWN_TOPICS))
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
    asked = MetadataRequest.MetadataRequestTopic(topic_id=UUID(int=0), name=topic)
    clock_s = asyncio.get_running_loop().time
    deadline_s = clock_s() + _HEARD_WITHIN_MS / 1000
    while True:
        message = MetadataRequest(
            topics=[asked], allow_auto_topic_creation=False, include_topic_authorized_operations=True
        )
        response: Any = await client.request(None, message, timeout_ms, min_version=_MIN_METADATA_VERSION)
        (answer,) = response.topics
        if answer.error_code == ErrorCode.NONE:
            return list(_lacking(topic, answer.authorized_operations, _OF_OWN_TOPICS))
        if answer.error_code == ErrorCode.TOPIC_AUTHORIZATION_FAILED or clock_s() >= deadline_s:
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
