"""The cost of a round at rest: it does not grow with the number of copied segments."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from types import FrameType

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.metadata_topic import FakeMetadataTopic
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.tier_process import Clock, OneTopic, TierProcess
from tests.support.tiers.workbench import PARTITION, POLICY

YEARS_MS, PETABYTES = 10**12, 10**16
RETAINED = replace(
    POLICY, retention_ms=YEARS_MS, retention_bytes=PETABYTES, local_retention_ms=YEARS_MS, local_retention_bytes=0
)


async def calls_of_a_round(folder: Path, segments: int) -> int:
    """Returns the number of calls of the tier's functions in a round of a partition with so many segments."""
    (folder / "remote").mkdir(parents=True)
    clock, log = Clock(), InMemoryLog()
    topic = FakeMetadataTopic(lambda: clock.wall_ms, owner="a")
    process = TierProcess("a", folder, log, topic, OneTopic(RETAINED), clock)
    await process.open()
    try:
        while process.state.cover_size(PARTITION).whole_segments < segments:
            for _ in range(10):
                log.append(batch_of(log.end_offset, 10, value_bytes=100))
            while await process.manager.round():
                pass
            clock.advance(60_000)
        tasks = process.manager._managed[PARTITION]
        calls = rounds = 0

        def count(frame: FrameType, event: str, _: object) -> None:
            nonlocal calls
            calls += event == "call" and frame.f_globals.get("__name__", "").startswith("tiers.")

        for profile in (None, count):
            clock.advance(60_000)
            sys.setprofile(profile)
            if (surveyed := await tasks.round()) is not None:
                rounds += 1
                await tasks.run_copy(surveyed)
                await tasks.run_trim(surveyed)
                await tasks.run_deletion(surveyed)
        assert rounds == 2
        return calls
    finally:
        sys.setprofile(None)
        await process.end()


async def test_a_round_at_rest_costs_the_same_with_many_segments(tmp_path: Path) -> None:
    few = await calls_of_a_round(tmp_path / "few", 10)
    many = await calls_of_a_round(tmp_path / "many", 100)
    assert many <= 1.2 * few
