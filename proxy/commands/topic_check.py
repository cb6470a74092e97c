"""The part of `tidegate check` about topics: what each rule decides, topics that are not tiered, and retentions."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry

from proxy.commands.store_check import absent_segments
from proxy.config import TidegateConfig
from proxy.process.member_settings import other_settings
from tiers.access.open_tier import RemoteTierError, metadata_to_now
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import TopicMetadata
from tiers.config.topic_policy import TopicConfig, TopicPolicy, exclusion, few, is_internal, resume_command, tiering_of
from tiers.config.total_retention import TOTAL_KEYS, UNLIMITED
from tiers.errors import RemoteLogError
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.metadata.topic.group.group_members import group_members
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.tasks.tiered_topics import TieredTopics

TIMEOUT_MS = 10_000


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


def rule_lines(rules: Sequence[TopicConfig], topics: Collection[str]) -> Iterator[str]:
    """Yields a line for each rule. `topics` are all topics that the proxy sees."""
    decided: set[str] = set()
    for rule in rules:
        matching = {each for each in topics if rule.matches(each) and not is_internal(each)}
        first = sorted(matching - decided)
        decided |= matching
        yield f"[[topics]] {rule.pattern}: {_meaning(rule, first, is_matching=bool(matching))}"


def _meaning(rule: TopicConfig, first: list[str], *, is_matching: bool) -> str:
    """`first` are the topics that no earlier rule matches."""
    if not is_matching:
        return "warning: matches no topic: correct the rule, create the topic, or give the proxy DESCRIBE on it"
    if not first:
        return "warning: earlier rules decide about all topics that it matches: move it up, or remove it"
    return f"{'matches' if rule.remote_storage_enable else 'excludes'} {few(first)}"


def useless_local_retentions(policy: TopicPolicy) -> Iterator[str]:
    """Yields the local retentions that are longer than the total, as `kafka-configs` refuses them."""
    total_keys = reversed(TOTAL_KEYS) if policy.recorded_total.is_set else ("retention.bytes", "retention.ms")
    limits = (
        ("local.retention.bytes", policy.local_retention_bytes, policy.retention_bytes, "bytes"),
        ("local.retention.ms", policy.local_retention_ms, policy.retention_ms, "ms"),
    )
    for total_key, (key, local, total, unit) in zip(total_keys, limits, strict=True):
        if local is not None and UNLIMITED < total < local:
            yield (
                f"{policy.topic}: {key} is {local} {unit}, more than the total of {total} {unit} ({total_key}), so it"
                f" trims nothing: lower {key}, or raise {total_key} on the topic"
            )


def is_never_trimmed(policy: TopicPolicy) -> bool:
    """Whether the brokers keep every copied record for the total retention."""
    has_local = policy.local_retention_ms is not None or policy.local_retention_bytes is not None
    return not (has_local or policy.recorded_total.is_set or policy.copy_disable)
