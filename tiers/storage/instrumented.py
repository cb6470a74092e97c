"""`InstrumentedRemoteStorageManager` measures any storage manager, including those of third parties.

A cancelled call counts in requests and seconds, but not in errors: its caller gave up, the store did not fail.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric
from prometheus_client.registry import Collector

from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError
from tiers.metric_spec import CounterSpec, GaugeSpec, HistogramSpec
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.circuit_breaker import CircuitBreakers
from tiers.storage.remote_storage_manager import (
    Allocate,
    LogSegmentData,
    ReadsIntoMemory,
    RemoteStorageManager,
    StoredObject,
    StoreFeatures,
)

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
SECONDS = HistogramSpec("tidegate_remote_storage_seconds", "The duration of a call, also of a failed one.", _LABELS)
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
        self.seconds = SECONDS.metric(registry, _BUCKETS_S)
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
            is_open.add_metric((location or "home",), int(breaker.is_open))
        yield is_open


class InstrumentedRemoteStorageManager:
    """Adds metrics; results and errors of `inner` pass unchanged. `store` is the store's name in the settings."""

    def __init__(
        self,
        inner: RemoteStorageManager,
        store: str,
        metrics: RemoteStorageMetrics,
        write_breakers: CircuitBreakers | None = None,
    ) -> None:
        self._inner = inner
        self._write_breakers = write_breakers
        self._store = store
        self._metrics = metrics
        metrics.add(store)

    @property
    def open_circuits(self) -> list[str]:
        """The locations to which writes fail at once."""
        locations = [] if self._write_breakers is None else self._write_breakers.open_locations
        return [location or "home" for location in locations]

    async def open(self) -> None:
        with self._measured("open"):
            await self._inner.open()

    def use_memory(self, allocate: Allocate) -> None:
        if isinstance(self._inner, ReadsIntoMemory):
            self._inner.use_memory(allocate)

    async def check(self) -> None:
        with self._measured("check"):
            await self._inner.check()

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> bytes | None:
        with self._measured("copy_log_segment_data"):
            custom_metadata = await self._inner.copy_log_segment_data(metadata, data)
        self._count_bytes("copy_log_segment_data", metadata.segment_size_bytes + len(data.indexes))
        return custom_metadata

    async def fetch_log_segment(
        self, metadata: RemoteLogSegmentMetadata, start_position: int, end_position: int | None = None
    ) -> memoryview:
        with self._measured("fetch_log_segment"):
            view = await self._inner.fetch_log_segment(metadata, start_position, end_position)
        self._count_bytes("fetch_log_segment", len(view))
        return view

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        with self._measured("fetch_indexes"):
            data = await self._inner.fetch_indexes(metadata)
        self._count_bytes("fetch_indexes", len(data))
        return data

    async def delete_log_segment_data(self, metadata: RemoteLogSegmentMetadata) -> bool:
        with self._measured("delete_log_segment_data"):
            return await self._inner.delete_log_segment_data(metadata)

    async def probe(self) -> Sequence[StoreFeatures]:
        with self._measured("probe"):
            return await self._inner.probe()

    async def put_object(self, key: str, data: bytes) -> None:
        with self._measured("put_object"):
            await self._inner.put_object(key, data)
        self._count_bytes("put_object", len(data))

    async def get_object(self, key: str) -> bytes:
        with self._measured("get_object"):
            data = await self._inner.get_object(key)
        self._count_bytes("get_object", len(data))
        return data

    async def delete_object(self, key: str) -> None:
        with self._measured("delete_object"):
            await self._inner.delete_object(key)

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        with self._measured("list_objects"):
            async for stored in self._inner.list_objects(prefix):
                yield stored

    async def close(self) -> None:
        await self._inner.close()

    @contextmanager
    def _measured(self, operation: str) -> Iterator[None]:
        labels = (self._store, operation)
        self._metrics.requests.labels(*labels).inc()
        in_flight = self._metrics.in_flight.labels(self._store)
        in_flight.inc()
        started = time.perf_counter()
        try:
            yield
        except RemoteStorageError as error:
            self._metrics.errors.labels(*labels, _kind_of(error)).inc()
            raise
        finally:
            in_flight.dec()
            self._metrics.seconds.labels(*labels).observe(time.perf_counter() - started)

    def _count_bytes(self, operation: str, count: int) -> None:
        self._metrics.bytes.labels(self._store, operation).inc(count)


def _kind_of(error: RemoteStorageError) -> str:
    if isinstance(error, RemoteResourceNotFoundError):
        return "not_found"
    return "retriable" if error.retriable else "refused"
