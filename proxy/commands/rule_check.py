"""The part of `tidegate check` about `[[topics]]`: which topics each rule decides, and retentions that trim nothing."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from tiers.config.topic_policy import TopicConfig, TopicPolicy, few, is_internal
from tiers.config.total_retention import TOTAL_KEYS, UNLIMITED


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
