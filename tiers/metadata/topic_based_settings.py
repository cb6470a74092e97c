"""What a `TopicBasedRemoteLogMetadataManager` is told, and what it tells an operator."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

from tiers.metadata.metadata_topic import MetadataTopicSettings
from tiers.metadata.topic_partitioner import TopicPartitioner, by_topic_id

DEFAULT_PREFIX = "tidegate"


def metadata_group_id(topic_name: str, prefix: str = DEFAULT_PREFIX) -> str:
    """Of the group that owns the topic's partitions; its transactional ids begin with it too."""
    return f"{prefix}-{topic_name}"


@dataclass(frozen=True, slots=True)
class TopicBasedSettings:
    """`state_folder` belongs to one process at a time. `prefix` names group and transactional ids: one per cluster."""

    state_folder: Path
    prefix: str = DEFAULT_PREFIX
    topic: MetadataTopicSettings = field(default_factory=MetadataTopicSettings)
    is_member: bool = True
    claims: frozenset[int] | None = None
    writer: str | None = None
    partitioner: TopicPartitioner = by_topic_id
    open_timeout_ms: int = 30_000
    write_timeout_ms: int = 8_000
    """Below the transactions' own timeout, after which the coordinator would fence us."""
    check_interval_ms: int = 30_000
    """Trouble with the topic is known within a minute."""

    refusal_to_create: Callable[[], Awaitable[str | None]] | None = None
    """Asked before a topic is created that is missing: a sentence for an operator when that must not be."""

    @property
    def group_id(self) -> str:
        return metadata_group_id(self.topic.name, self.prefix)


@dataclass(frozen=True, slots=True)
class MetadataStatus:
    """What an operator sees of the manager. `freshness_age_ms`: of what is behind most; None: not all was read yet."""

    alarm: str | None
    freshness_age_ms: int | None
    owned_partitions: int
    events_read: int
    foreign_records_read: int
    clock_skew_ms: int | None
