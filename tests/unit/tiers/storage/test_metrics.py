from __future__ import annotations

import asyncio
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from tests.support.fakes.copies import segment_to_copy
from tests.support.fakes.faulty_storage import FaultyStorage
from tests.support.fakes.local_indexes import segment_object
from tiers.errors import RemoteResourceNotFoundError, RemoteStorageError, RetriableRemoteStorageError
from tiers.storage.circuit_breaker import CircuitBreakers
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.locations import LocatedRemoteStorageManager
from tiers.storage.metrics import RemoteStorageMetrics, WriteCircuitMetrics
from tiers.storage.remote_storage_manager import RemoteStorageManager

SEGMENT, _ = segment_object(0)


class Numbers:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.metrics = RemoteStorageMetrics(self.registry, "local")

    def measured(self, storage: RemoteStorageManager) -> LocatedRemoteStorageManager:
        return LocatedRemoteStorageManager(storage, metrics=self.metrics)

    def of(self, name: str, operation: str, **labels: str) -> float | None:
        return self.registry.get_sample_value(
            f"tidegate_remote_storage_{name}", {"store": "local", "operation": operation, **labels}
        )

    @property
    def in_flight(self) -> float | None:
        return self.registry.get_sample_value("tidegate_remote_storage_in_flight", {"store": "local"})


@pytest.fixture
def local(tmp_path: Path) -> LocalRemoteStorageManager:
    (tmp_path / "store").mkdir()
    return LocalRemoteStorageManager({"path": str(tmp_path / "store"), "cluster.id": "c"})


@pytest.fixture
def faulty(local: LocalRemoteStorageManager) -> FaultyStorage:
    return FaultyStorage(local)


async def test_every_operation_is_counted_with_its_bytes(local: LocalRemoteStorageManager, tmp_path: Path) -> None:
    numbers = Numbers()
    storage = numbers.measured(local)
    metadata, data = segment_to_copy(tmp_path)
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
        "copy_log_segment_data": metadata.segment_size_bytes + len(data.indexes),
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


@pytest.mark.parametrize(
    ("error", "kind"),
    [(RetriableRemoteStorageError("slow"), "retriable"), (RemoteStorageError("no"), "refused")],
)
async def test_errors_pass_unchanged_and_are_counted_by_kind(
    faulty: FaultyStorage, error: RemoteStorageError, kind: str
) -> None:
    numbers = Numbers()
    faulty.failures.append(error)
    with pytest.raises(RemoteStorageError) as raised:
        await numbers.measured(faulty).fetch_log_segment(SEGMENT, 0)
    assert raised.value is error
    assert numbers.of("errors_total", "fetch_log_segment", kind=kind) == 1


async def test_a_cancelled_call_is_no_error_of_the_store(faulty: FaultyStorage) -> None:
    numbers = Numbers()
    faulty.gate = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        task = group.create_task(numbers.measured(faulty).fetch_log_segment(SEGMENT, 0))
        await faulty.asked.wait()
        assert numbers.in_flight == 1
        task.cancel()
    assert (numbers.in_flight, numbers.of("seconds_count", "fetch_log_segment")) == (0, 1)
    for kind in ("retriable", "not_found", "refused"):
        assert numbers.of("errors_total", "fetch_log_segment", kind=kind) == 0


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
