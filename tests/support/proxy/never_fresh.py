"""Metadata that is never fresh, for a handler that asks for many partitions."""

from __future__ import annotations

import asyncio

from tiers.errors import NotKnownNow
from tiers.model.ids import TopicIdPartition


class NeverFresh:
    """Stands in for `TwoTierLog.ensure_fresh`. `looks` is the number of calls."""

    def __init__(self) -> None:
        self.looks = 0

    async def __call__(self, partition: TopicIdPartition, timeout_ms: int) -> None:
        self.looks += 1
        await asyncio.sleep(0.002)
        raise NotKnownNow("not fresh")
