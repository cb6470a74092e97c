"""`MetricSpec` declares a metric: its name, type, labels and meaning. Metrics are made from specs alone.

`proxy/commands/metrics_reference.py` registers all specs, and generates the tables of docs/metrics.md.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar, Final, Generic, Self, TypeVar, overload

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Summary
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    SummaryMetricFamily,
)

FROM_THE_START: Final = "from the start"
Metric = TypeVar("Metric", Counter, Gauge, Histogram, Summary)


@dataclass(frozen=True, slots=True)
class MetricSpec(Generic[Metric]):
    """`name` has no `_total`. `kafka` is Kafka's own name of the same number, if it has one.

    `since` says when the series appear. A series with a topic appears when the process takes the topic over."""

    kind: ClassVar[str]

    name: str
    meaning: str
    labels: tuple[str, ...] = ()
    _: KW_ONLY
    kafka: str = ""
    since: str = FROM_THE_START

    @overload
    def __get__(self, holder: None, kind: type) -> Self: ...

    @overload
    def __get__(self, holder: MetricSet, kind: type) -> Metric: ...

    def __get__(self, holder: MetricSet | None, kind: type) -> Self | Metric:
        """For type checkers: the attribute of a set is its metric, and that of the class is the spec."""
        return self

    def metric(self, registry: CollectorRegistry) -> Metric:
        raise NotImplementedError

    @property
    def exposed_name(self) -> str:
        """The name of the series, without the suffixes of a histogram or a summary."""
        return self.name

    @property
    def unit(self) -> str:
        words = self.name.split("_")
        return next((unit for unit in ("bytes", "seconds", "offsets", "segments") if unit in words), "")


@dataclass(frozen=True, slots=True)
class CounterSpec(MetricSpec[Counter]):
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
class GaugeSpec(MetricSpec[Gauge]):
    kind = "gauge"

    def metric(self, registry: CollectorRegistry) -> Gauge:
        return Gauge(self.name, self.meaning, self.labels, registry=registry)

    def family(self, value: float | None = None) -> GaugeMetricFamily:
        """Returns a family for a collector. Without `value`, the caller adds one sample per set of label values."""
        return GaugeMetricFamily(self.name, self.meaning, value=value, labels=self.labels or None)


@dataclass(frozen=True, slots=True)
class HistogramSpec(MetricSpec[Histogram]):
    kind = "histogram"

    buckets: tuple[float, ...] = Histogram.DEFAULT_BUCKETS

    def metric(self, registry: CollectorRegistry) -> Histogram:
        return Histogram(self.name, self.meaning, self.labels, registry=registry, buckets=self.buckets)

    def family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(self.name, self.meaning, labels=self.labels)


@dataclass(frozen=True, slots=True)
class SummarySpec(MetricSpec[Summary]):
    kind = "summary"

    def metric(self, registry: CollectorRegistry) -> Summary:
        return Summary(self.name, self.meaning, self.labels, registry=registry)

    def family(self) -> SummaryMetricFamily:
        return SummaryMetricFamily(self.name, self.meaning, labels=self.labels)


class MetricSet:
    """Metrics that a class declares by specs, made once per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.made: dict[MetricSpec[Any], Any] = {}
        for name, spec in vars(type(self)).items():
            if isinstance(spec, MetricSpec):
                self.made[spec] = self.__dict__[name] = spec.metric(registry)


def specs_of(holder: object) -> list[MetricSpec[Any]]:
    """Returns the metrics that a module and its sets declare, or those of one set, in their order."""
    found: list[MetricSpec[Any]] = []
    for value in vars(holder).values():
        if isinstance(value, MetricSpec):
            found.append(value)
        elif isinstance(value, type) and issubclass(value, MetricSet) and value is not MetricSet:
            found += specs_of(value)
    return found
