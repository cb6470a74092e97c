"""The metrics of the RLM tasks. The names are Kafka's (KIP-405, KIP-956, KIP-963), in Prometheus's spelling."""

from __future__ import annotations

from collections.abc import Set
from typing import Final

from prometheus_client import CollectorRegistry

from tiers.metric_spec import CounterSpec, GaugeSpec, MetricSet, SummarySpec
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


class RemoteLogManagerMetrics(MetricSet):
    """The series of a topic and of a partition exist, with zero, since this process took the partition over.

    The exceptions are in the specs. The gauges of a partition go with the ownership. The series of a topic stay for
    `TOPIC_KEPT_MS` after its last partition here."""

    alarm_gauge = GaugeSpec(
        "tidegate_remote_log_alarm",
        "Partitions, their stages, or topics that have the alarm now, by reason.",
        ("topic", "reason"),
    )
    alarm_counter = CounterSpec(
        "tidegate_remote_log_alarms", "Times that an alarm began, by reason.", ("topic", "reason")
    )
    copy_bytes = CounterSpec(
        "tidegate_remote_copy_bytes",
        "Bytes of segments copied, verified and finished.",
        _TOPIC,
        kafka="RemoteCopyBytesPerSec",
    )
    copy_requests = CounterSpec(
        "tidegate_remote_copy_requests", "Segments whose copy began.", _TOPIC, kafka="RemoteCopyRequestsPerSec"
    )
    copy_errors = CounterSpec(
        "tidegate_remote_copy_errors", "Copies that failed.", _TOPIC, kafka="RemoteCopyErrorsPerSec"
    )
    copy_lag_bytes = GaugeSpec(
        "tidegate_remote_copy_lag_bytes",
        "Bytes of the local log that are not remote yet, by an estimate.",
        _PARTITION,
        kafka="RemoteCopyLagBytes",
    )
    copy_lag_segments = GaugeSpec(
        "tidegate_remote_copy_lag_segments",
        "Segments that the records which are not remote yet would fill.",
        _PARTITION,
        kafka="RemoteCopyLagSegments",
    )
    oldest_uncopied_seconds = GaugeSpec(
        "tidegate_remote_oldest_uncopied_seconds",
        "The age of the oldest record below the last stable offset that is not remote: by its timestamp once it was "
        "read, else the time for which this process has known it. 0: all are remote.",
        _PARTITION,
    )
    copy_stalled_seconds = GaugeSpec(
        "tidegate_remote_copy_stalled_seconds",
        "How long a copy with work has made no progress; the log says why. 0: it is not stalled.",
        _PARTITION,
    )
    copy_throttle_time = SummarySpec(
        "tidegate_remote_copy_throttle_time_seconds",
        "How long copying waited for its quota, each time it did.",
        kafka="remote-copy-throttle-time",
    )
    spool_bytes = GaugeSpec("tidegate_spool_bytes", "Bytes of the segments in the spool, whose copies have not ended.")
    owned_partitions = GaugeSpec("tidegate_owned_partitions", "Partitions that this process copies.")
    paused = GaugeSpec(
        "tidegate_paused",
        "1: an operator paused this work on the topic.",
        ("topic", "work"),
        since="while work is paused",
    )
    refused_topics = GaugeSpec(
        "tidegate_refused_topics",
        "Topics that cannot be tiered, and that the settings name or that have remote records.",
    )
    trimmed_offsets = CounterSpec(
        "tidegate_local_trimmed_offsets", "Offsets removed from brokers by DeleteRecords.", _TOPIC
    )
    delete_requests = CounterSpec(
        "tidegate_remote_delete_requests", "Segments whose deletion began.", _TOPIC, kafka="RemoteDeleteRequestsPerSec"
    )
    delete_errors = CounterSpec(
        "tidegate_remote_delete_errors", "Deletions that failed.", _TOPIC, kafka="RemoteDeleteErrorsPerSec"
    )
    delete_lag_bytes = GaugeSpec(
        "tidegate_remote_delete_lag_bytes", "Bytes of segments being deleted.", _PARTITION, kafka="RemoteDeleteLagBytes"
    )
    delete_lag_segments = GaugeSpec(
        "tidegate_remote_delete_lag_segments", "Segments being deleted.", _PARTITION, kafka="RemoteDeleteLagSegments"
    )
    failed_deletions = GaugeSpec("tidegate_remote_failed_deletions", "Segments whose deletion failed and is retried.")
    log_size_bytes = GaugeSpec(
        "tidegate_remote_log_size_bytes",
        "Bytes of readable remote segments.",
        _PARTITION,
        since=_MEASURED,
        kafka="RemoteLogSizeBytes",
    )
    metadata_count = GaugeSpec(
        "tidegate_remote_log_metadata_count",
        "Remote segments with metadata.",
        _PARTITION,
        since=_MEASURED,
        kafka="RemoteLogMetadataCount",
    )
    log_gap_offsets = GaugeSpec(
        "tidegate_remote_log_gap_offsets",
        "Offsets in gaps: brokers removed these records before they were copied.",
        _PARTITION,
        since=_MEASURED,
    )
    recorded_cuts = GaugeSpec(
        "tidegate_remote_log_recorded_cuts",
        "CUTs on record: another leader's records replaced the copied ones from there on.",
        _PARTITION,
        since=_MEASURED,
    )
    bounds_violations = CounterSpec(
        "tidegate_bounds_violations", "Bounds between the tiers that did not hold, by bound.", ("topic", "bound")
    )
    stage_failures = CounterSpec(
        "tidegate_remote_log_stage_failures", "Failures of a stage of a partition's tasks.", ("topic", "stage")
    )

    def __init__(self, registry: CollectorRegistry) -> None:
        super().__init__(registry)
        self.alarms = RemoteLogAlarms(self.alarm_counter, self.alarm_gauge)
        self._of_partition = [made for spec, made in self.made.items() if spec.labels == _PARTITION]
        # A zero before the first look at the metadata would make what is old look new.
        early = [made for spec, made in self.made.items() if spec.since != _MEASURED]
        self._of_partition_early = [made for made in self._of_partition if made in early]
        self._of_topic_alone = [made for spec, made in self.made.items() if spec.labels == _TOPIC]
        # A pause is one of the topic, whoever owns its partitions.
        others = (*self._of_partition, self.paused)
        self._of_topic = [made for spec, made in self.made.items() if "topic" in spec.labels and made not in others]
        self._whole: set[str] = set()
        """The topics that have all series."""
        self._unowned_since_ms: dict[str, int | None] = {}
        """The topics with series, and since when this process has had no partition of them. None: it has one."""

    def add(self, partition: TopicIdPartition) -> None:
        """Makes the series of a partition that this process takes over, with zero.

        The gauges that tell of the metadata begin with their first value."""
        topic = partition.topic
        for metric in self._of_partition_early:
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
