"""Creates the remote log metadata topic, and checks it.

The topic must be compacted and nothing else, or records would be lost. It must have LogAppendTime, since expiry trusts
no producer's clock (docs/design.md, safety rule 6). Its number of partitions says where the records of a user partition
are, and must never change. If the topic was grown, deleted, created again or given another policy, no process writes to
it until an operator undoes that. A change of the configured number does not undo it: the order of a user partition's
records exists in one metadata partition only.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from kafka.protocol.admin import CreateTopicsRequest, DescribeConfigsRequest

from protocol.errors import ErrorCode
from tiers.bounded_gather import bounded_gather
from tiers.broker.client import BrokerClient
from tiers.errors import BrokerError, RemoteLogMetadataError
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.record_log import RefusalToCreate
from tiers.metadata.state.layout import StateIdentity
from tiers.model.ids import TopicIdPartition

logger = logging.getLogger(__name__)

DEFAULT_TOPIC_NAME = "__remote_log_metadata"
DEFAULT_PARTITION_COUNT = 50
_REPLICAS = 3
_TOPIC_RESOURCE = 2
_BROKER_RESOURCE = 4
MIN_DELETE_RETENTION_MS = 60_000
"""A follower must be able to read a tombstone before the topic removes it, also if it is late by some seconds."""
_DELETE_RETENTION = "delete.retention.ms"
_REQUIRED = {"cleanup.policy": "compact", "message.timestamp.type": "LogAppendTime"}
_FIRST_PAUSE_MS = 20
_LONGEST_PAUSE_MS = 400
_BOUNDS_TIMEOUT_MS = 5_000
_TIERED_STORAGE_OF_KAFKA = "remote.log.storage.system.enable"
STEPS = "see 'The metadata topic is lost' in docs/recovery.md"
REBUILD_AFTER_GROWTH = (
    "the number of partitions must not change after the first record, since later records of a user partition would be"
    f" in another metadata partition than the earlier ones. Rebuild the metadata into a new topic: {STEPS}"
)


class MetadataTopicUnfitError(RemoteLogMetadataError):
    """The topic must not be used for metadata as it is. Only an operator can change that."""


class MetadataTopicLostError(RemoteLogMetadataError):
    """The topic that a saved state was read from is gone. No other topic may replace it, old or new."""

    def __init__(self, loss: str) -> None:
        super().__init__(f"{loss}: {STEPS}")


@dataclass(frozen=True, slots=True)
class MetadataTopicSettings:
    name: str = DEFAULT_TOPIC_NAME
    partition_count: int = DEFAULT_PARTITION_COUNT
    replication_factor: int | None = None
    """None: three, or one per broker if there are fewer brokers."""


@dataclass(frozen=True, slots=True)
class MetadataTopic:
    cluster_id: str
    name: str
    topic_id: UUID
    partition_count: int


async def open_metadata_topic(
    client: BrokerClient,
    settings: MetadataTopicSettings,
    timeout_ms: int,
    saved: StateIdentity | None = None,
    refusal_to_create: RefusalToCreate | None = None,
) -> MetadataTopic:
    """Creates the topic if it is missing, and checks it as `find_metadata_topic` does, with the same errors."""
    topic = await find_metadata_topic(client, settings, timeout_ms, saved, refusal_to_create)
    if topic is None:
        await _create(client, settings, timeout_ms)
        topic = await _wait_until_shown(client, settings, timeout_ms)
    return topic


async def find_metadata_topic(
    client: BrokerClient,
    settings: MetadataTopicSettings,
    timeout_ms: int,
    saved: StateIdentity | None,
    refusal_to_create: RefusalToCreate | None,
) -> MetadataTopic | None:
    """Returns the topic; None if it is missing and may be created. Creates nothing.

    `saved` is the identity of the state that would be forgotten. `refusal_to_create` returns why a missing topic must
    not be created, or None. A topic without any record counts as missing: another program may have created it. Raises
    `MetadataTopicLostError` when the topic of the saved state is gone, `MetadataTopicUnfitError` when an operator must
    act, and `BrokerError`."""
    metadata = await client.topic_named(settings.name, timeout_ms)
    await _refuse_to_share(client, settings, timeout_ms)
    if saved is not None and saved.cluster_id == metadata.cluster_id:
        await _refuse_to_replace(client, settings, saved, timeout_ms)
    if settings.name not in metadata.topics:
        await _refuse(refusal_to_create)
        return None
    topic = await _wait_until_shown(client, settings, timeout_ms)
    if not (saved or refusal_to_create is None or await _has_records(client, topic, timeout_ms)):
        await _refuse(refusal_to_create)
    return topic


async def _refuse(refusal_to_create: RefusalToCreate | None) -> None:
    refusal = None if refusal_to_create is None else await refusal_to_create()
    if refusal is not None:
        raise MetadataTopicUnfitError(refusal)


async def _has_records(client: BrokerClient, topic: MetadataTopic, timeout_ms: int) -> bool:
    """Returns whether the topic was ever written to. Raises `BrokerError` if a leader that may know does not answer."""
    source = BrokerLogSource(client)
    troubles: list[BrokerError] = []

    async def is_written(number: int) -> bool:
        partition = TopicIdPartition(topic.topic_id, number, topic.name)
        try:
            return (await source.bounds(partition, min(timeout_ms, _BOUNDS_TIMEOUT_MS))).high_watermark > 0
        except BrokerError as error:
            troubles.append(error)
            return False

    found = any(await bounded_gather(range(topic.partition_count), is_written, topic.partition_count))
    if troubles and not found:
        raise BrokerError(f"it is not known whether topic {topic.name} has records: {troubles[0]}", retriable=True)
    return found


async def _refuse_to_replace(
    client: BrokerClient, settings: MetadataTopicSettings, saved: StateIdentity, timeout_ms: int
) -> None:
    for pause_ms in (500, 1_000, 0):  # a broker may not know a new topic yet
        metadata = await client.named([settings.name], (), timeout_ms)
        topic = metadata.topics.get(settings.name)
        if topic is not None and topic.error == ErrorCode.NONE:
            if topic.topic_id == saved.topic_id:
                if saved.partition_count != settings.partition_count:
                    raise MetadataTopicUnfitError(
                        f"the saved state was read from topic {settings.name} when it had {saved.partition_count}"
                        f" partitions, and {settings.partition_count} are configured: {REBUILD_AFTER_GROWTH}"
                    )
                return
            raise MetadataTopicLostError(f"topic {settings.name} is not the one that the saved state was read from")
        if topic is not None:
            return  # the check that follows reports this error
        await asyncio.sleep(pause_ms / 1000)
    raise MetadataTopicLostError(f"there is no topic {settings.name}, and the saved state was read from one")


async def _wait_until_shown(client: BrokerClient, settings: MetadataTopicSettings, timeout_ms: int) -> MetadataTopic:
    """Waits until a broker shows the topic: a new topic exists before all brokers know it."""
    clock_s = asyncio.get_running_loop().time
    deadline_s = clock_s() + timeout_ms / 1000
    pause_ms = _FIRST_PAUSE_MS
    while True:
        try:
            return await check_metadata_topic(client, settings, timeout_ms)
        except BrokerError as error:
            if not error.retriable or clock_s() + pause_ms / 1000 > deadline_s:
                raise
        await asyncio.sleep(pause_ms / 1000)
        pause_ms = min(2 * pause_ms, _LONGEST_PAUSE_MS)


async def check_metadata_topic(client: BrokerClient, settings: MetadataTopicSettings, timeout_ms: int) -> MetadataTopic:
    metadata = await client.named([settings.name], (), timeout_ms)
    topic = metadata.topics.get(settings.name)
    if topic is None or topic.error != ErrorCode.NONE:
        raise BrokerError(
            f"the cluster does not show topic {settings.name}",
            ErrorCode.UNKNOWN_TOPIC_OR_PARTITION if topic is None else topic.error,
            retriable=True,
        )
    if len(topic.partitions) != settings.partition_count:
        raise MetadataTopicUnfitError(
            f"topic {settings.name} has {len(topic.partitions)} partitions and {settings.partition_count} are"
            " configured (remote.log.metadata.topic.num.partitions): the records of most user partitions would be"
            " looked for in the wrong place. Set the number that the topic was created with. If the topic was grown"
            f" later, rebuild the metadata into a new topic: {STEPS}. If no tier has used the topic yet, delete it and"
            " the folder state.path: the proxy creates both again"
        )
    configs = await _describe(client, None, _TOPIC_RESOURCE, settings.name, [*_REQUIRED, _DELETE_RETENTION], timeout_ms)
    for key, required in _REQUIRED.items():
        if configs.get(key) != required:
            raise MetadataTopicUnfitError(
                f"topic {settings.name} has {key}={configs.get(key)}; it must be {required}{_whose(settings.name)}"
            )
    kept_ms = int(configs.get(_DELETE_RETENTION) or 0)
    if kept_ms < MIN_DELETE_RETENTION_MS:
        raise MetadataTopicUnfitError(
            f"topic {settings.name} has {_DELETE_RETENTION}={kept_ms}; it must be at least {MIN_DELETE_RETENTION_MS}:"
            " a deletion might be removed from the topic before every process has read it"
        )
    return MetadataTopic(metadata.cluster_id, settings.name, topic.topic_id, settings.partition_count)


def _whose(name: str) -> str:
    if name != DEFAULT_TOPIC_NAME:
        return ""
    return (
        ". Kafka's own tiered storage has a topic of this name too. If the topic is Kafka's, do not alter it: set"
        " remote.log.metadata.topic.name to another name"
    )


async def delete_retention_ms(client: BrokerClient, name: str, timeout_ms: int) -> int:
    """Returns for how long the topic keeps a tombstone now. Raises `BrokerError`."""
    configs = await _describe(client, None, _TOPIC_RESOURCE, name, [_DELETE_RETENTION], timeout_ms)
    return int(configs.get(_DELETE_RETENTION) or 0)


async def _refuse_to_share(client: BrokerClient, settings: MetadataTopicSettings, timeout_ms: int) -> None:
    if settings.name != DEFAULT_TOPIC_NAME:
        return

    async def described(node_id: int, left_ms: int) -> dict[str, str | None]:
        return await _describe(client, node_id, _BROKER_RESOURCE, str(node_id), [_TIERED_STORAGE_OF_KAFKA], left_ms)

    configs = await client.of_any_broker(described, timeout_ms)
    if configs.get(_TIERED_STORAGE_OF_KAFKA) == "true":
        raise MetadataTopicUnfitError(
            f"the brokers keep the metadata of their own tier in {settings.name} ({_TIERED_STORAGE_OF_KAFKA}=true):"
            " set remote.log.metadata.topic.name to another name, and do not alter this topic"
        )


async def _create(client: BrokerClient, settings: MetadataTopicSettings, timeout_ms: int) -> None:
    metadata = await client.brokers(timeout_ms=timeout_ms)
    replicas = settings.replication_factor or min(_REPLICAS, len(metadata.brokers))
    configs = {**_REQUIRED, "min.insync.replicas": "2" if replicas >= _REPLICAS else "1"}
    topic = CreateTopicsRequest.CreatableTopic(
        name=settings.name,
        num_partitions=settings.partition_count,
        replication_factor=replicas,
        assignments=[],
        configs=[
            CreateTopicsRequest.CreatableTopic.CreatableTopicConfig(name=name, value=value)
            for name, value in configs.items()
        ],
    )
    message = CreateTopicsRequest(topics=[topic], timeout_ms=timeout_ms, validate_only=False)
    node_id = metadata.controller_id if metadata.controller_id in metadata.brokers else None
    response = await client.request(node_id, message, timeout_ms)
    code = response.topics[0].error_code
    if code not in (ErrorCode.NONE, ErrorCode.TOPIC_ALREADY_EXISTS):
        raise BrokerError(f"topic {settings.name} cannot be created: {response.topics[0].error_message}", code)
    if code == ErrorCode.NONE:
        logger.info(
            "the metadata topic was created",
            extra={"topic": settings.name, "partitions": settings.partition_count, "replicas": replicas},
        )


async def _describe(
    client: BrokerClient, node_id: int | None, resource_type: int, name: str, keys: list[str], timeout_ms: int
) -> dict[str, str | None]:
    resource: Any = DescribeConfigsRequest.DescribeConfigsResource(
        resource_type=resource_type, resource_name=name, configuration_keys=keys
    )
    message = DescribeConfigsRequest(resources=[resource], include_synonyms=False, include_documentation=False)
    response = await client.request(node_id, message, timeout_ms)
    result = response.results[0]
    if result.error_code != ErrorCode.NONE:
        is_of_topic = resource_type == _TOPIC_RESOURCE
        kind = "topic" if is_of_topic else "broker"
        is_refused = result.error_code in (ErrorCode.TOPIC_AUTHORIZATION_FAILED, ErrorCode.CLUSTER_AUTHORIZATION_FAILED)
        right = f"give the proxy DESCRIBE_CONFIGS on the {'topic' if is_of_topic else 'cluster'}"
        raise BrokerError(
            f"the configuration of {kind} {name} cannot be read: {right if is_refused else result.error_message}",
            result.error_code,
            retriable=result.error_code == ErrorCode.UNKNOWN_TOPIC_OR_PARTITION,
        )
    return {config.name: config.value for config in result.configs}
