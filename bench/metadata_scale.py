"""What the state of the metadata costs with millions of segments: `python -m bench.metadata_scale [--segments N]`.

2,600,000 segments are 30 days of one a second (`spec/perf.md 3`). They go through the replay that a process does with
what it reads of the metadata topic, and are then opened, looked up and weighed by a process of their own, as a worker
would. A look-up is a fetch's: partition, offset and leader epoch, none of them asked twice. Private memory is RssAnon;
what LMDB maps is page cache, which processes share.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from uuid import UUID

from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from tiers.metadata.serde import key_of
from tiers.metadata.state import RemoteLogMetadataState
from tiers.metadata.state_layout import StateIdentity
from tiers.metadata.state_replay import MetadataEvent, PartitionRead
from tiers.metadata.state_writer import RemoteLogMetadataStateWriter
from tiers.model.ids import RemoteLogSegmentId, TopicIdPartition
from tiers.model.segment_metadata import LeaderEpochEntry, RemoteLogSegmentMetadata, RemoteLogSegmentMetadataUpdate
from tiers.model.segment_state import RemoteLogSegmentState

PARTITIONS = 100
RECORDS_PER_SEGMENT = 1000
SEGMENTS_PER_READ = 500
LOOK_UPS = 50_000
LEADER_EPOCH = 3
SEED = 405

TARGETS = {"start_ms": 100.0, "look_up_p99_us": 20.0, "private_mib": 64.0}


@dataclass(frozen=True, slots=True)
class Measured:
    start_ms: float
    look_up_p50_us: float
    look_up_p99_us: float
    private_mib: float


def partition(number: int) -> TopicIdPartition:
    return TopicIdPartition(UUID(int=1 + number // 10), number % 10, f"orders-{number // 10}")


def segment(number: int) -> RemoteLogSegmentMetadata:
    """The `number`th segment of all: partitions take turns, as they do where each rolls now and then."""
    start = number // PARTITIONS * RECORDS_PER_SEGMENT
    return RemoteLogSegmentMetadata(
        segment_id=RemoteLogSegmentId(partition(number % PARTITIONS), UUID(int=random.Random(number).getrandbits(128))),
        start_offset=start,
        end_offset=start + RECORDS_PER_SEGMENT - 1,
        broker_id=1,
        max_timestamp_ms=number * 1000,
        event_timestamp_ms=number * 1000,
        segment_leader_epochs=(LeaderEpochEntry(LEADER_EPOCH, start),),
        segment_size_bytes=1 << 30,
        state=RemoteLogSegmentState.COPY_SEGMENT_STARTED,
    )


def events(numbers: range) -> Iterator[MetadataEvent]:
    for number in numbers:
        added = segment(number)
        finished = RemoteLogSegmentMetadataUpdate(
            added.segment_id, 1, added.event_timestamp_ms, RemoteLogSegmentState.COPY_SEGMENT_FINISHED
        )
        yield MetadataEvent(2 * number, added.event_timestamp_ms, key_of(added), added)
        yield MetadataEvent(2 * number + 1, added.event_timestamp_ms, key_of(finished), finished)


def fill(folder: Path, segments: int, console: Console) -> float:
    """Seconds that the replay took, making the records up not included."""
    identity = StateIdentity("bench", UUID(int=1), 50)
    writer = RemoteLogMetadataStateWriter.open(folder, identity, wall_clock_ms=lambda: 0)
    seconds = 0.0
    with Progress(console=console, transient=True) as progress:
        for first in progress.track(range(0, segments, SEGMENTS_PER_READ), description="replaying"):
            numbers = range(first, min(first + SEGMENTS_PER_READ, segments))
            read = PartitionRead(0, list(events(numbers)), 2 * numbers.stop)
            begun = time.perf_counter()
            writer.apply([read])
            seconds += time.perf_counter() - begun
    writer.close()
    return seconds


def measure(folder: Path, segments: int) -> Measured:
    begun = time.perf_counter()
    state = RemoteLogMetadataState.open_shared(folder)
    if state.remote_end_offset(partition(0)) is None:
        raise SystemExit("the state is empty")
    start_ms = (time.perf_counter() - begun) * 1e3
    choose = random.Random(SEED)
    numbers = choose.sample(range(segments), min(LOOK_UPS, segments))
    took_us = []
    for number in numbers:
        where = partition(number % PARTITIONS)
        offset = number // PARTITIONS * RECORDS_PER_SEGMENT + choose.randrange(RECORDS_PER_SEGMENT)
        begun = time.perf_counter()
        found = state.remote_log_segment_metadata(where, offset, LEADER_EPOCH)
        took_us.append((time.perf_counter() - begun) * 1e6)
        expected = replace(segment(number), state=RemoteLogSegmentState.COPY_SEGMENT_FINISHED)
        if found != expected:
            raise SystemExit(f"offset {offset} of {where} is in {expected}, not in {found}")
    took_us.sort()
    status = Path("/proc/self/status").read_text()
    anonymous_kib = int(status.split("RssAnon:")[1].split()[0])
    return Measured(start_ms, took_us[len(took_us) // 2], took_us[len(took_us) * 99 // 100], anonymous_kib / 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, default=2_600_000)
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.measure:
        measured = measure(options.measure, options.segments)
        print(json.dumps({name: getattr(measured, name) for name in Measured.__slots__}))
        return
    console = Console()
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as folder:
        seconds = fill(Path(folder), options.segments, console)
        size_mib = sum(file.stat().st_size for file in Path(folder).iterdir()) / (1 << 20)
        command = [sys.executable, "-m", "bench.metadata_scale", f"--segments={options.segments}", "--measure", folder]
        result = subprocess.run(command, check=True, capture_output=True, text=True)
    measured = json.loads(result.stdout)
    table = Table(title=f"{options.segments:,} segments in {PARTITIONS} partitions")
    for heading in ("", "measured", "target"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, value in measured.items():
        table.add_row(name.replace("_", " "), f"{value:.1f}", f"below {TARGETS[name]:g}" if name in TARGETS else "")
    table.add_row("replay, segments per s", f"{options.segments / seconds:,.0f}", "")
    table.add_row("file MiB", f"{size_mib:,.0f}", "")
    console.print(table)
    if any(measured[name] >= target for name, target in TARGETS.items()):
        raise SystemExit("a target was missed")


if __name__ == "__main__":
    main()
