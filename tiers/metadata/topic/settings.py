"""The settings of a `TopicBasedMetadataLog`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from tiers.fitness import Fitness
from tiers.metadata.record_log import RefusalToCreate
from tiers.metadata.topic.metadata_topic import MetadataTopicSettings

MAX_AGE_MS = 5_000
"""The age up to which metadata is fresh: half of the default of `remote.log.visible.after.ms`."""


def metadata_group_id(topic_name: str) -> str:
    """Returns the id of the group that owns the metadata partitions. The transactional ids begin with it too."""
    return f"tidegate-{topic_name}"


@dataclass(frozen=True, slots=True)
class TopicBasedSettings:
    """The log's settings. `state_folder` belongs to one process at a time."""

    state_folder: Path
    topic: MetadataTopicSettings = field(default_factory=MetadataTopicSettings)
    is_member: bool = True
    claims: frozenset[int] | None = None
    open_timeout_ms: int = 30_000
    write_timeout_ms: int = 8_000
    """The timeout of a write. It is below the transaction timeout, after which the coordinator would fence us."""
    check_interval_ms: int = 30_000
    """How often the topic is checked. A problem with it is found within a minute."""
    max_age_ms: int = MAX_AGE_MS
    """The age up to which metadata is fresh. The log follows the topic so often that its state stays fresh."""

    fitness: Fitness | None = None
    """Whether this process can work as an owner. None: it always can."""
    declares: Callable[[], str] = str
    """Returns digests of the settings that all members of the group need the same."""
    refusal_to_create: RefusalToCreate | None = None

    @property
    def group_id(self) -> str:
        return metadata_group_id(self.topic.name)
