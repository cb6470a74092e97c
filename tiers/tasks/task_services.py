"""What the RLM tasks of a process share: `TaskServices`, their settings, and `Stage`, in which the work is done."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol, TypeVar

from tiers.backoff import Backoff
from tiers.broker.client import DEFAULT_REQUEST_TIMEOUT_MS, monotonic_ms, wall_clock_ms
from tiers.config.settings import RemoteLogConfig
from tiers.errors import LogDivergedError, OwnershipLostError, Peer, RemoteLogError, silent_peer
from tiers.metadata.metadata_log import MetadataLog
from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager
from tiers.metadata.state.state import RemoteLogMetadataState
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogSource
from tiers.model.segment_metadata import RemoteLogSegmentMetadata, RemoteLogSegmentMetadataUpdate, RemoteLogSegmentState
from tiers.quota import QuotaWindow, RateQuota
from tiers.segment.segment_encryption import KeyRing
from tiers.storage.outages import StoreOutages
from tiers.storage.remote_storage_manager import RemoteStorageManager
from tiers.tasks.alarms import AlarmReason
from tiers.tasks.copy.spool import Spool
from tiers.tasks.deletion.failed_deletions import FailedDeletions
from tiers.tasks.history.tier_place import TierPlace
from tiers.tasks.metrics import RemoteLogManagerMetrics
from tiers.texts import moment_text

TIER_SETTINGS_MAX_AGE_MS: Final = 10_000
"""The age of tier settings by which a topic is copied. What deletes records reads them to their end first."""
STOPPING: Final = (LogDivergedError, OwnershipLostError)
"""The errors that stop all stages of a partition."""
_TOPICS_INTERVAL_MS: Final = 10_000
_LOGGED_OF_STORE: Final = 4
"""The first failure by the store that a stage logs. By then, an outage of the store is known."""
T = TypeVar("T")
logger = logging.getLogger(__name__)


class ShareGroups(Protocol):
    """The part of `ClusterShareGroups` that the tasks use."""

    async def lowest_start(self, partition: TopicIdPartition, timeout_ms: int) -> int | None: ...


class LocalIndexWriter(Protocol):
    """The part of `LocalIndexes` that the tasks use. It is a cache, so no call raises for an error of the disk."""

    async def put(self, segment: RemoteLogSegmentMetadata, raw: bytes) -> None:
        """Appends the entries of a copied segment. `raw` is its `.indexes` object."""

    async def remove_below(self, partition: TopicIdPartition, offset: int) -> None:
        """Removes the files that end below `offset`."""


class NoLocalIndexes:
    """The `LocalIndexWriter` of a process that keeps no index files."""

    async def put(self, segment: RemoteLogSegmentMetadata, raw: bytes) -> None:
        return

    async def remove_below(self, partition: TopicIdPartition, offset: int) -> None:
        return


@dataclass(frozen=True, slots=True)
class RemoteLogManagerSettings:
    """The settings of the RLM tasks: those of the file, and those that only code sets.

    `broker_id` is the writer's id in Tidegate's metadata records."""

    spool_dir: Path
    remote_log: RemoteLogConfig = field(default_factory=RemoteLogConfig)
    broker_id: int = -1
    spool_threads: int = 4
    spool_max_bytes: int = 4 << 30
    fetch_bytes: int = 1 << 20
    verify_bytes: int = 16 << 20
    segments_per_run: int = 4
    request_timeout_ms: int = DEFAULT_REQUEST_TIMEOUT_MS
    stop_timeout_ms: int = 30_000
    expire_max_bytes_per_run: int = 16 << 30
    max_clock_skew_ms: int = 60_000
    stuck_lso_alarm_ms: int = 900_000
    copy_stall_alarm_ms: int = 45_000
    """The time without progress after which a copy counts as stalled. With a check every second, that is reported
    within a minute."""
    stage_alarm_ms: int = 45_000
    """The time for which a stage fails before an alarm reports it."""
    gap_alarm_ms: int = 30_000
    """The time in which a DeleteRecords may still be on its way to the metadata. Later, missing records are a gap."""

    @property
    def topics_interval_ms(self) -> int:
        return min(_TOPICS_INTERVAL_MS, self.remote_log.task_interval_ms)


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
    place: TierPlace = field(default_factory=TierPlace)
    local_indexes: LocalIndexWriter = field(default_factory=NoLocalIndexes)
    copy_quota: RateQuota = field(default_factory=lambda: RateQuota(None, QuotaWindow(), monotonic_ms))
    """The quota for all copying of this process. It may change at any time."""
    clock_ms: Callable[[], int] = monotonic_ms
    wall_clock_ms: Callable[[], int] = wall_clock_ms
    outages: StoreOutages = field(default_factory=StoreOutages)
    """Those of the store's locations, as this process finds them."""
    checkpoint: Callable[[str], None] = lambda name: None
    say: Callable[[str], None] = lambda text: None
    """Tells the user of a job a message of one line."""

    @property
    def log(self) -> MetadataLog:
        return self.metadata.log

    @property
    def state(self) -> RemoteLogMetadataState:
        return self.metadata.state

    async def present_tier_settings(self, partition: TopicIdPartition) -> Mapping[str, str]:
        """Returns the topic's tier settings after their metadata was read to its end.

        Raises `RemoteLogMetadataNotReadyError` when it cannot be read to its end now."""
        await self.log.ensure_fresh(partition.of_settings, 0, self.settings.request_timeout_ms)
        return self.state.topic_tier_config(partition.topic_id)

    async def write_state(self, segment: RemoteLogSegmentMetadata, state: RemoteLogSegmentState) -> None:
        """Moves `segment` to `state`. Every update repeats the custom metadata (docs/design.md, "Metadata")."""
        await self.metadata.update_remote_log_segment_metadata(
            RemoteLogSegmentMetadataUpdate(
                segment_id=segment.segment_id,
                broker_id=self.settings.broker_id,
                event_timestamp_ms=self.wall_clock_ms(),
                state=state,
                custom_metadata=segment.custom_metadata,
            )
        )

    @property
    def knows_all_partitions(self) -> bool:
        """Whether every metadata partition was read to its end just now.

        A conclusion from what the metadata of no partition has counts only then: a metadata partition may be unread,
        or forgotten and read again (docs/design.md, safety rule 5)."""
        age_ms = self.log.status().freshness_age_ms
        return age_ms is not None and age_ms <= self.settings.remote_log.fresh_within_ms

    def retry_at_ms(self, failures: int) -> int:
        """Returns when work is tried again that has failed once more. The backoff doubles, up to the interval."""
        remote_log = self.settings.remote_log
        backoff = Backoff(remote_log.task_retry_backoff_ms, remote_log.task_interval_ms)
        return self.clock_ms() + backoff.most_ms(failures + 1)

    def require_ownership(self, partition: TopicIdPartition) -> None:
        """Raises `OwnershipLostError` unless this process owns the partition."""
        if not self.log.owns(partition):
            raise OwnershipLostError(f"{partition} is owned by another member")


