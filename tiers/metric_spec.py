"""`MetricSpec` declares a metric: its name, type, labels and meaning. Metrics are made from specs alone.

`proxy/commands/metrics_reference.py` registers all specs, and generates docs/metrics.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import ClassVar, Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)

FROM_THE_START: Final = "from the start"


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """`name` has no `_total`. `kafka` is Kafka's own name of the same number, if it has one.

    `since` says when the series appear. A series with a topic appears when the process takes the topic over."""

    kind: ClassVar[str]

    name: str
    meaning: str
    labels: tuple[str, ...] = ()
    _: KW_ONLY
    kafka: str = ""
    since: str = FROM_THE_START

    @property
    def exposed_name(self) -> str:
        """The name of the series, without the suffixes of a histogram or a summary."""
        return self.name

    @property
    def unit(self) -> str:
        words = self.name.split("_")
        return next((unit for unit in ("bytes", "seconds", "offsets", "segments") if unit in words), "")


@dataclass(frozen=True, slots=True)
class CounterSpec(MetricSpec):
    kind = "counter"

    @property
    def exposed_name(self) -> str:
        return f"{self.name}_total"

    def metric(self, registry: CollectorRegistry) -> Counter:
        return Counter(self.name, self.meaning, self.labels, registry=registry)

    def family(self, value: float | None = None) -> CounterMetricFamily:
        """Returns a family for a collector. Without `value`, the caller adds one sample per set of label values."""
        return CounterMetricFamily(self.name, self.meaning, value=value, labels=self.labels or None)


@dataclass(frozen=True, slots=True)
class GaugeSpec(MetricSpec):
    kind = "gauge"

    def metric(self, registry: CollectorRegistry) -> Gauge:
        return Gauge(self.name, self.meaning, self.labels, registry=registry)

    def family(self, value: float | None = None) -> GaugeMetricFamily:
        """Returns a family for a collector. Without `value`, the caller adds one sample per set of label values."""
        return GaugeMetricFamily(self.name, self.meaning, value=value, labels=self.labels or None)


@dataclass(frozen=True, slots=True)
class HistogramSpec(MetricSpec):
    kind = "histogram"

    def metric(self, registry: CollectorRegistry, buckets: Sequence[float]) -> Histogram:
        return Histogram(self.name, self.meaning, self.labels, registry=registry, buckets=buckets)

    def family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self.name, self.meaning, labels=self.labels)


@dataclass(frozen=True, slots=True)
class SummarySpec(MetricSpec):
    kind = "summary"

    def metric(self, registry: CollectorRegistry) -> Summary:
        return Summary(self.name, self.meaning, self.labels, registry=registry)

    def family(self) -> SummaryMetricFamily:
        return SummaryMetricFamily(self.name, self.meaning, labels=self.labels)
