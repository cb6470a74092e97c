"""Measures how a job's driver plans over a million segments: `python -m bench.planning [--segments N]`.

The benchmark makes the metadata of finished segments of 48 MiB as `bench.metadata_scale` does, once with many
partitions and once with few. Then a process of its own makes each plan with the jobs' own functions, and pickles every
task as Spark does. No plan asks a broker or a store, and every task answers that all is well. For `spark`, a session
plans the data source itself. The time to open the tier, which reads the metadata topic, is not part of this benchmark:
it is `replaying` in `bench.metadata_scale`.

Peak memory is that of the process, and includes the mapped pages of the state's file, which are page cache. Private
memory does not include them.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import AsyncExitStack
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

from pyspark.serializers import CPickleSerializer
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType
from rich.console import Console
from rich.table import Table

from bench.metadata_scale import RECORDS_PER_SEGMENT, fill, load, private_mib, segment
from pipeline.config import PipelineConfig, parse_pipeline_config
from pipeline.decode.record_columns import KAFKA_COLUMNS
from pipeline.export.plan import Exported, plan_export
from pipeline.maintenance.merge import planned_merges
from pipeline.maintenance.merge_plan import MergeLimits
from pipeline.maintenance.scrub import ScrubOptions, scrub_tier
from pipeline.maintenance.scrub_report import ScrubLevel
from pipeline.maintenance.usage import UsageBy, usage_of
from pipeline.source.columns import spark_schema
from pipeline.source.options import parse_options
from pipeline.source.read_plan import MissingOffsets, ReadRange
from pipeline.source.read_task import tasks_for
from pipeline.source.tiered_log import LogBounds, TieredLog
from pipeline.spark.session import open_session
from tiers.access.open_tier import OpenTier
from tiers.broker.client import BrokerClient
from tiers.broker.cluster_metadata import ClusterMetadata
from tiers.metadata.shared_metadata import SharedMetadata
from tiers.model.ids import TopicIdPartition
from tiers.segment.segment_encryption import KeyRing
from tiers.upkeep.store_listing import ListedPart

if TYPE_CHECKING:
    from tiers.metadata.topic.topic_based import TopicBasedMetadataLog
    from tiers.storage.locations import LocatedRemoteStorageManager

P = TypeVar("P")
R = TypeVar("R")

SEGMENT_BYTES = 48 << 20
SHAPES = (1000, 10)
"""The numbers of partitions."""
TARGET_S = 10.0
TARGET_MIB = 1024.0
dumps: Callable[[object], bytes] = CPickleSerializer().dumps
_STATE = "TIDEGATE_BENCH_STATE"


class Planned(NamedTuple):
    """The number of tasks in a plan, and their total size when pickled."""

    tasks: int
    task_bytes: int


class Measurement(NamedTuple):
    name: str
    wall_s: float
    cpu_s: float
    peak_mib: float
    private_mib: float
    tasks: int
    task_mib: float
    load: str


class Pickled:
    """A `Runner` that pickles the tasks as Spark's driver does, but does not run them."""

    parallelism = 2
    is_speculative = False

    def __init__(self, answer: Callable[[Any], object]) -> None:
        self._answer = answer
        self.tasks = self.task_bytes = 0

    async def run(self, what: str, plan: Sequence[P], task: Callable[[P], Any]) -> list[Any]:
        dumps(task)
        for each in plan:
            self.tasks += 1
            self.task_bytes += len(dumps([each]))
        return [self._answer(each) for each in plan]


class NoUploads:
    async def list_uploads(self) -> Any:
        return
        yield


class PlannedTier(OpenTier):
    async def refresh(self) -> None:
        """Does nothing, because the state does not change."""


async def open_state(folder: Path) -> OpenTier:
    client = BrokerClient([("localhost", 9)], client_id="bench")  # never connects
    reader = SharedMetadata(folder)
    return PlannedTier(
        _config(),
        client,
        ClusterMetadata("bench", 1, {}, {}, 0, {}),
        cast("TopicBasedMetadataLog", reader),
        storage=cast("LocatedRemoteStorageManager", NoUploads()),
        key_ring=KeyRing(),
    )


