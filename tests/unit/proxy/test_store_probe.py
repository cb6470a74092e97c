"""The background probe of the store: evidence in metrics and log, and never a reason to end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from prometheus_client import CollectorRegistry

from proxy.process.checks.store_probe import INTERVAL_S, StoreProbe
from tests.support.simulation.loop import VirtualLoop
from tiers.errors import RetriableRemoteStorageError
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.remote_storage_manager import StoreFeatures


class Probed(LocalRemoteStorageManager):
    """A store that is down at first."""

    def __init__(self, root: Path) -> None:
        super().__init__({"path": str(root), "cluster.id": "cluster"})
        self.proves = True
        self.error: Exception | None = RetriableRemoteStorageError("503")
        self.probes = 0

    async def probe(self) -> Sequence[StoreFeatures]:
        self.probes += 1
        if self.error is not None:
            raise self.error
        return [StoreFeatures(self.proves, "a fake")]


class Evidence:
    def __init__(self, storage: Probed) -> None:
        self.registry = CollectorRegistry()
        self.probe = StoreProbe(storage, self.registry, lambda: 0)

    def of(self, name: str) -> float | None:
        return self.registry.get_sample_value(f"tidegate_remote_storage_{name}", {"location": "home"})


@pytest.mark.parametrize("error", [RetriableRemoteStorageError("503"), TypeError("of a third party")])
async def test_a_store_that_is_down_proves_nothing_and_is_asked_again(error: Exception, tmp_path: Path) -> None:
    storage = Probed(tmp_path)
    storage.error = error
    evidence = Evidence(storage)
    assert not await evidence.probe.probe()
    assert evidence.of("atomic_creation") is None
    storage.error = None
    assert await evidence.probe.probe()
    assert evidence.of("atomic_creation") == 1


async def test_a_server_that_changes_is_found_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    storage = Probed(tmp_path)
    storage.error = None
    evidence = Evidence(storage)
    await evidence.probe.probe()
    await evidence.probe.probe()
    assert [record.levelname for record in caplog.records] == ["INFO"]
    storage.proves = False
    await evidence.probe.probe()
    assert evidence.of("atomic_creation") == 0
    assert [record.levelname for record in caplog.records] == ["INFO", "WARNING"]
    assert "exports to it are refused" in caplog.text


def test_a_store_without_a_result_is_probed_ever_more_rarely(tmp_path: Path) -> None:
    storage, loop = Probed(tmp_path), VirtualLoop()

    async def probes_in_a_day() -> int:
        with suppress(TimeoutError):
            async with asyncio.timeout(24 * INTERVAL_S):
                await Evidence(storage).probe.run()
        return storage.probes

    try:
        assert loop.run_until_complete(probes_in_a_day()) < 24 + 10
    finally:
        loop.close()
