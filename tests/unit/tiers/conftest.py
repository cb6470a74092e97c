from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import Workbench, workbench


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Workbench]:
    async with workbench(tmp_path) as made:
        yield made


@pytest.fixture
async def copied(bench: Workbench) -> Workbench:
    """Segments 0-29, 30-59 and 60-89 are remote and visible, and local too; 90-99 is only local."""
    bench.log.append(*[batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms) for n in range(10)])
    bench.wall_ms += 10  # the newest record is as old as its copy
    await bench.copy_all()
    await bench.check_facts()
    bench.now_ms += bench.services.settings.remote_log.visible_after_ms
    bench.steps.clear()
    return bench
