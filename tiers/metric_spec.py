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
Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, SummaryMetricFamily)


@dataclass(frozen=True, slots=True)
class MetricSpec(Generic[Metric, Family]):
    """`name` has no `_total`. `kafka` is Kafka's own name of the same number, if it has one.

    `since` says when the series appear. A series with a topic appears when the process takes the topic over."""

    kind: ClassVar[str]
    metric_class: ClassVar[Any]
    family_class: ClassVar[Any]

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
        made: Metric = self.metric_class(self.name, self.meaning, self.labels, registry=registry)
        return made

    def family(self, value: float | None = None) -> Family:
        """Returns a family for a collector. Without `value`, the caller adds one sample per set of label values.

        Only a counter or a gauge takes a `value`."""
        values = {} if value is None else {"value": value}
        made: Family = self.family_class(self.name, self.meaning, labels=self.labels or None, **values)
        return made

    @property
    def exposed_name(self) -> str:
        """The name of the series, without the suffixes of a histogram or a summary."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    @property
    def unit(self) -> str:
        words = self.name.split("_")
        return next((unit for unit in ("bytes", "seconds", "offsets", "segments") if unit in words), "")


@dataclass(frozen=True, slots=True)
class CounterSpec(MetricSpec[Counter, CounterMetricFamily]):
    kind, metric_class, family_class = "counter", Counter, CounterMetricFamily


@dataclass(frozen=True, slots=True)
class GaugeSpec(MetricSpec[Gauge, GaugeMetricFamily]):
    kind, metric_class, family_class = "gauge", Gauge, GaugeMetricFamily


@dataclass(frozen=True, slots=True)
class HistogramSpec(MetricSpec[Histogram, HistogramMetricFamily]):
    kind, metric_class, family_class = "histogram", Histogram, HistogramMetricFamily

    buckets: tuple[float, ...] = Histogram.DEFAULT_BUCKETS

    def metric(self, registry: CollectorRegistry) -> Histogram:
        return Histogram(self.name, self.meaning, self.labels, registry=registry, buckets=self.buckets)


@dataclass(frozen=True, slots=True)
class SummarySpec(MetricSpec[Summary, SummaryMetricFamily]):
    kind, metric_class, family_class = "summary", Summary, SummaryMetricFamily


class MetricSet:
    """Metrics that a class declares by specs, made once per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.made: dict[MetricSpec[Any, Any], Any] = {}
        for name, spec in vars(type(self)).items():
            if isinstance(spec, MetricSpec):
                self.made[spec] = self.__dict__[name] = spec.metric(registry)


def specs_of(holder: object) -> list[MetricSpec[Any, Any]]:
    """Returns the metrics that a module and its sets declare, or those of one set, in their order."""
    found: list[MetricSpec[Any, Any]] = []
    for value in vars(holder).values():
        if isinstance(value, MetricSpec):
            found.append(value)
        elif isinstance(value, type) and issubclass(value, MetricSet) and value is not MetricSet:
            found += specs_of(value)
    return found
