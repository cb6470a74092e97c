from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.segments import build_segment, metadata_of
from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError, RetriableRemoteStorageError
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.circuit_breaker import CircuitBreakers
from tiers.storage.instrumented import InstrumentedRemoteStorageManager, RemoteStorageMetrics, WriteCircuitMetrics
from tiers.storage.local import LocalRemoteStorageManager


class Numbers:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = RemoteStorageMetrics(self.registry)

    def of(self, name: str, operation: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(
            f"tidegate_remote_storage_{name}", {"store": "local", "operation": operation, **labels}
        )

    @property
    def in_flight(self) -> float | None:
        return self.registry.get_sample_value("tidegate_remote_storage_in_flight", {"store": "local"})


async def test_every_operation_is_counted_with_its_bytes(tmp_path: Path) -> None:
    (tmp_path / "store").mkdir()
    numbers = Numbers()
    inner = LocalRemoteStorageManager({"path": str(tmp_path / "store"), "cluster.id": "c"})
    storage = InstrumentedRemoteStorageManager(inner, "local", numbers.metrics)
    built = build_segment(tmp_path / "log", [batch_of(0, 5)])
    metadata = metadata_of(built)
    data = built.log_segment_data(metadata)

    await storage.open()
    await storage.check()
    assert await storage.copy_log_segment_data(metadata, data) is None
    assert len(await storage.fetch_log_segment(metadata, 0, 9)) == 10
    assert await storage.fetch_indexes(metadata) == data.indexes
    await storage.put_object("small", b"1234")
    assert await storage.get_object("small") == b"1234"
    assert len([stored async for stored in storage.list_objects("")]) == 3
    assert await storage.delete_log_segment_data(metadata)
    await storage.delete_object("small")
    with pytest.raises(RemoteResourceNotFoundError):
        await storage.fetch_indexes(metadata)
    await storage.close()

    expected_bytes = {
        "copy_log_segment_data": built.size_bytes + len(data.indexes),
        "fetch_log_segment": 10,
        "fetch_indexes": len(data.indexes),
        "put_object": 4,
        "get_object": 4,
    }
    for operation, count in expected_bytes.items():
        assert numbers.of("bytes_total", operation) == count
    for operation in (*expected_bytes, "open", "check", "list_objects", "delete_log_segment_data", "delete_object"):
        requests = 2 if operation == "fetch_indexes" else 1
        assert numbers.of("requests_total", operation) == requests
        assert numbers.of("seconds_count", operation) == requests
    assert numbers.of("errors_total", "fetch_indexes", kind="not_found") == 1
    assert numbers.in_flight == 0


class Failing(LocalRemoteStorageManager):
    def __init__(self, error: BaseException | None) -> None:
        super().__init__({"path": "/nonexistent", "cluster.id": "c"})
        self.error = error
        self.called = asyncio.Event()

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        self.called.set()
        if self.error is None:
            await asyncio.Event().wait()
        assert self.error is not None
        raise self.error


@pytest.mark.parametrize(
    ("error", "kind"),
    [(RetriableRemoteStorageError("slow"), "retriable"), (RemoteStorageError("no"), "refused")],
)
async def test_errors_pass_unchanged_and_are_counted_by_kind(
    tmp_path: Path, error: RemoteStorageError, kind: str
) -> None:
    numbers = Numbers()
    storage = InstrumentedRemoteStorageManager(Failing(error), "local", numbers.metrics)
    with pytest.raises(RemoteStorageError) as raised:
        await storage.fetch_indexes(metadata_of(build_segment(tmp_path / "log", [batch_of(0, 1)])))
    assert raised.value is error
    assert numbers.of("errors_total", "fetch_indexes", kind=kind) == 1


async def test_a_cancelled_call_is_no_error_of_the_store(tmp_path: Path) -> None:
    numbers = Numbers()
    inner = Failing(None)
    storage = InstrumentedRemoteStorageManager(inner, "local", numbers.metrics)
    metadata = metadata_of(build_segment(tmp_path / "log", [batch_of(0, 1)]))
    async with asyncio.TaskGroup() as group:
        task = group.create_task(storage.fetch_indexes(metadata))
        await inner.called.wait()
        assert numbers.in_flight == 1
        task.cancel()
    assert numbers.in_flight == 0
    assert numbers.of("seconds_count", "fetch_indexes") == 1
    for kind in ("retriable", "not_found", "refused"):
        assert numbers.of("errors_total", "fetch_indexes", kind=kind) == 0


def test_an_open_circuit_shows_with_its_location() -> None:
    registry, breakers = CollectorRegistry(), CircuitBreakers(lambda: 0)
    registry.register(WriteCircuitMetrics(breakers))
    breakers.of("")
    while not breakers.of("archive").is_open:
        with suppress(RetriableRemoteStorageError), breakers.of("archive"):
            raise RetriableRemoteStorageError("503")
    shown = {
        location: registry.get_sample_value("tidegate_remote_storage_write_circuit_open", {"location": location})
        for location in ("home", "archive")
    }
    assert shown == {"home": 0, "archive": 1}
