"""The metrics of the RLM tasks. The names are Kafka's (KIP-405, KIP-956, KIP-963), in Prometheus's spelling."""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge

from tiers.metric_spec import CounterSpec, GaugeSpec, SummarySpec
from tiers.model.ids import TopicIdPartition
from tiers.tasks.alarms import STATES, AlarmReason, RemoteLogAlarms

STAGES: Final = ("survey", "gap", "copy", "facts", "expiry", "trim", "deletion")
"""The stages of a partition's tasks."""
BOUNDS: Final = ("Lz>=Ly", "Ly>=Lx", "Ly>Ry", "Ry>=Rx")
"""The bounds between the tiers, as `violated_bounds` checks them."""
TOPIC_KEPT_MS: Final = 3_600_000
"""How long the series of a topic stay after this process copied its last partition, so that a scrape reads them."""

_TOPIC = ("topic",)
_PARTITION = ("topic", "partition")
_MEASURED: Final = "once the owner has measured the partition"

ALARM = GaugeSpec(
    "tidegate_remote_log_alarm",
    "Partitions, their stages, or topics that have the alarm now, by reason.",
    ("topic", "reason"),
)
ALARMS = CounterSpec("tidegate_remote_log_alarms", "Times that an alarm began, by reason.", ("topic", "reason"))
COPY_BYTES = CounterSpec(
    "tidegate_remote_copy_bytes",
    "Bytes of segments copied, verified and finished.",
    _TOPIC,
    kafka="RemoteCopyBytesPerSec",
)
COPY_REQUESTS = CounterSpec(
    "tidegate_remote_copy_requests", "Segments whose copy began.", _TOPIC, kafka="RemoteCopyRequestsPerSec"
)
COPY_ERRORS = CounterSpec("tidegate_remote_copy_errors", "Copies that failed.", _TOPIC, kafka="RemoteCopyErrorsPerSec")
COPY_LAG_BYTES = GaugeSpec(
    "tidegate_remote_copy_lag_bytes",
    "Bytes of the local log that are not remote yet, by an estimate.",
    _PARTITION,
    kafka="RemoteCopyLagBytes",
)
COPY_LAG_SEGMENTS = GaugeSpec(
    "tidegate_remote_copy_lag_segments",
    "Segments that the records which are not remote yet would fill.",
    _PARTITION,
    kafka="RemoteCopyLagSegments",
)
COPY_LAG_SECONDS = GaugeSpec(
    "tidegate_remote_copy_lag_seconds",
    "How long this process has known a record below the last stable offset that is not remote.",
    _PARTITION,
)
OLDEST_UNCOPIED = GaugeSpec(
    "tidegate_remote_oldest_uncopied_seconds",
    "The age of the oldest record below the last stable offset that is not remote: by its timestamp once it was read, "
    "else the time for which this process has known it. 0: all are remote.",
    _PARTITION,
)
COPY_STALLED_SECONDS = GaugeSpec(
    "tidegate_remote_copy_stalled_seconds",
    "How long a copy with work has made no progress; the log says why. 0: it is not stalled.",
    _PARTITION,
)
COPY_STOPPED = GaugeSpec(
    "tidegate_remote_copy_stopped", "1: copying has stopped until a restart; the log says why.", _PARTITION
)
COPY_THROTTLE_TIME = SummarySpec(
    "tidegate_remote_copy_throttle_time_seconds",
    "How long copying waited for its quota, each time it did.",
    kafka="remote-copy-throttle-time",
)
SPOOL_BYTES = GaugeSpec("tidegate_spool_bytes", "Bytes of the segments in the spool, whose copies have not ended.")
OWNED_PARTITIONS = GaugeSpec("tidegate_owned_partitions", "Partitions that this process copies.")
PAUSED = GaugeSpec(
    "tidegate_paused", "1: an operator paused this work on the topic.", ("topic", "work"), since="while work is paused"
)
REFUSED_TOPICS = GaugeSpec(
    "tidegate_refused_topics", "Topics that cannot be tiered, and that the settings name or that have remote records."
)
TRIMMED_OFFSETS = CounterSpec(
    "tidegate_local_trimmed_offsets", "Offsets removed from brokers by DeleteRecords.", _TOPIC
)
TRIMS_HELD = CounterSpec(
    "tidegate_local_trims_held_by_share_groups", "Trims that stopped at the start offset of a share group.", _TOPIC
)
DELETE_REQUESTS = CounterSpec(
    "tidegate_remote_delete_requests", "Segments whose deletion began.", _TOPIC, kafka="RemoteDeleteRequestsPerSec"
)
DELETE_ERRORS = CounterSpec(
    "tidegate_remote_delete_errors", "Deletions that failed.", _TOPIC, kafka="RemoteDeleteErrorsPerSec"
)
DELETE_LAG_BYTES = GaugeSpec(
    "tidegate_remote_delete_lag_bytes", "Bytes of segments being deleted.", _PARTITION, kafka="RemoteDeleteLagBytes"
)
DELETE_LAG_SEGMENTS = GaugeSpec(
    "tidegate_remote_delete_lag_segments", "Segments being deleted.", _PARTITION, kafka="RemoteDeleteLagSegments"
)
FAILED_DELETIONS = GaugeSpec("tidegate_remote_failed_deletions", "Segments whose deletion failed and is retried.")
LOG_SIZE_BYTES = GaugeSpec(
    "tidegate_remote_log_size_bytes",
    "Bytes of readable remote segments.",
    _PARTITION,
    since=_MEASURED,
    kafka="RemoteLogSizeBytes",
)
METADATA_COUNT = GaugeSpec(
    "tidegate_remote_log_metadata_count",
    "Remote segments with metadata.",
    _PARTITION,
    since=_MEASURED,
    kafka="RemoteLogMetadataCount",
)
LOG_GAPS = GaugeSpec(
    "tidegate_remote_log_gaps",
    "Gaps: runs of offsets that brokers removed before they were copied.",
    _PARTITION,
    since=_MEASURED,
)
LOG_GAP_OFFSETS = GaugeSpec("tidegate_remote_log_gap_offsets", "Offsets in gaps.", _PARTITION, since=_MEASURED)
CUTS = CounterSpec("tidegate_remote_log_cuts", "Ends of remote logs that another leader's records replaced.", _TOPIC)
RECORDED_CUTS = GaugeSpec(
    "tidegate_remote_log_recorded_cuts",
    "CUTs on record: another leader's records replaced the copied ones from there on.",
    _PARTITION,
    since=_MEASURED,
)
CUT_BYTES = GaugeSpec(
    "tidegate_remote_cut_bytes",
    "Bytes of the segments that were cut off as a whole.",
    _PARTITION,
    since=_MEASURED,
)
CUT_SEGMENTS = GaugeSpec(
    "tidegate_remote_cut_segments", "Segments that were cut off as a whole.", _PARTITION, since=_MEASURED
)
BOUNDS_VIOLATIONS = CounterSpec(
    "tidegate_bounds_violations", "Bounds between the tiers that did not hold, by bound.", ("topic", "bound")
)
STAGE_FAILURES = CounterSpec(
    "tidegate_remote_log_stage_failures", "Failures of a stage of a partition's tasks.", ("topic", "stage")
)


