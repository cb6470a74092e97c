"""`InstrumentedRemoteStorageManager` measures any storage manager, including those of third parties.

A cancelled call counts in requests and seconds, but not in errors: its caller gave up, the store did not fail.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import contextmanager
from typing import Any, Concatenate, ParamSpec, TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError
from tiers.metric_spec import CounterSpec, GaugeSpec, HistogramSpec
from tiers.storage.circuit_breaker import CircuitBreakers
from tiers.storage.remote_storage_manager import Allocate, ReadsIntoMemory, RemoteStorageManager, StoredObject

P = ParamSpec("P")
T = TypeVar("T")

_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)


OPERATIONS = (
    "open", "check", "copy_log_segment_data", "fetch_log_segment", "fetch_indexes", "delete_log_segment_data", "probe",
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
    """The metrics of all stores of a process; made once per registry."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.requests = REQUESTS.metric(registry)
        self.errors = ERRORS.metric(registry)
        self.bytes = BYTES.metric(registry)
        self.seconds = SECONDS.metric(registry)
        self.in_flight = IN_FLIGHT.metric(registry)

    def add(self, store: str) -> None:
        """Makes the series of a store, with zero."""
        self.in_flight.labels(store)
        for operation in OPERATIONS:
            for metric in (self.requests, self.bytes, self.seconds):
                metric.labels(store, operation)
            for kind in ("retriable", "not_found", "refused"):
                self.errors.labels(store, operation, kind)


class WriteCircuitMetrics(Collector):
    """The circuit breakers for writes, one per location that was written to."""

    def __init__(self, breakers: CircuitBreakers) -> None:
        self._breakers = breakers

    def collect(self) -> Iterator[Metric]:
        is_open = WRITE_CIRCUIT_OPEN.family()
        for location, breaker in self._breakers.all().items():
            is_open.add_metric((location,), int(breaker.is_open))
        yield is_open


def _measured(
    method: Callable[Concatenate[RemoteStorageManager, P], Coroutine[Any, Any, T]],
    bytes_of: Callable[Concatenate[T, P], int] | None = None,
) -> Callable[Concatenate[InstrumentedRemoteStorageManager, P], Coroutine[Any, Any, T]]:
    """Returns the method with metrics. `bytes_of` takes its result and its arguments."""
    operation = method.__name__

    async def call(self: InstrumentedRemoteStorageManager, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with self.measured(operation):
            result: T = await getattr(self.inner, operation)(*args, **kwargs)
        if bytes_of is not None:
            self.metrics.bytes.labels(self.store, operation).inc(bytes_of(result, *args, **kwargs))
        return result

    return call


class InstrumentedRemoteStorageManager:
    """Adds metrics; results and errors of `inner` pass unchanged. `store` is the store's name in the settings."""

    def __init__(
        self,
        inner: RemoteStorageManager,
        store: str,
        metrics: RemoteStorageMetrics,
        write_breakers: CircuitBreakers | None = None,
    ) -> None:
        self.inner = inner
        self.store = store
        self.metrics = metrics
        self._write_breakers = write_breakers
        metrics.add(store)

    @property
    def open_circuits(self) -> list[str]:
        """The locations to which writes fail at once."""
        return [] if self._write_breakers is None else self._write_breakers.open_locations

    def use_memory(self, allocate: Allocate) -> None:
        if isinstance(self.inner, ReadsIntoMemory):
            self.inner.use_memory(allocate)

    open = _measured(RemoteStorageManager.open)
    check = _measured(RemoteStorageManager.check)
    copy_log_segment_data = _measured(
        RemoteStorageManager.copy_log_segment_data,
        lambda _, metadata, data: metadata.segment_size_bytes + len(data.indexes),
    )
    fetch_log_segment = _measured(RemoteStorageManager.fetch_log_segment, lambda view, *_: len(view))
    fetch_indexes = _measured(RemoteStorageManager.fetch_indexes, lambda indexes, *_: len(indexes))
    delete_log_segment_data = _measured(RemoteStorageManager.delete_log_segment_data)
    probe = _measured(RemoteStorageManager.probe)
    put_object = _measured(RemoteStorageManager.put_object, lambda _, key, data: len(data))
    get_object = _measured(RemoteStorageManager.get_object, lambda data, *_: len(data))
    delete_object = _measured(RemoteStorageManager.delete_object)

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        with self.measured("list_objects"):
            async for stored in self.inner.list_objects(prefix):
                yield stored

    async def close(self) -> None:
        await self.inner.close()

    @contextmanager
    def measured(self, operation: str) -> Iterator[None]:
        labels = (self.store, operation)
        self.metrics.requests.labels(*labels).inc()
        in_flight = self.metrics.in_flight.labels(self.store)
        in_flight.inc()
        started = time.perf_counter()
        try:
            yield
        except RemoteStorageError as error:
            is_missing = isinstance(error, RemoteResourceNotFoundError)
            kind = "not_found" if is_missing else "retriable" if error.retriable else "refused"
            self.metrics.errors.labels(*labels, kind).inc()
            raise
        finally:
            in_flight.dec()
            self.metrics.seconds.labels(*labels).observe(time.perf_counter() - started)
