"""The part of `tidegate check` about topics: rules, topics that are not tiered, retentions, and records at risk."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import NamedTuple

from prometheus_client import CollectorRegistry

from protocol.errors import ErrorCode, ProtocolError
from protocol.records.record_batch import iterate_batches
from proxy.commands.rule_check import is_never_trimmed, rule_lines, useless_local_retentions
from proxy.commands.store_check import absent_segments
from proxy.config import TidegateConfig
from proxy.process.member_settings import other_settings
from tiers.access.open_tier import RemoteTierError, metadata_to_now
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.broker.fetch import READ_UNCOMMITTED, FetchPosition, fetch_raw
from tiers.config.topic_policy import TopicPolicy, exclusion, resume_command, tiering_of
from tiers.errors import BrokerError, RemoteLogError
from tiers.log.broker_log import BrokerLogSource
from tiers.metadata.remote_log import RemoteLog
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.metadata.topic.group.group_members import group_members
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LocalLogBounds
from tiers.tasks.copy.uncopied import estimated_bytes, timestamp_of
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.tasks.partition_watch import used_share
from tiers.tasks.tiered_topics import TieredTopics

TIMEOUT_MS = 10_000
_PARTITIONS_AT_ONCE = 16
_OLD_TRANSACTION_MS = 900_000
"""The age of an open transaction that hangs, as for the alarm `stuck-lso`."""
_HALF = 0.5


@dataclass(slots=True)
class TopicFindings:
    """One line each. `remarks` are no problems: topics that a pattern names, and that are not tiered, or are paused."""

    tiered: str = ""
    """Which topics are tiered, and by which rule. Empty: it cannot be read."""
    rules: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)
    remarks: list[str] = field(default_factory=list)


async def topic_findings(config: TidegateConfig, client: BrokerClient, *, has_store: bool = True) -> TopicFindings:
    """Returns what is to be said of all topics that the settings name.

    Returns the rules alone with another metadata manager than the topic-based one: only the running proxy can read the
    recorded totals then, and raises the alarms."""
    try:
        known = (await client.metadata(TIMEOUT_MS)).topics
        names = [each.name for each in known.values() if not each.is_internal]
        rules = list(rule_lines(config.topics, names))
        if not config.remote_log.is_topic_based:
            return TopicFindings(tiering_of(config.topics, names), rules)
        async with AsyncExitStack() as stack:
            cluster = await client.topic_named(config.remote_log.metadata_topic, TIMEOUT_MS)
            log = None
            if config.remote_log.metadata_topic in cluster.topics:  # opening the metadata would create the topic
                log = await stack.enter_async_context(metadata_to_now(config, client))
            topics = TieredTopics(
                client,
                config.topics,
                RemoteLogManagerMetrics(CollectorRegistry()),
                log,
            )
            policies = (await topics.refresh(TIMEOUT_MS)).values()
            found = TopicFindings(topics.tiering, rules, conflicts(policies))
            found.problems += [line for policy in policies for line in useless_local_retentions(policy)]
            for topic, reason in sorted(topics.refused.items()):
                lines = found.problems if topics.is_expected(topic) else found.remarks
                lines.append(f"{topic} is not tiered: {reason}")
            found.remarks += _excluded(config, known, None if log is None else log.state)
            found.remarks += [
                f"{policy.topic}: an operator paused {', '.join(sorted(policy.paused))}:"
                f" `{resume_command(policy.topic, policy.paused)}`"
                for policy in policies
                if policy.paused
            ]
            found.remarks += [
                f"{policy.topic} is never trimmed: without a local.retention.*, the brokers keep copied records as long"
                " as the remote tier does"
                for policy in policies
                if is_never_trimmed(policy)
            ]
            if log is not None:
                found.problems += await _risks(client, log.state, policies)
                members = await group_members(client, config.remote_log.metadata_topic, TIMEOUT_MS)
                others = other_settings(config.shared_digests(), members, "this file: all proxies need the same")
                rules += [f"warning: {line}" for line in others]
            if log is not None and has_store:
                try:
                    absent = await absent_segments(config, cluster.cluster_id, log.state)
                except (RemoteLogError, RemoteTierError) as error:
                    absent = [f"the newest segments cannot be looked for: {error}"]
                found.problems += [f"[storage] {line}" for line in absent]
            return found
    except RemoteLogError as error:
        return TopicFindings(problems=[f"the tiered topics cannot be checked: {error}"])


def _excluded(
    config: TidegateConfig, topics: Mapping[str, TopicMetadata], metadata: RemoteLogMetadataState | None
) -> list[str]:
    """Returns the topics that a setting excludes, with the setting."""
    lines = []
    for name, topic in sorted(topics.items()):
        own = {} if metadata is None else metadata.topic_tier_config(topic.topic_id)
        reason = None if topic.is_internal else exclusion(name, config.topics, own)
        lines += [] if reason is None else [f"{name} is not tiered: {reason}"]
    return lines


def conflicts(policies: Collection[TopicPolicy]) -> list[str]:
    """Returns the totals of the file that are not in force."""
    return [
        f"{policy.topic}: nothing expires: {policy.total_conflict}: record a total with `kafka-configs` through the"
        " proxy, or change the file"
        for policy in policies
        if policy.total_conflict
    ]


async def _risks(
    client: BrokerClient, metadata: RemoteLogMetadataState, policies: Collection[TopicPolicy]
) -> list[str]:
    source, slots = BrokerLogSource(client), asyncio.Semaphore(_PARTITIONS_AT_ONCE)

    async def of(policy: TopicPolicy, partition: TopicIdPartition) -> list[str]:
        async with slots:
            try:
                bounds = await source.bounds(partition, TIMEOUT_MS)
                offset, first = RemoteLog(metadata, partition).first_uncopied(bounds), None
                if offset < bounds.high_watermark:
                    size_bytes = estimated_bytes(metadata, partition, bounds.high_watermark - offset)
                    if size_bytes is None:
                        size_bytes = await source.size_bytes(partition, TIMEOUT_MS)
                    first = FirstUncopied(offset, await _timestamp_ms(client, partition, offset), size_bytes or 0)
                is_open = bounds.last_stable_offset < bounds.high_watermark
                held_ms = await _timestamp_ms(client, partition, bounds.last_stable_offset) if is_open else None
            except BrokerError as error:
                return [f"{_name(partition)}: its records that are not copied cannot be read: {error}"]
        return risks_of(policy, partition, bounds, first, held_ms, time.time_ns() // 1_000_000)

    async with asyncio.TaskGroup() as tasks:
        looking = [tasks.create_task(of(policy, each)) for policy in policies for each in policy.partitions()]
    return [problem for look in looking for problem in look.result()]


class FirstUncopied(NamedTuple):
    """The first record that is not copied. `size_bytes` is an estimate of the size of it and of those behind it."""

    offset: int
    timestamp_ms: int | None
    size_bytes: int


def risks_of(
    policy: TopicPolicy,
    partition: TopicIdPartition,
    bounds: LocalLogBounds,
    first: FirstUncopied | None,
    held_ms: int | None,
    now_ms: int,
) -> list[str]:
    """Returns the problems of one partition.

    `held_ms` is the timestamp of the batch at the LSO, if the LSO lies below the high watermark."""
    problems = []
    if held_ms is not None and now_ms - held_ms >= _OLD_TRANSACTION_MS:
        problems.append(
            f"{_name(partition)}: the record at the last stable offset {bounds.last_stable_offset} is"
            f" {_minutes(now_ms - held_ms)} old: a transaction hangs, and no record after it is copied"
        )
    broker = policy.broker_retention
    if broker is None or first is None or not policy.recorded_total.is_set:
        return problems
    age_ms = 0 if first.timestamp_ms is None else now_ms - first.timestamp_ms
    share = used_share(broker, age_ms, first.size_bytes)
    if share >= _HALF:
        problems.append(
            f"{_name(partition)}: the records from offset {first.offset} on are not copied, and have used"
            f" {int(min(share, 1.0) * 100)} % of the broker's retention ({broker}): after that, the broker removes"
            " them: raise the retention on the topic"
        )
    return problems


async def _timestamp_ms(client: BrokerClient, partition: TopicIdPartition, offset: int) -> int | None:
    """Returns the timestamp of the batch at `offset`, which may belong to an open transaction. Raises `BrokerError`."""
    leader = await client.leader_of(partition, TIMEOUT_MS)
    position = FetchPosition(partition.topic_id, partition.partition, offset, leader.leader_epoch, max_bytes=1)
    fetched = await fetch_raw(
        client, leader.node_id, [position], max_bytes=1, isolation_level=READ_UNCOMMITTED, timeout_ms=TIMEOUT_MS
    )
    for each in fetched:
        if each.error != ErrorCode.NONE:
            raise BrokerError(f"the leader refused offset {offset}", each.error, retriable=True)
        try:
            batch = next(iterate_batches(each.records), None)
        except ProtocolError as error:
            raise BrokerError(f"the batch at offset {offset} cannot be read: {error}") from error
        return None if batch is None else timestamp_of(batch)
    return None


def _name(partition: TopicIdPartition) -> str:
    return f"{partition.topic}-{partition.partition}"


def _minutes(ms: int) -> str:
    return f"{ms // 60_000} minutes"
