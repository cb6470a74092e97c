"""The metadata manager for Prometheus.

tidegate_remote_log_metadata_alarm                   ALARM on 1: nothing is copied, trimmed or expired
tidegate_remote_log_metadata_freshness_age_seconds   since the metadata partition that is behind most was read to its
                                                     end; absent while one never was
tidegate_remote_log_metadata_owned_partitions        metadata partitions that this process may write
tidegate_remote_log_metadata_owned                   1 for each of them: nobody's in all processes for long is trouble
tidegate_remote_log_metadata_events_read_total       committed records since the start
tidegate_remote_log_metadata_foreign_records_total   left out, for no Tidegate wrote them: who may write to the topic?
tidegate_remote_log_metadata_clock_skew_seconds      the brokers' clock ahead of ours; absent until a record was written
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiers.metadata.topic_based import TopicBasedRemoteLogMetadataManager


class RemoteLogMetadataMetrics(Collector):
    def __init__(self, manager: TopicBasedRemoteLogMetadataManager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        status, name = self._manager.status(), "tidegate_remote_log_metadata"
        yield GaugeMetricFamily(f"{name}_alarm", "1: an operator must act.", value=float(status.alarm is not None))
        if status.freshness_age_ms is not None:
            yield GaugeMetricFamily(
                f"{name}_freshness_age_seconds", "Since all was read to its end.", value=status.freshness_age_ms / 1000
            )
        yield GaugeMetricFamily(f"{name}_owned_partitions", "This process may write.", value=status.owned_partitions)
        owned = GaugeMetricFamily(f"{name}_owned", "1: this process may write.", labels=["metadata_partition"])
        for number in sorted(self._manager.owned_metadata_partitions()):
            owned.add_metric([str(number)], 1.0)
        yield owned
        yield CounterMetricFamily(f"{name}_events_read", "Committed records that were read.", value=status.events_read)
        foreign = status.foreign_records_read
        yield CounterMetricFamily(f"{name}_foreign_records", "Records that are left out.", value=foreign)
        if status.clock_skew_ms is not None:
            yield GaugeMetricFamily(
                f"{name}_clock_skew_seconds", "The brokers' clock ahead of ours.", value=status.clock_skew_ms / 1000
            )
