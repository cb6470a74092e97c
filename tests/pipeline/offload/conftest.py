"""The log that the tests of this folder offload."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import Workbench, workbench


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[Workbench]:
    """A log of thirty batches of ten records."""
    async with workbench(tmp_path) as bench:
        bench.log.append(*(batch_of(10 * number, 10) for number in range(30)))
        yield bench
