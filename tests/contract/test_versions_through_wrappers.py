"""The versions of small objects, through every storage manager that wraps another one, and in the simulated store."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from tests.support.fakes.faulty_storage import FaultyStorage
from tests.support.fakes.lying_store import LyingStore
from tests.support.fakes.versioned_storage import VersionedStorage
from tests.support.simulation.loop import VirtualLoop, current_process
from tests.support.simulation.store import SimStorage, SimStore
from tiers.errors import ObjectChangedError
from tiers.storage.instrumented import InstrumentedRemoteStorageManager, RemoteStorageMetrics
from tiers.storage.local import LocalRemoteStorageManager
from tiers.storage.locations import LocatedRemoteStorageManager, StorageLocation
from tiers.storage.remote_storage_manager import ABSENT, RemoteStorageManager, VersionedObject


async def has_versions(storage: RemoteStorageManager) -> None:
    features = await storage.probe()
    assert features[0].has_conditional_writes
    absent = await storage.get_versioned("manifest")
    assert absent == VersionedObject(None, ABSENT)
    first = await storage.put_object("manifest", b"first", ABSENT)
    assert await storage.get_versioned("manifest") == VersionedObject(b"first", first)
    second = await storage.put_object("manifest", b"second", first)
    for old in (ABSENT, first):
        with pytest.raises(ObjectChangedError):
            await storage.put_object("manifest", b"third", old)
    assert await storage.get_versioned("manifest") == VersionedObject(b"second", second)


def located(home: VersionedStorage) -> RemoteStorageManager:
    return LocatedRemoteStorageManager(home, [StorageLocation("other", home)])


def instrumented(inner: VersionedStorage) -> RemoteStorageManager:
    return InstrumentedRemoteStorageManager(inner, "local", RemoteStorageMetrics(CollectorRegistry()))


def bare(storage: VersionedStorage) -> RemoteStorageManager:
    return storage


@pytest.mark.parametrize("wrap", [bare, located, instrumented, FaultyStorage, LyingStore])
async def test_a_wrapper_passes_versions_on(
    wrap: Callable[[VersionedStorage], RemoteStorageManager], tmp_path: Path
) -> None:
    storage = wrap(VersionedStorage(tmp_path))
    await storage.open()
    await has_versions(storage)
    await storage.close()


async def test_a_store_gives_no_version_before_it_proved_them(tmp_path: Path) -> None:
    storage = VersionedStorage(tmp_path)
    await storage.open()
    assert await storage.put_object("manifest", b"first") is None
    assert await storage.get_versioned("manifest") == VersionedObject(b"first", None)
    await storage.close()


async def test_a_location_tells_what_it_proved_by_its_name(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    other = LocalRemoteStorageManager({"path": str(tmp_path / "other"), "cluster.id": "cluster"})
    storage = LocatedRemoteStorageManager(VersionedStorage(tmp_path), [StorageLocation("other", other)])
    await storage.open()
    found = {each.location: each.has_conditional_writes for each in await storage.probe()}
    assert found == {"": True, "other": False}
    await storage.close()


def test_the_simulated_store_has_versions() -> None:
    loop = VirtualLoop()
    process = SimpleNamespace(store=SimStore(loop, random.Random(1)), name="proxy", is_dead=False, is_paused=False)

    async def run() -> None:
        current_process.set(process)
        await has_versions(SimStorage({"cluster.id": "cluster"}))

    try:
        loop.run_until_complete(asyncio.wait_for(run(), 60))
    finally:
        loop.close()
