from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.tiers.manifests import CountingStorage, Manifests, copied
from tests.support.tiers.workbench import Workbench, workbench


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Workbench]:
    async with workbench(tmp_path) as made:
        yield made


@pytest.fixture
async def manifests(tmp_path: Path) -> AsyncIterator[Manifests]:
    async with workbench(tmp_path) as bench:
        storage = CountingStorage(tmp_path / "remote")
        await storage.open()
        yield Manifests(bench, storage)
        await storage.close()


@pytest.fixture
async def trimmable(manifests: Manifests) -> Manifests:
    """Segments 0-29, 30-59 and 60-89 are visible."""
    await copied(manifests.bench)
    manifests.bench.now_ms += 60_000
    return manifests
