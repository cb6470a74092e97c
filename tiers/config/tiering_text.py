"""Says in one line which topics are tiered, and by which rule: `by [[topics]] orders-*: orders-eu, orders-us`."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Final

from tiers.config.topic_policy import TopicConfig, managed_rule

NOTHING_TIERED: Final = "nothing, because there is no [storage], or remote.log.storage.system.enable is false"
_SHOWN_TOPICS = 5


def few(topics: Sequence[str]) -> str:
    """Returns the first names, and how many more there are."""
    more = f", and {len(topics) - _SHOWN_TOPICS} more" if len(topics) > _SHOWN_TOPICS else ""
    return f"{', '.join(topics[:_SHOWN_TOPICS])}{more}" if topics else "no topic"


def tiering_text(rules: Sequence[TopicConfig], topics: Iterable[tuple[str, TopicConfig]]) -> str:
    """`topics` are the tiered ones, each with its rule (`managed_rule`).

    The rule is none of the file if the topic's own configuration tiers it."""
    by_rule: dict[str, list[str]] = {rule.pattern: [] for rule in rules if rule.remote_storage_enable}
    own: list[str] = []
    for topic, rule in sorted(topics, key=lambda each: each[0]):
        by_rule.get(rule.pattern, own).append(topic)
    if not by_rule:
        return f"only by kafka-configs: {few(own)}"
    said = [f"by [[topics]] {pattern}: {few(found)}" for pattern, found in by_rule.items()]
    return "; ".join([*said, *([f"by kafka-configs: {few(own)}"] if own else [])])


def tiering_of(rules: Sequence[TopicConfig], topics: Iterable[str]) -> str:
    """Does the same for topics whose own configuration is not known."""
    found = ((topic, managed_rule(topic, rules, None)) for topic in topics)
    return tiering_text(rules, [(topic, rule) for topic, rule in found if rule is not None])
