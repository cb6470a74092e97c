"""Waits for the background work of the read path."""

from __future__ import annotations

import asyncio
from typing import Any

from tiers.reader.chunk_cache import DiskChunkCache
from tiers.reader.fetcher_pool import FetcherPool


async def wait_idle(worker: FetcherPool[Any] | DiskChunkCache) -> None:
    """Waits until the pool has no download, or the cache loads, writes and removes no file."""
    while worker._tasks:
        await asyncio.wait(worker._tasks)
