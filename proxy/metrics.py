"""The proxy's metrics. The hot path adds to plain integers and lists; a scrape builds Prometheus's objects from them.

The hot path and the scrapes run on the same event loop, so there are no locks.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Iterator
from platform import python_version
from typing import Final

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from protocol.api_keys import ApiKey
from proxy.version import installed_version
from tiers.metric_spec import CounterSpec, GaugeSpec, HistogramSpec

LATENCY_BUCKETS_S: Final = (
    0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0,
)  # fmt: skip

BUILD_INFO = GaugeSpec(
    "tidegate_build_info", "1, with the versions of Tidegate and Python as labels.", ("version", "python_version")
)
OPEN_CONNECTIONS = GaugeSpec("tidegate_open_connections", "Open connections of clients.")
CONNECTIONS = CounterSpec("tidegate_connections", "Connections of clients that were accepted.")
REJECTED = CounterSpec(
    "tidegate_connections_rejected", "Connections of clients that were refused, by the setting.", ("reason",)
)
CLOSED = CounterSpec("tidegate_connections_closed", "Connections of clients that were closed, by cause.", ("cause",))
UPSTREAM_CONNECTIONS = CounterSpec("tidegate_upstream_connections", "Connections to brokers that were opened.")
UPSTREAM_FAILURES = CounterSpec("tidegate_upstream_connect_failures", "Attempts to reach a broker that failed.")
BYTES_FROM_CLIENTS = CounterSpec("tidegate_bytes_from_clients", "Bytes read from clients.")
BYTES_FROM_BROKERS = CounterSpec("tidegate_bytes_from_brokers", "Bytes read from brokers.")
REQUESTS = CounterSpec("tidegate_requests", "Requests of clients, by API.", ("api",))
LATENCY = HistogramSpec(
    "tidegate_request_latency_seconds",
    "From the first byte of a request to the last byte of its answer, by API and by the tier that served it.",
    ("api", "tier"),
    since="for Fetch from the start; for another API with its first answer",
)

CLOSE_CAUSES: Final = (
    "broker", "client", "drained", "gave_way", "half_closed", "handler_error", "idle", "protocol_error", "proxy_header",
    "setup_timeout", "stalled", "stopped", "tls_handshake", "upstream_unreachable",
)  # fmt: skip
REJECT_REASONS: Final = (
    "limits.max.connections", "limits.max.total.connections.per.address",
    "limits.max.unauthenticated.connections.per.address", "listener.proxy.protocol.trusted.networks",
)  # fmt: skip

_API_NAMES: Final = {int(key): key.name.title().replace("_", "") for key in ApiKey}

_UNKNOWN: Final = "Unknown"


def api_name(api_key: int) -> str:
    """Returns Kafka's name of an API. All unknown keys share one name, so that clients cannot add time series."""
    return _API_NAMES.get(api_key, _UNKNOWN)


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


def register_build_info(registry: CollectorRegistry) -> None:
    BUILD_INFO.metric(registry).labels(installed_version(), python_version()).set(1)


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
        self.closed: Counter[str] = Counter()
        self.latency: defaultdict[tuple[str, str], LatencyHistogram] = defaultdict(LatencyHistogram)
        for tier in ("local", "remote"):
            self.latency[api_name(ApiKey.FETCH), tier] = LatencyHistogram()

    def observe(self, api_key: int, tier: str, seconds: float) -> None:
        """Adds a latency: from the first byte of a request until the last byte of its answer is given to the socket."""
        self.latency[api_name(api_key), tier].observe(seconds)

    def collect(self) -> Iterator[Metric]:
        yield OPEN_CONNECTIONS.family(self.open_connections)
        yield CONNECTIONS.family(self.accepted_connections)
        yield UPSTREAM_CONNECTIONS.family(self.upstream_connections)
        yield UPSTREAM_FAILURES.family(self.upstream_connect_failures)
        yield BYTES_FROM_CLIENTS.family(self.bytes_from_clients)
        yield BYTES_FROM_BROKERS.family(self.bytes_from_brokers)
        for spec, counts in (
            (REQUESTS, _by_name(self.requests)),
            (REJECTED, dict.fromkeys(REJECT_REASONS, 0) | self.rejected),
            (CLOSED, dict.fromkeys(CLOSE_CAUSES, 0) | self.closed),
        ):
            family = spec.family()
            for name, count in counts.items():
                family.add_metric([name], count)
            yield family
        latency = LATENCY.family()
        for (api, tier), histogram in self.latency.items():
            latency.add_metric([api, tier], histogram.buckets(), histogram.total_s)
        yield latency


def _by_name(counts: dict[int, int]) -> dict[str, int]:
    named = dict.fromkeys([*_API_NAMES.values(), _UNKNOWN], 0)
    for api_key, count in counts.items():
        named[api_name(api_key)] += count
    return named