class RemoteLogManagerMetrics:
    """One set of metrics per registry.

    The series of a topic and of a partition exist, with zero, since this process took the partition over, unless their
    specs say otherwise. The gauges of a partition go with the ownership. The series of a topic stay for `TOPIC_KEPT_MS`
    after its last partition here."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.alarms = RemoteLogAlarms(ALARMS.metric(registry), ALARM.metric(registry))
        self.copy_bytes = COPY_BYTES.metric(registry)
        self.copy_requests = COPY_REQUESTS.metric(registry)
        self.copy_errors = COPY_ERRORS.metric(registry)
        self.copy_lag_bytes = COPY_LAG_BYTES.metric(registry)
        self.copy_lag_segments = COPY_LAG_SEGMENTS.metric(registry)
        self.copy_lag_seconds = COPY_LAG_SECONDS.metric(registry)
        self.oldest_uncopied_seconds = OLDEST_UNCOPIED.metric(registry)
        self.copy_stalled_seconds = COPY_STALLED_SECONDS.metric(registry)
        self.copy_stopped = COPY_STOPPED.metric(registry)
        self.copy_throttle_time = COPY_THROTTLE_TIME.metric(registry)
        self.spool_bytes = SPOOL_BYTES.metric(registry)
        self.owned_partitions = OWNED_PARTITIONS.metric(registry)
        self.paused = PAUSED.metric(registry)
        self.refused_topics = REFUSED_TOPICS.metric(registry)
        self.trimmed_offsets = TRIMMED_OFFSETS.metric(registry)
        self.trims_held = TRIMS_HELD.metric(registry)
        self.delete_requests = DELETE_REQUESTS.metric(registry)
        self.delete_errors = DELETE_ERRORS.metric(registry)
        self.delete_lag_bytes = DELETE_LAG_BYTES.metric(registry)
        self.delete_lag_segments = DELETE_LAG_SEGMENTS.metric(registry)
        self.failed_deletions = FAILED_DELETIONS.metric(registry)
        self.log_size_bytes = LOG_SIZE_BYTES.metric(registry)
        self.metadata_count = METADATA_COUNT.metric(registry)
        self.log_gaps = LOG_GAPS.metric(registry)
        self.log_gap_offsets = LOG_GAP_OFFSETS.metric(registry)
        self.cuts = CUTS.metric(registry)
        self.recorded_cuts = RECORDED_CUTS.metric(registry)
        self.cut_bytes = CUT_BYTES.metric(registry)
        self.cut_segments = CUT_SEGMENTS.metric(registry)
        self.bounds_violations = BOUNDS_VIOLATIONS.metric(registry)
        self.stage_failures = STAGE_FAILURES.metric(registry)
        own = [each for each in vars(self).values() if isinstance(each, Counter | Gauge)]
        made = [*own, self.alarms.counter, self.alarms.gauge]
        self._of_partition = [each for each in made if each._labelnames == _PARTITION]
        self._of_topic_alone = [each for each in made if each._labelnames == _TOPIC]
        self._measured = (
            self.log_size_bytes,
            self.metadata_count,
            self.log_gaps,
            self.log_gap_offsets,
            self.recorded_cuts,
            self.cut_bytes,
            self.cut_segments,
        )
        """The gauges that tell of the metadata. A zero before the first look would make what is old look new."""
        # A pause is one of the topic, whoever owns its partitions.
        others = (*self._of_partition, self.paused)
        self._of_topic = [each for each in made if "topic" in each._labelnames and each not in others]
        self._whole: set[str] = set()
        """The topics that have all series."""
        self._unowned_since_ms: dict[str, int | None] = {}
        """The topics with series, and since when this process has had no partition of them. None: it has one."""

    def add(self, partition: TopicIdPartition) -> None:
        """Makes the series of a partition that this process takes over, with zero.

        The gauges that tell of the metadata begin with their first value."""
        topic = partition.topic
        for metric in self._of_partition:
            if metric not in self._measured:
                metric.labels(topic, str(partition.partition))
        if topic in self._whole:
            return
        self._whole.add(topic)
        self.note(topic)
        for metric in self._of_topic_alone:
            metric.labels(topic)
        for reason in AlarmReason:
            self.alarms.counter.labels(topic, reason)
        for reason in STATES:
            self.alarms.gauge.labels(topic, reason)
        for bound in BOUNDS:
            self.bounds_violations.labels(topic, bound)
        for stage in STAGES:
            self.stage_failures.labels(topic, stage)

    def note(self, topic: str) -> None:
        """Notes that there will be series of the topic, also if this process owns no partition of it."""
        self._unowned_since_ms.setdefault(topic, None)

    def keep_topics(self, owned: Set[str], now_ms: int) -> None:
        """Removes the series of the topics of which this process has had no partition and no alarm for long."""
        for topic in self.alarms.topics - self._unowned_since_ms.keys():
            self.note(topic)
        for topic, since_ms in list(self._unowned_since_ms.items()):
            if topic in owned or self.alarms.has_any(topic):
                self._unowned_since_ms[topic] = None
            elif since_ms is None:
                self._unowned_since_ms[topic] = now_ms
            elif now_ms - since_ms >= TOPIC_KEPT_MS:
                del self._unowned_since_ms[topic]
                self._whole.discard(topic)
                self.alarms.remove_topic(topic)
                for metric in self._of_topic:
                    metric.remove_by_labels({"topic": topic})

    def forget(self, partition: TopicIdPartition) -> None:
        """Removes the gauges of a partition that this process does not own any more, and ends its alarms."""
        self.alarms.forget(partition.topic, str(partition))
        for metric in self._of_partition:
            metric.remove(partition.topic, str(partition.partition))
