"""`tidegate tier topics`: lists the tiered topics, their size in the remote tier, and their settings."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import typer

from proxy.admin.facts import TopicSetting
from proxy.admin.lines import topic_settings
from proxy.cluster.broker_configs import BrokerConfigs, BrokerValue
from proxy.commands.tier.tools import run_command
from proxy.config import load_config
from tiers.access.open_tier import TIMEOUT_MS, OpenMetadata, open_metadata
from tiers.commands.console import TERMINAL, AsJson, ConfigFile, show_json, show_table, time_text
from tiers.config.topic_policy import NOT_NAMED, Refusal, TopicConfig, exclusion, managed_rule, paused_work
from tiers.config.topic_settings import value_text
from tiers.explain.gathering import policy_from
from tiers.metadata.remote_log import RemoteLog
from tiers.model.ids import TopicIdPartition
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentState
from tiers.tasks.deletion.topic_deletion import deleted_topics
from tiers.texts import size_text


@dataclass(frozen=True, slots=True)
class TieredTopic:
    """A tiered topic. `size_bytes` are the log bytes of its finished segments.

    `oldest_ms` and `newest_ms` are the lowest and the highest of its segments' maximum timestamps."""

    topic: str
    topic_id: str
    partitions: int
    segments: int
    size_bytes: int
    oldest_ms: int | None
    newest_ms: int | None
    copy_fails_since_ms: int | None
    """The earliest of all partitions. The metadata shows only failures that an attempt left in it."""
    refused: str | None
    """Why no owner manages the topic: its configuration or a setting; None: an owner does."""
    paused: tuple[str, ...]
    """The work that an operator paused (`tidegate tier pause`)."""
    settings: Mapping[str, TopicSetting]
    exists: bool
    """Whether a broker knows the topic. If not, `tidegate tier delete-missing` says more about the topic."""
    deletion_proved: bool


def topics(
    config: ConfigFile,
    with_settings: Annotated[bool, typer.Option("--settings", help="Also lists the settings of each topic.")] = False,
    as_json: AsJson = False,
) -> None:
    """Lists the topics that the settings name, that have remote records or that are paused, and their size.

    The time of a segment is that of its newest record. The column state has the reason why a topic is not tiered, and
    what is paused. The source of a setting is topic (set through the proxy, or on the broker's topic), file
    ([[topics]]), or broker (its default). Only --json has settings that are Kafka's defaults, and it has the settings
    in any case."""
    settings = load_config(config)

    async def work() -> list[TieredTopic]:
        async with open_metadata(settings, TERMINAL) as tier:
            return await tiered_topics(tier)

    found = run_command(work)
    if as_json:
        show_json(found)
        return
    headings = ("topic", "partitions", "segments", "size", "oldest segment", "newest segment", "state")
    rows = [
        (
            _name(each),
            each.partitions,
            each.segments,
            size_text(each.size_bytes),
            time_text(each.oldest_ms),
            time_text(each.newest_ms),
            state_text(each),
        )
        for each in found
    ]
    show_table(headings, rows, ("partitions", "segments", "size"))
    if with_settings:
        lines = [
            (_name(topic), key, value_text(key, each.value), each.source)
            for topic in found
            for key, each in topic.settings.items()
            if each.source != "default"
        ]
        show_table(("topic", "setting", "value", "source"), lines)


def _name(topic: TieredTopic) -> str:
    return topic.topic if topic.exists else f"{topic.topic} ({'deleted' if topic.deletion_proved else 'missing'})"


def state_text(topic: TieredTopic) -> str:
    states = [] if topic.refused is None else [f"not tiered: {topic.refused}"]
    if topic.paused:
        states.append(f"paused: {', '.join(topic.paused)}")
    if topic.copy_fails_since_ms is not None and topic.refused is None:
        states.append(f"copying fails since {time_text(topic.copy_fails_since_ms)}")
    return "; ".join(states) or "ok"


async def tiered_topics(tier: OpenMetadata) -> list[TieredTopic]:
    rules = tier.config.topics
    by_topic: dict[TopicIdPartition, list[TopicIdPartition]] = {}
    for partition in tier.state.partitions():
        by_topic.setdefault(TopicIdPartition(partition.topic_id, 0, partition.topic), []).append(partition)
    for topic in tier.cluster.topics.values():
        own = tier.state.topic_tier_config(topic.topic_id)
        is_named = managed_rule(topic.name, rules, own) is not None or exclusion(topic.name, rules, own) is not None
        if (is_named or paused_work(own)) and not topic.is_internal:
            by_topic.setdefault(TopicIdPartition(topic.topic_id, 0, topic.name), [])
    names = sorted({each.topic for each in by_topic if each.topic_id in tier.cluster.topics_by_id and each.topic})
    brokers = await BrokerConfigs(tier.client).of_topics(names, TIMEOUT_MS)
    found = [_line(tier, topic, partitions, rules, brokers) for topic, partitions in by_topic.items()]
    return sorted(found, key=lambda each: (each.topic, each.topic_id))


def _line(
    tier: OpenMetadata,
    topic: TopicIdPartition,
    partitions: list[TopicIdPartition],
    rules: Sequence[TopicConfig],
    brokers: Mapping[str, Mapping[str, BrokerValue]],
) -> TieredTopic:
    known = tier.cluster.topics_by_id.get(topic.topic_id)
    segments = [
        each
        for partition in partitions
        for each in tier.state.list_remote_log_segments(partition)
        if each.state is RemoteLogSegmentState.COPY_SEGMENT_FINISHED
    ]
    own = tier.state.topic_tier_config(topic.topic_id)
    said = {} if known is None else brokers.get(topic.topic, {})
    now_ms = time.time_ns() // 1_000_000
    since_ms = (RemoteLog(tier.state, partition).copy_failing_since_ms(now_ms) for partition in partitions)
    failing = [each for each in since_ms if each is not None and known is not None]
    times = [each.max_timestamp_ms for each in segments if each.max_timestamp_ms >= 0]
    return TieredTopic(
        topic=topic.topic,
        topic_id=str(topic.topic_id),
        partitions=len(partitions) if known is None else len(known.partitions),
        segments=len(segments),
        size_bytes=_size(segments),
        oldest_ms=min(times, default=None),
        newest_ms=max(times, default=None),
        copy_fails_since_ms=min(failing, default=None),
        refused=None if known is None else _refusal(topic, len(known.partitions), rules, own, brokers),
        paused=tuple(sorted(paused_work(own))),
        settings={each.key: each for each in topic_settings(topic.topic, rules, own, said)},
        exists=known is not None,
        deletion_proved=known is None and topic.topic_id in deleted_topics(tier.state),
    )


def _refusal(
    topic: TopicIdPartition,
    partition_count: int,
    rules: Sequence[TopicConfig],
    own: Mapping[str, str],
    brokers: Mapping[str, Mapping[str, BrokerValue]],
) -> str | None:
    values = brokers.get(topic.topic)
    config = None if values is None else {key: each.value for key, each in values.items() if each.value}
    match policy_from(topic, partition_count, rules, own, config):
        case Refusal(reason=reason):
            return reason
        case None:
            return exclusion(topic.topic, rules, own) or NOT_NAMED
    return None


def _size(segments: list[RemoteLogSegmentMetadata]) -> int:
    return sum(each.segment_size_bytes for each in segments)
