"""The proxy's metrics. The hot path adds to plain integers and lists; a scrape builds Prometheus's objects from them.

The hot path and the scrapes run on the same event loop, so there are no locks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from protocol.api_keys import ApiKey

LATENCY_BUCKETS_S: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip

_API_NAMES: Final = {int(key): key.name.title().replace("_", "") for key in ApiKey}


def api_name(api_key: int) -> str:
    """Returns Kafka's name of an API. All unknown keys share one name, so that clients cannot add time series."""
    return _API_NAMES.get(api_key, "Unknown")


class LatencyHistogram:
    __slots__ = ("counts", "total_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self.total_s = 0.0

    def observe(self, seconds: float) -> None:
        self.counts[bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
        self.total_s += seconds

    def buckets(self) -> list[tuple[str, float]]:
        """Returns the cumulative counts that Prometheus expects."""
        cumulative = 0
        out: list[tuple[str, float]] = []
        for bound, count in zip((*map(str, LATENCY_BUCKETS_S), "+Inf"), self.counts, strict=True):
            cumulative += count
            out.append((bound, cumulative))
        return out


class ProxyMetrics(Collector):
    def __init__(self) -> None:
        self.open_connections = 0
        self.accepted_connections = 0
        self.upstream_connections = 0
        self.upstream_connect_failures = 0
        self.bytes_from_clients = 0
        self.bytes_from_brokers = 0
        self.requests: defaultdict[int, int] = defaultdict(int)
        self.rejected: Counter[str] = Counter()
        self.closed: defaultdict[str, int] = defaultdict(int)
        self.latency: defaultdict[tuple[int, str], LatencyHistogram] = defaultdict(LatencyHistogram)

    def observe(self, api_key: int, tier: str, seconds: float) -> None:
        """Adds a latency: from the first byte of a request until the last byte of its answer is given to the socket."""
        self.latency[api_key, tier].observe(seconds)

    def collect(self) -> Iterator[Metric]:
        yield GaugeMetricFamily("tidegate_open_connections", "Open client connections.", value=self.open_connections)
        for name, text, value in (
            ("connections", "Client connections accepted.", self.accepted_connections),
            ("upstream_connections", "Connections to brokers.", self.upstream_connections),
            ("upstream_connect_failures", "Attempts to reach a broker that failed.", self.upstream_connect_failures),
            ("bytes_from_clients", "Bytes read from clients.", self.bytes_from_clients),
            ("bytes_from_brokers", "Bytes read from brokers.", self.bytes_from_brokers),
        ):
            yield CounterMetricFamily(f"tidegate_{name}", text, value=value)
        requests = CounterMetricFamily("tidegate_requests", "Requests by API.", labels=["api"])
        for name, count in _by_name(self.requests).items():
            requests.add_metric([name], count)
        yield requests
        rejected = CounterMetricFamily(
            "tidegate_connections_rejected", "Client connections refused, by the setting.", labels=["reason"]
        )
        for reason, count in self.rejected.items():
            rejected.add_metric([reason], count)
        yield rejected
        closed = CounterMetricFamily("tidegate_connections_closed", "Connections closed, by cause.", labels=["cause"])
        for cause, count in self.closed.items():
            closed.add_metric([cause], count)
        yield closed
        latency = HistogramMetricFamily(
            "tidegate_request_latency_seconds",
            "From the first byte of a request to the last byte of its answer, by API and by the tier that served it.",
            labels=["api", "tier"],
        )
        for (api_key, tier), histogram in self.latency.items():
            latency.add_metric([api_name(api_key), tier], histogram.buckets(), histogram.total_s)
        yield latency


def _by_name(counts: dict[int, int]) -> dict[str, int]:
    named: defaultdict[str, int] = defaultdict(int)
    for api_key, count in counts.items():
        named[api_name(api_key)] += count
    return named
