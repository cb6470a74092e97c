"""The metrics of the RLM tasks. The names follow Kafka's (KIP-405, KIP-963), in Prometheus spelling."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Summary

_PARTITION = ("topic", "partition")


class RemoteLogManagerMetrics:
    """One set of metrics per registry. A partition's gauges are removed when another process takes it over."""

    def __init__(self, registry: CollectorRegistry) -> None:
        def counter(name: str, text: str, labels: tuple[str, ...] = ("topic",)) -> Counter:
            return Counter(f"tidegate_{name}", text, labels, registry=registry)

        def gauge(name: str, text: str) -> Gauge:
            return Gauge(f"tidegate_{name}", text, _PARTITION, registry=registry)

        self.copy_bytes = counter("remote_copy_bytes", "Bytes of segments copied, verified and finished")
        self.copy_requests = counter("remote_copy_requests", "Segments whose copy began")
        self.copy_errors = counter("remote_copy_errors", "Copies that failed")
        self.delete_requests = counter("remote_delete_requests", "Segments whose deletion began")
        self.delete_errors = counter("remote_delete_errors", "Deletions that failed")
        self.failed_deletions = Gauge(
            "tidegate_remote_failed_deletions",
            "Segments whose deletion failed and is retried",
            registry=registry,
        )
        self.copy_throttle_time = Summary(
            "tidegate_remote_copy_throttle_time_seconds",
            "remote-copy-throttle-time of KIP-956: how long copying waited for its quota, each time it did",
            registry=registry,
        )
        self.trimmed_offsets = counter("local_trimmed_offsets", "Offsets removed from brokers by DeleteRecords")
        self.trims_held = counter(
            "local_trims_held_by_share_groups", "Trims that stopped at the start offset of a share group"
        )
        self.alarms = counter("remote_log_alarms", "Alarms about partitions and topics, by reason", ("topic", "reason"))
        self.stage_failures = counter(
            "remote_log_stage_failures", "Failures of a stage of a partition's tasks, by stage", ("topic", "stage")
        )
        self.clamps = counter("remote_log_clamps", "Ends of remote logs that another leader's records replaced")
        self.quarantined_bytes = gauge("remote_quarantined_bytes", "Bytes of the segments that were cut off as a whole")
        self.quarantined_segments = gauge("remote_quarantined_segments", "Segments that were cut off as a whole")
        self.bounds_violations = counter("bounds_violations", "Broken bounds, by bound", ("topic", "bound"))
        self.copy_lag_bytes = gauge("remote_copy_lag_bytes", "Estimated bytes below the LSO that are not remote yet")
        self.copy_lag_segments = gauge(
            "remote_copy_lag_segments", "Estimated segments below the LSO that are not remote yet"
        )
        self.copy_lag_seconds = gauge("remote_copy_lag_seconds", "How long a record below the LSO has not been remote")
        self.copy_stalled_seconds = gauge(
            "remote_copy_stalled_seconds", "How long a copy with work has made no progress; the log says why"
        )
        self.copy_stopped = gauge("remote_copy_stopped", "1: copying has stopped until a restart; the log says why")
        self.delete_lag_bytes = gauge("remote_delete_lag_bytes", "Bytes of segments being deleted")
        self.delete_lag_segments = gauge("remote_delete_lag_segments", "Segments being deleted")
        self.log_gaps = gauge("remote_log_gaps", "Gaps: runs of offsets that brokers removed before they were copied")
        self.log_gap_offsets = gauge("remote_log_gap_offsets", "Offsets in gaps")
        self.log_size_bytes = gauge("remote_log_size_bytes", "Bytes of readable remote segments")
        self.metadata_count = gauge("remote_log_metadata_count", "Remote segments with metadata")
        self.owned_partitions = Gauge("tidegate_owned_partitions", "Partitions this process copies", registry=registry)
        self.paused = Gauge(
            "tidegate_paused", "1: an operator paused this work on the topic", ["topic", "work"], registry=registry
        )
        self.refused_topics = Gauge("tidegate_refused_topics", "Topics that rules name but no tier", registry=registry)
        self.spool_bytes = Gauge("tidegate_spool_bytes", "Bytes of the segments being built", registry=registry)
        self._of_partition = [each for each in vars(self).values() if getattr(each, "_labelnames", ()) == _PARTITION]

    def forget(self, topic: str, partition: int) -> None:
        """Removes the gauges of a partition that this process does not own any more."""
        for metric in self._of_partition:
            metric.remove_by_labels({"topic": topic, "partition": str(partition)})
