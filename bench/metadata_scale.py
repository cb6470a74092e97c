"""Measures the metadata's state with millions of segments: `python -m bench.metadata_scale [--segments N]`.

2,600,000 segments are 30 days with one segment a second (docs/founding.md, "Segment count"). The benchmark decodes and
replays their records, as a process does with the records of the metadata topic. Then a process of its own opens the
state, and measures look-ups and memory through the reader that a worker uses. A look-up is by partition, offset and
leader epoch. Between two look-ups of one segment there are more others than the cache of decoded segments holds, so
each look-up is a seek and a decoding. A fetch's look-up is the two look-ups that a fetch does.

The cost of a look-up is the CPU time of its thread, which includes the reading of the clock. The same look-ups run in
several turns. In the first turn the pages of the file are not mapped yet; later they are. On a shared machine, other
processes evict the CPU's caches during a turn, so the best turn of each look-up shows its own cost. Wall time includes
everything else that ran meanwhile. Private memory is RssAnon: the pages that LMDB maps are page cache, which processes
share.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import NamedTuple
from uuid import UUID

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tiers.metadata.records.serde import decode_value, encode_value, key_of
from tiers.metadata.shared_metadata import SharedMetadata
from tiers.metadata.state.layout import StateIdentity
from tiers.metadata.state.replay import MetadataEvent, PartitionRead
from tiers.metadata.state.writer import RemoteLogMetadataStateWriter
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.quick_values import garbage_collection_paused
from tiers.model.segment_metadata import (
    LeaderEpochEntry,
    RemoteLogSegmentMetadata,
    RemoteLogSegmentMetadataUpdate,
    RemoteLogSegmentState,
)

PARTITIONS = 100
RECORDS_PER_SEGMENT = 1000
SEGMENTS_PER_READ = 10_000
"""About as many as one answer of 8 MiB has for a process that is behind."""
LOOK_UPS = 50_000
TURNS = 5
LEADER_EPOCH = 3
SEED = 405
_UUID_STEP = 0x9E3779B97F4A7C15F39CC0605CEDC835
"""An odd number, so that no two multiples are the same UUID. The multiples are spread like random UUIDs."""


class Figure(NamedTuple):
    name: str
    value: float
    target: float | None = None


@cache
def partition(number: int) -> TopicIdPartition:
    return TopicIdPartition(UUID(int=1 + number // 10), number % 10, f"orders-{number // 10}")


def segment(number: int, partitions: int = PARTITIONS, size_bytes: int = 1 << 30) -> RemoteLogSegmentMetadata:
    """Returns the segment with this number. The partitions take turns, as if each rolled a segment now and then."""
    start = number // partitions * RECORDS_PER_SEGMENT
    return RemoteLogSegmentMetadata(
        segment_id=RemoteLogSegmentId(partition(number % partitions), UUID(int=number * _UUID_STEP % (1 << 128))),
        start_offset=start,
        end_offset=start + RECORDS_PER_SEGMENT - 1,
        broker_id=1,
        max_timestamp_ms=number * 1000,
        event_timestamp_ms=number * 1000,
        segment_leader_epochs=(LeaderEpochEntry(LEADER_EPOCH, start),),
        segment_size_bytes=size_bytes,
        state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
    )


def values(segments: Iterable[RemoteLogSegmentMetadata]) -> Iterator[bytes]:
    """Yields the two records of each segment: its add, and its update to COPY_SEGMENT_FINISHED."""
    for added in segments:
        yield encode_value(added)
        yield encode_value(
            RemoteLogSegmentMetadataUpdate(
                added.segment_id, 1, added.event_timestamp_ms, RemoteLogSegmentState.COPY_SEGMENT_FINISHED
            )
        )


@garbage_collection_paused()
def events(base_offset: int, records: Sequence[bytes]) -> list[MetadataEvent]:
    """Returns the events that `read_committed` makes of a Fetch with these records."""
    read = []
    for offset, value in enumerate(records, base_offset):
        record = decode_value(value)
        assert record is not None
        read.append(MetadataEvent(offset, offset // 2 * 1000, key_of(record), record))
    return read


def fill(
    folder: Path,
    segments: int,
    console: Console,
    make: Callable[[int], RemoteLogSegmentMetadata] = segment,
) -> list[Figure]:
    """Replays the records of the segments into a new state. The time to make the records does not count."""
    identity = StateIdentity("bench", UUID(int=1), 50)
    writer = RemoteLogMetadataStateWriter.open(folder, identity)
    cpu_s = seconds = 0.0
    with Progress(console=console, transient=True) as progress:
        for first in progress.track(range(0, segments, SEGMENTS_PER_READ), description="replaying"):
            numbers = range(first, min(first + SEGMENTS_PER_READ, segments))
            records = list(values(map(make, numbers)))
            begun, cpu_begun = time.perf_counter(), time.thread_time()
            writer.apply([PartitionRead(0, events(2 * first, records), 2 * numbers.stop)])
            seconds += time.perf_counter() - begun
            cpu_s += time.thread_time() - cpu_begun
    writer.close()
    size_mib = sum(file.stat().st_size for file in folder.iterdir()) / (1 << 20)
    return [
        Figure("rebuild, CPU s", cpu_s, 180),
        Figure("rebuild, s on the wall", seconds),
        Figure("file, MiB", size_mib),
    ]


class Times:
    """The times of the same look-ups in several turns, in ns: of the last turn, and the best CPU times of all turns."""

    def __init__(self, questions: int) -> None:
        self.cpu = array("q", bytes(8 * questions))
        self.wall = array("q", bytes(8 * questions))
        self.best = array("q", bytes(8 * questions))

    def turn(self, ask: Callable[[int], object]) -> None:
        for index in range(len(self.best)):
            cpu_begun = time.thread_time_ns()
            begun = time.perf_counter_ns()
            ask(index)
            self.wall[index] = time.perf_counter_ns() - begun
            self.cpu[index] = taken = time.thread_time_ns() - cpu_begun
            self.best[index] = min(self.best[index] or taken, taken)


def quantile_us(times: array[int], part: float) -> float:
    return sorted(times)[int(len(times) * part)] / 1e3


def figures(what: str, times: array[int], target_us: float | None = None) -> list[Figure]:
    return [
        Figure(f"{what}, p50 us", quantile_us(times, 0.50)),
        Figure(f"{what}, p99 us", quantile_us(times, 0.99), target_us),
    ]


def private_mib() -> float:
    status = Path("/proc/self/status").read_text()
    return int(status.split("RssAnon:")[1].split()[0]) / 1024


async def measure(folder: Path, segments: int) -> list[Figure]:
    begun = time.perf_counter()
    reader = SharedMetadata(folder)
    if reader.state.remote_end_offset(partition(0)) is None:
        raise SystemExit("the state is empty")
    found = [Figure("start, ms", (time.perf_counter() - begun) * 1e3, 100)]
    choose = random.Random(SEED)
    numbers = array("q", choose.sample(range(segments), min(LOOK_UPS, segments)))
    offsets = array("q", (each // PARTITIONS * RECORDS_PER_SEGMENT + choose.randrange(1000) for each in numbers))
    partitions = [partition(number) for number in range(PARTITIONS)]

    def look_up(index: int) -> RemoteLogSegmentMetadata | None:
        where = partitions[numbers[index] % PARTITIONS]
        return reader.state.remote_log_segment_metadata(where, offsets[index])

    def fetch(index: int) -> RemoteLogSegmentMetadata | None:
        where = partitions[numbers[index] % PARTITIONS]
        reader.state.log_start_offset(where)
        return reader.state.remote_log_segment_metadata(where, offsets[index])

    times = Times(len(numbers))
    times.turn(look_up)
    found += figures("look-up, pages not mapped, CPU", times.cpu)
    found += figures("look-up, pages not mapped, wall", times.wall)
    for _ in range(TURNS - 1):
        times.turn(look_up)
    found += figures("look-up, last turn, CPU", times.cpu, 20)
    found += figures("look-up, last turn, wall", times.wall, 20)
    found += figures(f"look-up, best of {TURNS} turns, CPU", times.best, 20)
    fetches = Times(len(numbers))
    for _ in range(TURNS):
        fetches.turn(fetch)
    found += figures(f"a fetch's, best of {TURNS} turns, CPU", fetches.best)
    found.append(Figure("private, MiB", private_mib(), 64))
    for index, number in enumerate(numbers):
        expected = replace(segment(number), state=RemoteLogSegmentState.COPY_SEGMENT_FINISHED)
        if look_up(index) != expected:
            raise SystemExit(f"the look-up of offset {offsets[index]} gave {look_up(index)} instead of {expected}")
    reader.close()
    return found


def print_table(title: str, found: Sequence[Figure], console: Console) -> bool:
    """Prints the figures, and returns whether all targets were met."""
    table = Table(title=title)
    for heading in ("", "measured", "target", "met"):
        table.add_column(heading, justify="left" if not heading else "right")
    for each in found:
        is_met = "" if each.target is None else "yes" if each.value < each.target else "no"
        value = f"{each.value:,.0f}" if each.value >= 100 else f"{each.value:.1f}"
        table.add_row(each.name, value, "" if each.target is None else f"below {each.target:g}", is_met)
    console.print(table)
    return all(each.target is None or each.value < each.target for each in found)


def load() -> str:
    return " ".join(f"{each:.1f}" for each in os.getloadavg())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, default=2_600_000)
    parser.add_argument("--measure", type=Path, metavar="FOLDER", help="measure the state in this folder")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="make the state in this folder, and keep it")
    parser.add_argument("--json", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    console = Console()
    if options.json:
        print(json.dumps(asyncio.run(measure(options.measure, options.segments))))
        return
    loads = [load()]
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as temporary:
        folder = options.measure or options.keep or Path(temporary)
        filled = [] if options.measure else fill(folder, options.segments, console)
        loads.append(load())
        arguments = [f"--segments={options.segments}", f"--measure={folder}", "--json"]
        command = [sys.executable, "-m", "bench.metadata_scale", *arguments]
        result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    loads.append(load())
    found = [Figure(*each) for each in json.loads(result.stdout)]
    title = f"{options.segments:,} segments in {PARTITIONS} partitions"
    all_met = print_table(title, found + filled, console)
    console.print(f"{os.cpu_count()} CPUs; load average before, between and after: {' | '.join(loads)}")
    if not all_met:
        raise SystemExit("a target was missed")


if __name__ == "__main__":
    main()
