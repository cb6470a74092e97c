"""The settings of the RLM tasks and of the topics that they tier. Numbers have their unit in the name."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path

SAME_AS_TOTAL = -2
"""The value of `local.retention.*` for a topic to which only the broker's own retention applies."""
UNLIMITED = -1


@dataclass(frozen=True, slots=True)
class RemoteLogManagerSettings:
    """The settings of the RLM tasks.

    `visible_after_ms` is T_vis of docs/design.md, safety rule 1. `broker_id` is the writer's id in Tidegate's metadata
    records."""

    spool_dir: Path
    broker_id: int = -1
    process_interval_ms: int = 30_000
    retry_interval_ms: int = 1_000
    topics_interval_ms: int = 10_000
    copier_tasks: int = 10
    spool_threads: int = 4
    spool_max_bytes: int = 4 << 30
    fetch_bytes: int = 1 << 20
    verify_bytes: int = 8 << 20
    segments_per_run: int = 4
    request_timeout_ms: int = 30_000
    stop_timeout_ms: int = 30_000
    visible_after_ms: int = 10_000
    custom_metadata_max_bytes: int = 128
    expire_max_bytes_per_run: int = 16 << 30
    max_clock_skew_ms: int = 60_000
    topic_deletion_delay_ms: int = 300_000
    topic_deletion_unproved_delay_ms: int = 7 * 86_400_000
    stuck_lso_alarm_ms: int = 900_000
    copy_stall_alarm_ms: int = 45_000
    """The time without progress after which a copy counts as stalled. With a check every second, that is reported
    within a minute."""
    gap_alarm_ms: int = 30_000
    """The time in which a DeleteRecords may still be on its way to the metadata. Later, missing records are a gap."""


@dataclass(frozen=True, slots=True)
class TopicRule:
    """One line of the topic settings. `pattern` is a topic's name or a shell pattern (`orders-*`)."""

    pattern: str
    remote_storage_enable: bool = True
    local_retention_ms: int = SAME_AS_TOTAL
    local_retention_bytes: int = SAME_AS_TOTAL
    segment_bytes: int = 64 << 20
    segment_ms: int = 3_600_000
    copy_disable: bool = False

    def matches(self, topic: str) -> bool:
        return fnmatchcase(topic, self.pattern)
