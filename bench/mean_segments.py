"""Measures how large the segments of an owner of many partitions are, and what it reads, in virtual time.

    python -m bench.mean_segments [--partitions 3333]

One manager copies partitions to which producers write at steady rates: in `segment.ms`, a third of them get a quarter
of `segment.bytes`, a third get as much, and a third four times as much. Each call of the broker and of the store takes
a while. All of them are fakes, so nothing depends on this machine but the time that the benchmark takes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import tempfile
from collections import defaultdict
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Final
from unittest import mock

from rich.console import Console
from rich.table import Table

from bench.rounds import MAP_SIZE_BYTES
from tests.support.fakes.metadata_topic import FakeMetadataTopic
from tests.support.fakes.steady_log import SteadyLog
from tests.support.fakes.tier_process import Clock, OneTopic, TierProcess
from tests.support.simulation.loop import VirtualLoop
from tests.support.tiers.workbench import POLICY
from tiers.errors import RemoteResourceNotFoundError
from tiers.metadata.state.replay import MetadataEvent
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.ids import TopicIdPartition
from tiers.model.log_source import LogRead
from tiers.model.segment_metadata import RemoteLogSegmentMetadata
from tiers.storage.object_key import indexes_key, log_key
from tiers.storage.remote_storage_manager import LogSegmentData, StoredObject
from tiers.tasks.remote_log_manager import RemoteLogManager

SEGMENT_BYTES, SEGMENT_MS, INTERVAL_MS = 16_384, 600_000, 60_000
PERIODS: Final = 4
BATCH_BYTES: Final = 256
SHARES: Final = (0.25, 1.0, 4.0)
BROKER_S, STORE_S = 0.002, 0.05


class VirtualClock(Clock):
    """The clocks of a process, which follow the loop."""

    def __init__(self, loop: VirtualLoop) -> None:
        self._loop = loop

    @property
    def now_ms(self) -> int:
        return self._loop.now_ms

    @now_ms.setter
    def now_ms(self, now_ms: int) -> None:
        return

    @property
    def wall_ms(self) -> int:
        return 1_700_000_000_000 + self._loop.now_ms

    @wall_ms.setter
    def wall_ms(self, wall_ms: int) -> None:
        return


class ReadOnceTopic(FakeMetadataTopic):
    """A metadata topic with one reader, which drops the records that were read."""

    def events_from(self, offset: int) -> list[MetadataEvent]:
        events = super().events_from(offset)
        self.records.clear()
        return events


class SlowLogs:
    """The logs of all partitions. Each read takes a while."""

    def __init__(self, clock: Clock) -> None:
        rates = (share * SEGMENT_BYTES * 1000 / SEGMENT_MS for share in SHARES)
        self._clock = clock
        self._rates = list(rates)
        self._of: dict[int, SteadyLog] = {}

    def of(self, partition: TopicIdPartition) -> SteadyLog:
        number = partition.partition
        if number not in self._of:
            self._of[number] = SteadyLog(lambda: self._clock.wall_ms, self._rates[number % len(SHARES)], BATCH_BYTES)
        return self._of[number]

    async def read(self, partition: TopicIdPartition, *arguments: Any) -> LogRead:
        await asyncio.sleep(BROKER_S)
        return await self.of(partition).read(partition, *arguments)

    def __getattr__(self, name: str) -> Any:
        async def ask(partition: TopicIdPartition, *arguments: Any) -> Any:
            return await getattr(self.of(partition), name)(partition, *arguments)

        return ask


class SlowStore:
    """A store in memory. Each call takes a while."""

    def __init__(self) -> None:
        self._objects: dict[str, bytes] = {}

    async def open(self) -> None:
        return

    async def close(self) -> None:
        return

    async def copy_log_segment_data(self, metadata: RemoteLogSegmentMetadata, data: LogSegmentData) -> None:
        await self.put_object(log_key("cluster", metadata), data.log_segment.read_bytes())
        await self.put_object(indexes_key("cluster", metadata), data.indexes)

    async def fetch_log_segment(self, metadata: RemoteLogSegmentMetadata, start: int, end: int) -> memoryview:
        return memoryview(await self.get_object(log_key("cluster", metadata)))[start : end + 1]

    async def fetch_indexes(self, metadata: RemoteLogSegmentMetadata) -> bytes:
        return await self.get_object(indexes_key("cluster", metadata))

    async def put_object(self, key: str, data: bytes) -> None:
        await asyncio.sleep(STORE_S)
        self._objects[key] = data

    async def get_object(self, key: str) -> bytes:
        await asyncio.sleep(STORE_S)
        if key not in self._objects:
            raise RemoteResourceNotFoundError(key)
        return self._objects[key]

    async def list_objects(self, prefix: str) -> AsyncIterator[StoredObject]:
        await asyncio.sleep(STORE_S)
        for key in [each for each in self._objects if each.startswith(prefix)]:
            yield StoredObject(key, len(self._objects[key]))


async def measured(loop: VirtualLoop, folder: Path, partitions: int) -> dict[float, tuple[int, float, float]]:
    """Returns for each share the number of segments, their mean part of the goal, and the bytes read per byte copied.

    The goal is `segment.bytes`, or what comes in `segment.ms` if that is less."""
    (folder / "remote").mkdir()
    clock = VirtualClock(loop)
    logs: Any = SlowLogs(clock)
    policy = replace(POLICY, partition_count=partitions, segment_bytes=SEGMENT_BYTES, segment_ms=SEGMENT_MS)
    topics = OneTopic(policy)
    store: Any = SlowStore()
    topic = ReadOnceTopic(lambda: clock.wall_ms, owner="a")
    process = TierProcess("a", folder, logs, topic, topics, clock, lambda _: store)
    await process.open()
    remote_log = process.settings.remote_log.model_copy(update={"task_interval_ms": INTERVAL_MS})
    settings = replace(
        process.settings, remote_log=remote_log, verify_bytes=SEGMENT_BYTES, fetch_bytes=SEGMENT_BYTES // 16
    )
    manager = RemoteLogManager(replace(process.services, settings=settings, source=logs, storage=store), topics)
    running = loop.create_task(manager.run())
    await asyncio.sleep(PERIODS * SEGMENT_MS / 1000)
    sizes, read = defaultdict[float, list[int]](list), defaultdict[float, int](int)
    for number in range(partitions):
        partition, share = TopicIdPartition(policy.topic_id, number, policy.topic), SHARES[number % len(SHARES)]
        sizes[share] += [one.segment_size_bytes for one in process.metadata.state.list_remote_log_segments(partition)]
        read[share] += logs.of(partition).read_bytes
    running.cancel()
    return {
        share: (
            len(sizes[share]),
            sum(sizes[share]) / len(sizes[share]) / (min(1.0, share) * SEGMENT_BYTES),
            read[share] / sum(sizes[share]),
        )
        for share in SHARES
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partitions", type=int, default=3_333)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    opened = RemoteLogMetadataStateWriter.open

    def open_large(*args: object, **options: object) -> RemoteLogMetadataStateWriter:
        return opened(*args, **{**options, "map_size_bytes": MAP_SIZE_BYTES})  # type: ignore[arg-type]  # relayed

    table = Table("comes in segment.ms", "segments", "mean of the goal", "read per byte copied")
    loop = VirtualLoop()
    with (
        mock.patch.object(RemoteLogMetadataStateWriter, "open", open_large),
        tempfile.TemporaryDirectory() as folder,
    ):
        found = loop.run_virtual(measured(loop, Path(folder), options.partitions))
    for share, (segments, mean, read) in found.items():
        table.add_row(f"{share:g} x segment.bytes", str(segments), f"{mean:.2f}", f"{read:.2f}")
    Console().print(table)


if __name__ == "__main__":
    main()