def _config() -> PipelineConfig:
    return parse_pipeline_config('[upstream]\nbootstrap.servers = ["localhost:9"]\n')


def _log(tier: OpenTier, split_mib: int) -> tuple[TieredLog, dict[TopicIdPartition, LogBounds]]:
    given = {"kafka.bootstrap.servers": "localhost:9", "subscribePattern": ".*", "splitBytes": str(split_mib << 20)}
    options = parse_options(given, is_streaming=False)
    log = TieredLog(options, tier.client, None, AsyncExitStack())
    log._tier = tier  # replaces the tier that the log would open itself
    bounds = {}
    for each in tier.state.partitions():
        end = (tier.state.remote_end_offset(each) or 0) + 1
        bounds[each] = LogBounds(0, end, end + RECORDS_PER_SEGMENT)
    return log, bounds


def plan_read(tier: OpenTier, split_mib: int) -> list[InputPartition]:
    log, bounds = _log(tier, split_mib)
    asked = {partition: (0, each.end - 1) for partition, each in bounds.items()}
    return tasks_for(log._options, log, bounds, asked)


async def read(tier: OpenTier, split_mib: int) -> Planned:
    found = plan_read(tier, split_mib)
    return Planned(len(found), sum(len(dumps(each)) for each in found))


def _ranges(
    log: TieredLog,
    bounds: dict[TopicIdPartition, LogBounds],
    known: dict[int, TopicIdPartition],
    number: int,
    first: int,
    end: int,
) -> list[ReadRange | MissingOffsets]:
    return log.ranges(known[number], bounds[known[number]], first, end)


async def export(tier: OpenTier) -> Planned:
    log, bounds = _log(tier, 64)
    by_topic: dict[str, dict[int, TopicIdPartition]] = {}
    for each in bounds:
        by_topic.setdefault(each.topic, {})[each.partition] = each
    runner = Pickled(lambda tile: None)
    for known in by_topic.values():
        plan = plan_export(
            Exported(),
            {number: (0, bounds[each].end) for number, each in known.items()},
            {},
            partial(_ranges, log, bounds, known),
            512 << 20,
        )
        await runner.run("export", plan.tiles, repr)
    return Planned(runner.tasks, runner.task_bytes)


async def scrub(tier: OpenTier) -> Planned:
    runner = Pickled(lambda task: ListedPart())
    await scrub_tier(tier, _config(), runner, ScrubOptions(ScrubLevel.META))
    return Planned(runner.tasks, runner.task_bytes)


async def usage(tier: OpenTier) -> Planned:
    usage_of(tier.state, UsageBy.PARTITION)
    return Planned(0, 0)


async def merge(tier: OpenTier) -> Planned:
    groups = planned_merges(tier.state, ".*", MergeLimits())
    return Planned(len(groups), 0)


async def offload(tier: OpenTier) -> Planned:
    """Asks the metadata what a survey asks for each partition. The other questions of a survey go to brokers."""
    metadata = tier.state
    for each in metadata.partitions():
        end = metadata.remote_end_offset(each)
        metadata.log_start_offset(each)
        list(metadata.list_remote_log_segments(each, end or 0))
    return Planned(0, 0)


class PlannedSource(DataSource):
    @classmethod
    def name(cls) -> str:
        return "planned"

    def schema(self) -> StructType:
        return spark_schema(KAFKA_COLUMNS.names)

    def reader(self, schema: StructType) -> DataSourceReader:
        return PlannedReader()


class PlannedReader(DataSourceReader):
    def partitions(self) -> Sequence[InputPartition]:
        tier = asyncio.run(open_state(Path(os.environ[_STATE])))
        return plan_read(tier, 64)

    def read(self, partition: InputPartition) -> Iterator[tuple[Any, ...]]:
        return iter(())


