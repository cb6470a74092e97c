"""The Prometheus metrics of the metadata log. A scrape reads its status."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tiers.metadata.metadata_log import MetadataStatus
from tiers.metric_spec import CounterSpec, GaugeSpec

_PREFIX = "tidegate_remote_log_metadata"

ALARM = GaugeSpec(f"{_PREFIX}_alarm", "1: at least one metadata partition stands still, and an operator must act.")
FRESHNESS_AGE = GaugeSpec(
    f"{_PREFIX}_freshness_age_seconds",
    "Time since the metadata partition that is furthest behind was read to its end.",
    since="when every metadata partition was read to its end once",
)
OWNED = GaugeSpec(
    f"{_PREFIX}_owned",
    "1: this process may write the metadata partition. A metadata partition without a series has no owner.",
    ("metadata_partition",),
    since="while the process owns the metadata partition",
)
FOREIGN_RECORDS = CounterSpec(
    f"{_PREFIX}_foreign_records", "Records that were skipped because Tidegate did not write them."
)
CLOCK_SKEW = GaugeSpec(
    f"{_PREFIX}_clock_skew_seconds",
    "How far the brokers' clock is ahead of this machine's.",
    since="when this process has written a record",
)


class RemoteLogMetadataMetrics(Collector):
    def __init__(self, status: Callable[[], MetadataStatus]) -> None:
        self._status = status

    def collect(self) -> Iterator[Metric]:
        status = self._status()
        yield ALARM.family(float(status.alarm is not None))
        if status.freshness_age_ms is not None:
            yield FRESHNESS_AGE.family(status.freshness_age_ms / 1000)
        owned = OWNED.family()
        for number in sorted(status.owned_partitions):
            owned.add_metric([str(number)], 1.0)
        yield owned
        yield FOREIGN_RECORDS.family(status.foreign_records_read)
        if status.clock_skew_ms is not None:
            yield CLOCK_SKEW.family(status.clock_skew_ms / 1000)
