"""`TopicPolicy`: the settings of one tiered topic, from the proxy's rules and the broker's configuration.

* The first rule that matches decides. Tier settings of the topic itself (docs/semantics.md 9.4) override it key by key.
* `retention.*` are the broker's and mean the total over both tiers. `local.retention.*` are Tidegate's.
* Only topics with `cleanup.policy=delete` alone can be tiered: compaction changes old offsets after they were copied.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from uuid import UUID

from tiers.config.remote_log_settings import SAME_AS_TOTAL, UNLIMITED, TopicRule
from tiers.config.settings import TopicConfig
from tiers.model.ids import TopicIdPartition

BROKER_KEYS = ("cleanup.policy", "retention.ms", "retention.bytes", "remote.storage.enable")


@dataclass(frozen=True, slots=True)
class TopicPolicy:
    """A topic's policy. A retention of -1 is unlimited. A local retention is None if only the total one applies."""

    topic: str
    topic_id: UUID
    partition_count: int
    retention_ms: int
    retention_bytes: int
    local_retention_ms: int | None
    local_retention_bytes: int | None
    segment_bytes: int
    segment_ms: int
    copy_disable: bool = False

    def partitions(self) -> list[TopicIdPartition]:
        return [TopicIdPartition(self.topic_id, index, self.topic) for index in range(self.partition_count)]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The reason why a topic that a rule names cannot be tiered."""

    topic: str
    reason: str


def topic_rule(topic: TopicConfig) -> TopicRule:
    return TopicRule(
        topic.pattern,
        remote_storage_enable=topic.remote_storage_enable,
        local_retention_ms=topic.local_retention_ms,
        local_retention_bytes=topic.local_retention_bytes,
        segment_bytes=topic.segment_bytes,
        segment_ms=topic.segment_ms,
        copy_disable=topic.copy_disable,
    )


def matching_rule(topic: str, rules: Sequence[TopicRule], overrides: Mapping[str, str] | None) -> TopicRule | None:
    """Returns the rule for `topic`; None if it is not tiered. Raises `ValueError` for an override that is no number."""
    rule = next((rule for rule in rules if rule.matches(topic)), None)
    if overrides:
        rule = _overridden(rule or TopicRule(topic, remote_storage_enable=False), overrides)
    return rule if rule is not None and rule.remote_storage_enable else None


def managed_rule(topic: str, rules: Sequence[TopicRule], overrides: Mapping[str, str] | None) -> TopicRule | None:
    """Returns the rule by which an owner manages the topic, if the topic's configuration agrees (`policy_of`).

    None: no owner manages it. Raises `ValueError` for an override that is not a number."""
    return None if topic.startswith("__") else matching_rule(topic, rules, overrides)


def _overridden(rule: TopicRule, overrides: Mapping[str, str]) -> TopicRule:
    return replace(
        rule,
        remote_storage_enable=_boolean(overrides, "remote.storage.enable", rule.remote_storage_enable),
        copy_disable=_boolean(overrides, "remote.log.copy.disable", rule.copy_disable),
        local_retention_ms=int(overrides.get("local.retention.ms", rule.local_retention_ms)),
        local_retention_bytes=int(overrides.get("local.retention.bytes", rule.local_retention_bytes)),
    )


def _boolean(values: Mapping[str, str], key: str, default: bool) -> bool:
    return values[key].lower() == "true" if key in values else default


def policy_of(
    topic: str, topic_id: UUID, partition_count: int, rule: TopicRule, config: Mapping[str, str]
) -> TopicPolicy | Refusal:
    """Returns the topic's policy, or why it cannot be tiered. `config` has the broker's values of `BROKER_KEYS`."""
    cleanup = config.get("cleanup.policy", "")
    if cleanup != "delete":
        return Refusal(topic, f"cleanup.policy is {cleanup!r}; only 'delete' can be tiered")
    if config.get("remote.storage.enable", "false").lower() == "true":
        return Refusal(topic, "the brokers tier it themselves (remote.storage.enable=true)")
    try:
        retention_ms, retention_bytes = int(config["retention.ms"]), int(config["retention.bytes"])
    except (KeyError, ValueError):
        return Refusal(topic, "the broker does not report its retention")
    return TopicPolicy(
        topic=topic,
        topic_id=topic_id,
        partition_count=partition_count,
        retention_ms=retention_ms,
        retention_bytes=retention_bytes,
        local_retention_ms=_local(rule.local_retention_ms),
        local_retention_bytes=_local(rule.local_retention_bytes),
        segment_bytes=rule.segment_bytes,
        segment_ms=rule.segment_ms,
        copy_disable=rule.copy_disable,
    )


def _local(value: int) -> int | None:
    return None if value in (SAME_AS_TOTAL, UNLIMITED) else value
