"""`TaskServices`: the services that all RLM tasks of a process share."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from tiers.broker.client import monotonic_ms
from tiers.config.remote_log_settings import RemoteLogManagerSettings
from tiers.errors import OwnershipLostError
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogSource
from tiers.quota import RateQuota
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.tasks.copy.spool import Spool
from tiers.tasks.failed_deletions import FailedDeletions
from tiers.tasks.metrics import RemoteLogManagerMetrics


def wall_clock_ms() -> int:
    return time.time_ns() // 1_000_000


def _no_checkpoint(name: str) -> None:
    return None


class ShareGroups(Protocol):
    """The part of `ClusterShareGroups` that the tasks use."""

    async def lowest_start(self, partition: TopicIdPartition, timeout_ms: int) -> int | None: ...


@dataclass(frozen=True, slots=True)
class TaskServices:
    """The services. `checkpoint` is called with a step's name after the step: a test ends the process there."""

    source: LogSource
    share_groups: ShareGroups
    storage: RemoteStorageManager
    metadata: RemoteLogMetadataManager
    settings: RemoteLogManagerSettings
    metrics: RemoteLogManagerMetrics
    spool: Spool
    cluster_id: str
    """The cluster id as it is in the keys of the store."""
    key_ring: KeyRing = field(default_factory=KeyRing)
    """The keys with which new segments are encrypted, if there are any."""
    failed_deletions: FailedDeletions = field(default_factory=FailedDeletions)
    copy_quota: RateQuota | None = None
    """The quota for all copying of this process; None: no limit."""
    clock_ms: Callable[[], int] = monotonic_ms
    wall_clock_ms: Callable[[], int] = wall_clock_ms
    checkpoint: Callable[[str], None] = _no_checkpoint

    def require_ownership(self, partition: TopicIdPartition) -> None:
        """Raises `OwnershipLostError` unless this process owns the partition."""
        if not self.metadata.owns(partition):
            raise OwnershipLostError(f"{partition} is owned by another member")
