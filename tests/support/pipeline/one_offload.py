"""One partition's offload, wave by wave: what the driver announces, executors copy, and the driver commits."""

from __future__ import annotations

from pipeline.config import parse_pipeline_config
from pipeline.offload.commit import OffloadCommitter, PartitionOffload
from pipeline.offload.task import OffloadResult, OffloadTask, TileCopier
from tests.support.tiers.workbench import PARTITION, POLICY, Workbench
from tiers.model.copy_plan import CopyPlan
from tiers.segment.segment_encryption import KeyRing
from tiers.tasks.copy.segment_copy import SegmentContinuation

CONFIG = parse_pipeline_config('[upstream]\nbootstrap.servers = "localhost:9092"\n')


class Offload:
    def __init__(self, bench: Workbench) -> None:
        self.bench = bench
        self.committer = OffloadCommitter(bench.services, owned_again_ms=1, sleep=self._pause)
        self.one: PartitionOffload = self.committer.of(PARTITION, POLICY)
        self.plan: CopyPlan | None = None

    async def _pause(self, seconds: float) -> None:
        self.bench.now_ms += int(seconds * 1000)

    async def announced(self, *ends: int) -> SegmentContinuation:
        continuation = await self.committer.prepare(self.one)
        self.plan = await self.committer.announce(self.one, [self.one.next_offset, *ends], 0)
        return continuation

    async def copied(self, *ends: int, attempts: int = 1) -> OffloadResult:
        """Copies by an executor whose results do not count yet: the last of that many complete attempts."""
        return await self.stored(await self.announced(*ends), attempts)

    async def stored(self, continuation: SegmentContinuation, attempts: int = 1) -> OffloadResult:
        services = self.bench.services
        assert self.plan is not None
        task = OffloadTask(CONFIG, "cluster", PARTITION, self.plan, continuation, 1 << 20)
        result = OffloadResult()
        for attempt in range(attempts):
            copier = TileCopier(task, self.bench.log, self.bench.store, services.spool, KeyRing())
            copied = [await copier.copy(number, tile) for number, tile in enumerate(task.tiles(attempt))]
            result = OffloadResult(tuple(copied), attempt=attempt)
        return result

    async def commit(self, result: OffloadResult) -> None:
        assert self.plan is not None
        await self.committer.commit(self.one, self.plan, result)

    async def collect(self) -> None:
        """Does what the driver does after commits, and again T_vis later."""
        for _ in range(2):
            await self.committer.collect(self.one)
            await self._pause(self.bench.services.settings.remote_log.visible_after_ms / 1000)

    async def objects(self) -> list[str]:
        return [key for key in await self.bench.objects() if key.endswith((".log", ".indexes"))]
