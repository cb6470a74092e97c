"""What the process that owns a partition adds to its explanation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from proxy.process.admin import process_view
from proxy.process.admin.process_view import explained
from tests.support.fakes.record_batches import batch_of
from tests.support.tiers.workbench import PARTITION, POLICY, workbench
from tiers.errors import BrokerError
from tiers.tasks.partition_tasks import PartitionTasks


class NoBroker:
    """Stands for the client."""

    async def brokers(self, *_: object, **__: object) -> None:
        raise BrokerError("no broker answers", retriable=True)

    def __getattr__(self, name: str) -> Any:
        return self.brokers


async def test_the_owner_tells_when_records_are_old_enough(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with workbench(tmp_path) as bench:
        bench.log.append(*[batch_of(10 * n, 10, value_bytes=15, timestamp=bench.wall_ms) for n in range(10)])
        await bench.copy_all()
        copied_ms = bench.wall_ms
        bench.now_ms += 20_000
        bench.wall_ms += 20_000
        monkeypatch.setattr(process_view, "monotonic_ms", lambda: bench.now_ms)
        monkeypatch.setattr(process_view, "wall_clock_ms", lambda: bench.wall_ms)
        tasks = SimpleNamespace(copy=bench.copy_task, stages={}, running=(), stopped="", doubt="", partition=PARTITION)
        tasks._services = bench.services
        report = PartitionTasks.report(cast(Any, tasks))
        manager = SimpleNamespace(report=lambda _: report)
        topics = SimpleNamespace(policies={PARTITION.topic_id: POLICY}, refused={})
        running = cast(Any, SimpleNamespace(manager=manager, topics=topics))
        metadata = cast(Any, bench.metadata)
        bounds = await bench.log.bounds(PARTITION, 1000)
        answer = await explained(cast(Any, NoBroker()), metadata, running, 10_000, PARTITION, bounds, "")
    (why,) = answer.uncopied.whys
    assert why.at_ms == copied_ms + POLICY.segment_ms
