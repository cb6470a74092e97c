"""What does a round of an owner at rest cost? `python -m bench.rounds [--segments 20 2000 20000]`.

One process does the stages of a round again and again for one partition, whose metadata has so many finished segments.
Nothing is due. The brokers, the store and the metadata topic are fakes, so the figures are those of the owner's own
code and of its saved state: medians of the CPU time of the thread. The copy of the manifest is apart: it has every
segment.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import statistics
import tempfile
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final
from unittest import mock

from rich.console import Console
from rich.table import Table

from tests.support.fakes.in_memory_log import InMemoryLog
from tests.support.fakes.metadata_topic import FakeMetadataTopic
from tests.support.fakes.record_batches import batch_of
from tests.support.fakes.tier_process import PARTITION, POLICY, Clock, OneTopic, TierProcess
from tests.support.tiers.segment_metadata import segment, to
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.metadata.written_records import key_and_value
from tiers.model.segment_state import RemoteLogSegmentState
from tiers.tasks.partition_tasks import PartitionTasks, Surveyed

OFFSETS: Final = 10
ROUNDS: Final = 30
INTERVAL_MS: Final = 60_000
MAP_SIZE_BYTES: Final = 1 << 28
RETAINED: Final = replace(POLICY, retention_ms=10**12, retention_bytes=10**16, segment_bytes=10**6)
STAGES: Final = ("round", "copy", "trim and manifest", "deletion")


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
        first = process.metadata.remote_end_offset(PARTITION)
        assert first is not None
        for number in range(1, segments):
            start = first + 1 + (number - 1) * OFFSETS
            one = replace(segment(PARTITION, start, start + OFFSETS - 1), max_timestamp_ms=clock.wall_ms)
            topic.append([key_and_value(one), key_and_value(to(one, RemoteLogSegmentState.COPY_SEGMENT_FINISHED))])
        process.metadata.follow()
        end = (process.metadata.remote_end_offset(PARTITION) or 0) + 1
        log.records, log.log_start_offset = b"", end - OFFSETS
        log.append(batch_of(end - OFFSETS, OFFSETS, value_bytes=100))
        topic.records.clear()  # the fake reads all of them in each round
        tasks = process.manager._managed[PARTITION]
        tasks.policy = RETAINED
        return await _medians(tasks, clock)
    finally:
        await process.end()


async def _medians(tasks: PartitionTasks, clock: Clock) -> list[float]:
    launched: list[tuple[Surveyed, int | None]] = []
    steps: Sequence[Callable[[], Awaitable[None]]] = (
        lambda: tasks.round(lambda surveyed, start: launched.append((surveyed, start))),
        lambda: tasks.run_copy(*launched[-1]),
        lambda: tasks.run_trim(launched[-1][0]),
        lambda: tasks.run_deletion(launched[-1][0]),
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, nargs="+", default=[20, 2_000, 20_000])
    table = Table("segments", *(f"{stage}, CPU ms" for stage in STAGES))
    logging.disable(logging.CRITICAL)
    opened = RemoteLogMetadataStateWriter.open

    def open_large(*args: object, **options: object) -> RemoteLogMetadataStateWriter:
        return opened(*args, **{**options, "map_size_bytes": MAP_SIZE_BYTES})  # type: ignore[arg-type]  # relayed

    with mock.patch.object(RemoteLogMetadataStateWriter, "open", open_large):
        for segments in parser.parse_args().segments:
            with tempfile.TemporaryDirectory() as folder:
                figures = asyncio.run(measured(Path(folder), segments))
            table.add_row(str(segments), *(f"{each:.2f}" for each in figures))
    Console().print(table)


if __name__ == "__main__":
    main()
