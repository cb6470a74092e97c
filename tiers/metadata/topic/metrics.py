"""Exports the metadata manager's status to Prometheus.

tidegate_remote_log_metadata_alarm                   ALARM on 1: at least one metadata partition stands still
tidegate_remote_log_metadata_freshness_age_seconds   time since the metadata partition that is furthest behind was read
                                                     to its end; absent until every partition was read to its end once
tidegate_remote_log_metadata_owned_partitions        metadata partitions that this process may write
tidegate_remote_log_metadata_owned                   1 for each of them; a partition without an owner in any process
                                                     for long is an error
tidegate_remote_log_metadata_events_read_total       committed records read since the start
tidegate_remote_log_metadata_foreign_records_total   records skipped because Tidegate did not write them: check who may
                                                     write to the topic
tidegate_remote_log_metadata_clock_skew_seconds      how far the brokers' clock is ahead of this machine's; absent until
                                                     a record was written
"""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from tiers.metadata.remote_log_metadata_manager import RemoteLogMetadataManager


class RemoteLogMetadataMetrics(Collector):
    def __init__(self, manager: RemoteLogMetadataManager) -> None:
        self._manager = manager

    def collect(self) -> Iterator[Metric]:
        status, name = self._manager.status(), "tidegate_remote_log_metadata"
        yield GaugeMetricFamily(f"{name}_alarm", "1: an operator must act.", value=float(status.alarm is not None))
        if status.freshness_age_ms is not None:
            yield GaugeMetricFamily(
                f"{name}_freshness_age_seconds",
                "Age of the last read to the end of the metadata partition that is furthest behind.",
                value=status.freshness_age_ms / 1000,
            )
        yield GaugeMetricFamily(
            f"{name}_owned_partitions",
            "Metadata partitions that this process may write.",
            value=len(status.owned_partitions),
        )
        owned = GaugeMetricFamily(
            f"{name}_owned", "1: this process may write the metadata partition.", labels=["metadata_partition"]
        )
        for number in sorted(status.owned_partitions):
            owned.add_metric([str(number)], 1.0)
        yield owned
        yield CounterMetricFamily(f"{name}_events_read", "Committed records that were read.", value=status.events_read)
        foreign = status.foreign_records_read
        yield CounterMetricFamily(
            f"{name}_foreign_records", "Records skipped because Tidegate did not write them.", value=foreign
        )
        if status.clock_skew_ms is not None:
            yield GaugeMetricFamily(
                f"{name}_clock_skew_seconds",
                "How far the brokers' clock is ahead of this machine's.",
                value=status.clock_skew_ms / 1000,
            )
