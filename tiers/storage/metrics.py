"""The metrics of the store: one call of the storage manager each, whatever its locations are.

A cancelled call counts in requests and seconds, but not in errors: its caller gave up, the store did not fail.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError
from tiers.metric_spec import CounterSpec, GaugeSpec, HistogramSpec
from tiers.storage.circuit_breaker import CircuitBreakers

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


OPERATIONS = (
    "open", "check", "copy_log_segment_data", "fetch_log_segment", "fetch_indexes", "delete_log_segment_data",
    "put_object", "get_object", "delete_object", "list_objects",
)  # fmt: skip
"""The values of the label `operation`: the methods of a storage manager."""
_LABELS = ("store", "operation")

REQUESTS = CounterSpec("tidegate_remote_storage_requests", "Calls of the store.", _LABELS)
ERRORS = CounterSpec(
    "tidegate_remote_storage_errors",
    "Calls of the store that failed. The kind is retriable, not_found or refused.",
    (*_LABELS, "kind"),
)
BYTES = CounterSpec("tidegate_remote_storage_bytes", "Bytes stored or read.", _LABELS)
SECONDS = HistogramSpec(
    "tidegate_remote_storage_seconds",
    "The duration of a call, also of a failed one.",
    _LABELS,
    buckets=_BUCKETS_S,
)
IN_FLIGHT = GaugeSpec("tidegate_remote_storage_in_flight", "Calls in progress.", ("store",))
WRITE_CIRCUIT_OPEN = GaugeSpec(
    "tidegate_remote_storage_write_circuit_open",
    "1: writes to the location fail at once, after failures in a row.",
    ("location",),
    since="with the first write to the location",
)


class RemoteStorageMetrics:
    """The metrics of a process's store, which the settings call `store`; made once per registry."""

    def __init__(self, registry: CollectorRegistry, store: str) -> None:
        self._store = store
        self._requests = REQUESTS.metric(registry)
        self._errors = ERRORS.metric(registry)
        self._bytes = BYTES.metric(registry)
        self._seconds = SECONDS.metric(registry)
        self._in_flight = IN_FLIGHT.metric(registry).labels(store)
        for operation in OPERATIONS:
            for metric in (self._requests, self._bytes, self._seconds):
                metric.labels(store, operation)
            for kind in ("retriable", "not_found", "refused"):
                self._errors.labels(store, operation, kind)

    @contextmanager
    def call(self, operation: str) -> Iterator[None]:
        """Measures one call. Its error passes unchanged."""
        labels = (self._store, operation)
        self._requests.labels(*labels).inc()
        self._in_flight.inc()
        started = time.perf_counter()
        try:
            yield
        except RemoteStorageError as error:
            is_missing = isinstance(error, RemoteResourceNotFoundError)
            kind = "not_found" if is_missing else "retriable" if error.retriable else "refused"
            self._errors.labels(*labels, kind).inc()
            raise
        finally:
            self._in_flight.dec()
            self._seconds.labels(*labels).observe(time.perf_counter() - started)

    def moved(self, operation: str, size_bytes: int) -> None:
        """Counts the bytes that a call stored or read."""
        self._bytes.labels(self._store, operation).inc(size_bytes)


class WriteCircuitMetrics(Collector):
    """The circuit breakers for writes, one per location that was written to."""

    def __init__(self, breakers: CircuitBreakers) -> None:
        self._breakers = breakers

    def collect(self) -> Iterator[Metric]:
        is_open = WRITE_CIRCUIT_OPEN.family()
        for location, breaker in self._breakers.all().items():
            is_open.add_metric((location,), int(breaker.is_open))
        yield is_open
