from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.proxy.command_bench import CommandBench, command_bench


@pytest.fixture
async def bench(tmp_path: Path) -> AsyncIterator[CommandBench]:
    async with command_bench(tmp_path) as made:
        yield made