def spark() -> Planned:
    """Lets a Spark session plan a query, and prints how long that took. Spark plans in a process of its own."""
    with open_session("local[1]") as session:
        session.dataSource.register(PlannedSource)
        frame = session.read.format("planned").load()
        begun = time.perf_counter()
        partitions = frame.rdd.getNumPartitions()
        print(f"Spark planned {partitions:,} partitions in {time.perf_counter() - begun:.1f} s", file=sys.stderr)
    return Planned(partitions, 0)


PLANS: dict[str, Callable[[OpenTier], Awaitable[Planned]]] = {
    "read": partial(read, split_mib=64),
    "read, 512 MiB splits": partial(read, split_mib=512),
    "export": export,
    "scrub, level meta": scrub,
    "usage": usage,
    "merge": merge,
    "offload, metadata": offload,
}


class PeakPrivate(threading.Thread):
    """A thread that samples the process's private memory and keeps the maximum."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.mib = 0.0
        self._ended = threading.Event()

    def run(self) -> None:
        while not self._ended.wait(0.05):
            self.mib = max(self.mib, private_mib())

    def stop(self) -> float:
        self._ended.set()
        self.join()
        return max(self.mib, private_mib())


def measure(name: str, folder: Path) -> Measurement:
    watch = PeakPrivate()
    watch.start()

    async def work() -> Planned:
        return await PLANS[name](await open_state(folder))

    begun, cpu_begun = time.perf_counter(), time.process_time()
    planned = asyncio.run(work())
    wall_s, cpu_s = time.perf_counter() - begun, time.process_time() - cpu_begun
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    task_mib = planned.task_bytes / (1 << 20)
    return Measurement(name, wall_s, cpu_s, peak_mib, watch.stop(), planned.tasks, task_mib, load())


def of_own_process(name: str, folder: Path) -> Measurement:
    command = [sys.executable, "-m", "bench.planning", f"--plan={name}", f"--state={folder}"]
    result = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return Measurement(*json.loads(result.stdout))


def show(title: str, found: Sequence[Measurement], console: Console) -> None:
    table = Table(title=title)
    for heading in ("plan", "wall s", "CPU s", "peak MiB", "private MiB", "tasks", "pickled MiB", "load average"):
        table.add_column(heading, justify="left" if heading == "plan" else "right")
    for each in found:
        figures = [f"{each.wall_s:.1f}", f"{each.cpu_s:.1f}", f"{each.peak_mib:,.0f}", f"{each.private_mib:,.0f}"]
        table.add_row(each.name, *figures, f"{each.tasks:,}", f"{each.task_mib:,.0f}", each.load)
    console.print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--segments", type=int, default=1_000_000)
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="FOLDER",
        help="make the states in this folder and keep them, or use those that exist",
    )
    parser.add_argument("--only", metavar="PLAN", action="append", help=f"one of: {'; '.join(PLANS)}; spark")
    parser.add_argument("--plan", help=argparse.SUPPRESS)
    parser.add_argument("--state", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.plan == "spark":
        os.environ[_STATE] = str(options.state)
        spark()
        return
    if options.plan:
        print(json.dumps(measure(options.plan, options.state)))
        return
    console = Console(width=120)
    with tempfile.TemporaryDirectory(prefix="tidegate-bench-") as temporary:
        for partitions in SHAPES:
            folder = (options.keep or Path(temporary)) / f"{options.segments}-in-{partitions}"
            if not folder.exists():
                folder.mkdir(parents=True)
                make = partial(segment, partitions=partitions, size_bytes=SEGMENT_BYTES)
                fill(folder, options.segments, console, make)
            found = [of_own_process(name, folder) for name in PLANS if name in (options.only or PLANS)]
            show(f"{options.segments:,} segments in {partitions} partitions", found, console)
            if "spark" in (options.only or ["spark"]):
                command = [sys.executable, "-m", "bench.planning", "--plan=spark", f"--state={folder}"]
                subprocess.run(command, check=True)
    console.print(f"{os.cpu_count()} CPUs; the target of a read is {TARGET_S:g} s and {TARGET_MIB:g} MiB")


if __name__ == "__main__":
    main()
