"""Measures the CPU time of an owner's round at rest.

    python -m bench.rounds [--segments 20 20000] [--partitions 100 10000]

One process does the stages of a round again and again for one partition, whose metadata has so many finished segments.
Nothing is due. The brokers, the store and the metadata topic are fakes, so the figures are those of the owner's own
code and of its saved state: medians of the CPU time of the thread.

A second table has the CPU time of the process for each round of a manager of so many partitions, and the longest turn
of its event loop, without the collection of garbage.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

from rich.console import Console
from rich.table import Table

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.metadata_topic import FakeMetadataTopic
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.tier_process import Clock, OneTopic, TierProcess
from tests.support.tiers.segment_metadata import segment, to
from tests.support.tiers.workbench import PARTITION, POLICY
from tiers.broker.client import monotonic_ms
from tiers.metadata.records.serde import key_and_value
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.segment_metadata import RemoteLogSegmentState
from tiers.tasks.partition_tasks import PartitionTasks, Surveyed
from tiers.tasks.remote_log_manager import RemoteLogManager

OFFSETS: Final = 10
ROUNDS: Final = 30
INTERVAL_MS: Final = 60_000
MAP_SIZE_BYTES: Final = 1 << 28
RETAINED: Final = replace(POLICY, retention_ms=10**12, retention_bytes=10**16, segment_bytes=10**6)
STAGES: Final = ("round", "copy", "trim and facts", "deletion")
SPREAD_MS: Final = 20_000


async def measured(folder: Path, segments: int) -> list[float]:
    """Returns the median CPU milliseconds of each of the `STAGES`."""
    (folder / "remote").mkdir()
    clock, log = Clock(), InMemoryLog()
    topic = FakeMetadataTopic(lambda: clock.wall_ms, owner="a")
    process = TierProcess("a", folder, log, topic, OneTopic(POLICY), clock)
    await process.open()
    try:
        log.append(*(batch_of(OFFSETS * number, OFFSETS, value_bytes=100) for number in range(2)))
        while await process.manager.round():
            pass
        first = process.metadata.state.remote_end_offset(PARTITION)
        assert first is not None
        for number in range(1, segments):
            start = first + 1 + (number - 1) * OFFSETS
            one = replace(segment(PARTITION, start, start + OFFSETS - 1), max_timestamp_ms=clock.wall_ms)
            topic.append([key_and_value(one), key_and_value(to(one, RemoteLogSegmentState.COPY_SEGMENT_FINISHED))])
        process.metadata.follow()
        end = (process.metadata.state.remote_end_offset(PARTITION) or 0) + 1
        log.records, log.log_start_offset = b"", end - OFFSETS
        log.append(batch_of(end - OFFSETS, OFFSETS, value_bytes=100))
        topic.records.clear()  # the fake reads all of them in each round
        tasks = process.manager._managed[PARTITION]
        tasks.policy = RETAINED
        return await _medians(tasks, clock)
    finally:
        await process.end()


async def _medians(tasks: PartitionTasks, clock: Clock) -> list[float]:
    launched: list[Surveyed] = []

    async def survey() -> None:
        launched.extend(filter(None, [await tasks.round()]))

    steps: Sequence[Callable[[], Awaitable[None]]] = (
        survey,
        lambda: tasks.run_copy(launched[-1]),
        lambda: tasks.run_trim(launched[-1]),
        lambda: tasks.run_deletion(launched[-1]),
    )
    spent: list[list[float]] = [[] for _ in steps]
    for _ in range(ROUNDS):
        clock.advance(INTERVAL_MS)
        for times, step in zip(spent, steps, strict=True):
            began = time.thread_time()
            await step()
            times.append(1000 * (time.thread_time() - began))
    assert len(launched) == ROUNDS
    assert not any(stage.failures for stage in tasks.stages.values())
    return [statistics.median(times) for times in spent]


class MonotonicClock(Clock):
    @property
    def now_ms(self) -> int:
        return monotonic_ms()

    @now_ms.setter
    def now_ms(self, now_ms: int) -> None:
        return


async def spread(folder: Path, partitions: int) -> tuple[int, float, float]:
    """Returns how many rounds a manager did in two intervals, the CPU milliseconds of each, and the longest turn."""
    (folder / "remote").mkdir()
    clock, log = MonotonicClock(), InMemoryLog()
    topics = OneTopic(replace(POLICY, partition_count=partitions))
    metadata_log = FakeMetadataTopic(lambda: clock.wall_ms, owner="a")
    process = TierProcess("a", folder, log, metadata_log, topics, clock)
    await process.open()
    remote_log = process.settings.remote_log.model_copy(update={"task_interval_ms": SPREAD_MS})
    settings = replace(process.settings, remote_log=remote_log)
    manager = RemoteLogManager(replace(process.services, settings=settings), topics)
    try:
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(manager.run())
            with counted_rounds() as rounds:
                while rounds[0] < partitions:  # noqa: ASYNC110  # the manager has no event for the end of a round
                    await asyncio.sleep(0.1)
                with longest_turn() as turn:
                    before, began = rounds[0], time.process_time()
                    await asyncio.sleep(2 * SPREAD_MS / 1000)
                    done, spent = rounds[0] - before, time.process_time() - began
            manager.stop()
        return done, 1000 * spent / done, turn[0]
    finally:
        await process.end()


@contextmanager
def counted_rounds() -> Iterator[list[int]]:
    survey, rounds = PartitionTasks.survey, [0]

    async def counted(tasks: PartitionTasks) -> Surveyed | None:
        rounds[0] += 1
        return await survey(tasks)

    with mock.patch.object(PartitionTasks, "survey", counted):
        yield rounds


@contextmanager
def longest_turn() -> Iterator[list[float]]:
    """Measures the longest turn of the running loop in CPU milliseconds."""
    loop: Any = asyncio.get_running_loop()
    once, longest = loop._run_once, [0.0]

    def timed() -> None:
        began = time.thread_time()
        once()
        longest[0] = max(longest[0], 1000 * (time.thread_time() - began))

    gc.collect()
    gc.disable()
    loop._run_once = timed
    try:
        yield longest
    finally:
        loop._run_once = once
        gc.enable()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, nargs="*", default=[20, 2_000, 20_000])
    parser.add_argument("--partitions", type=int, nargs="*", default=[100, 10_000])
    options = parser.parse_args()
    table = Table("segments", *(f"{stage}, CPU ms" for stage in STAGES))
    of_many = Table("partitions", "rounds", "CPU ms of a round", "longest turn, CPU ms")
    logging.disable(logging.CRITICAL)
    opened = RemoteLogMetadataStateWriter.open

    def open_large(*args: object, **options: object) -> RemoteLogMetadataStateWriter:
        return opened(*args, **{**options, "map_size_bytes": MAP_SIZE_BYTES})  # type: ignore[arg-type]  # relayed

    with mock.patch.object(RemoteLogMetadataStateWriter, "open", open_large):
        for segments in options.segments:
            with tempfile.TemporaryDirectory() as folder:
                figures = asyncio.run(measured(Path(folder), segments))
            table.add_row(str(segments), *(f"{each:.2f}" for each in figures))
        for partitions in options.partitions:
            with tempfile.TemporaryDirectory() as folder:
                rounds, spent_ms, turn_ms = asyncio.run(spread(Path(folder), partitions))
            of_many.add_row(str(partitions), str(rounds), f"{spent_ms:.2f}", f"{turn_ms:.1f}")
    Console().print(table, of_many)


if __name__ == "__main__":
    main()