class Stage:
    """One kind of work of a partition, with its own due time, failures, backoff, alarm and log lines.

    The failure of a stage postpones that stage alone (docs/design.md, "Log range")."""

    def __init__(self, services: TaskServices, topic_id_partition: TopicIdPartition, name: str) -> None:
        self.name = name
        self.due_ms = 0
        self.failures = 0
        """The failures since the last success."""
        self.last_error = ""
        self.waits_for: Peer | None = None
        """Who did not answer, by the last error."""
        self._services = services
        self._topic = topic_id_partition.topic
        self._alarm = self._topic, AlarmReason.STAGE_FAILING, f"{topic_id_partition} {name}"
        self._fields = {"partition": str(topic_id_partition), "stage": name}
        self._failing_since_ms = 0

    @property
    def is_due(self) -> bool:
        return self.due_ms <= self._services.clock_ms()

    @property
    def is_postponed(self) -> bool:
        """Whether the stage failed, and its backoff has not passed."""
        return self.failures > 0 and not self.is_due

    async def run(self, work: Callable[[], Awaitable[T]]) -> T | None:
        """Does the work once. Returns its result, or None if it failed.

        After a success, the stage is due one interval after it began, so that the stages of a round stay together.
        Raises the errors in `STOPPING`."""
        began_ms = self._services.clock_ms()
        try:
            result = await work()
        except STOPPING:
            raise
        except Exception as error:  # any other error of a stage must not affect the other stages
            self.failed(error)
            return None
        self.succeeded(began_ms)
        return result

    def succeeded(self, began_ms: int) -> None:
        services = self._services
        self.due_ms = max(services.clock_ms(), began_ms + services.settings.remote_log.task_interval_ms)
        self.failures, self.last_error, self.waits_for = 0, "", None
        if services.metrics.alarms.end(*self._alarm):
            logger.info("a stage of a partition works again", extra=self._fields)

    def failed(self, error: Exception) -> None:
        """Postpones the stage, and says why.

        While the stage keeps failing, each doubling of the failures is logged. An outage of the store concerns every
        partition, and has a line of its own. So the first failures by the store are not logged."""
        self.postpone(error)
        is_of_store = self.waits_for is Peer.STORE
        if self.failures & (self.failures - 1) or (is_of_store and self.failures < _LOGGED_OF_STORE):
            return
        if is_of_store and self._services.outages.now():
            return
        fields = {**self._fields, "error": self.last_error, "failures": self.failures}
        if isinstance(error, RemoteLogError):
            logger.warning("a stage of a partition failed", extra=fields)
        else:
            logger.exception("a stage of a partition failed", extra=fields, exc_info=error)

    def postpone(self, error: Exception) -> None:
        """Counts a failure. The backoff doubles with each one, up to the interval."""
        if self.failures == 0:
            self._failing_since_ms = self._services.clock_ms()
        self.due_ms = self._services.retry_at_ms(self.failures)
        self.failures += 1
        self.last_error, self.waits_for = str(error) or repr(error), silent_peer(error)
        self._services.metrics.stage_failures.labels(self._topic, self.name).inc()

    def watch(self) -> None:
        """Raises an alarm if the stage fails for long, once until it works again."""
        services, failing_ms = self._services, self._services.clock_ms() - self._failing_since_ms
        is_for_long = self.failures > 0 and failing_ms >= services.settings.stage_alarm_ms
        if not is_for_long or not services.metrics.alarms.begin(*self._alarm, self.last_error, self.waits_for):
            return
        if not (self.waits_for is Peer.STORE and services.outages.now()):
            since = moment_text(services.wall_clock_ms() - failing_ms)
            fields = {**self._fields, "error": self.last_error, "since": since}
            logger.error("a stage of a partition keeps failing", extra=fields)
