"""Measures how fast Spark reads a topic through `kafka_tiered`, compared with Spark's other ways to read its records:

    python -m bench.dataframe [--mib 512] [--codecs none,zstd] [--rounds 5]

The benchmark starts one broker with a proxy before it. For each codec it fills two topics with the same records. The
broker keeps the records of the first topic. Most records of the second topic leave the broker for a store, which is a
folder. The benchmark reads only records that have left, and the same offsets of the first topic. Spark also writes
these records as Parquet with zstd. One session on `local[2]` reads all columns into Spark's format `noop`. The ways to
read take turns in every round. All settings are defaults.

The benchmark also measures the ceiling of any source in Python: as many tasks with records as large, from Arrow batches
that are already in memory and need no reading or decoding. The remaining time is Spark's own, for the socket and for
making a row of every record.

Before the timed rounds, a fingerprint of the records must be the same for every way. In every round, Spark must observe
the expected number of records. 1 MB is 10^6 bytes of uncompressed batches. CPU seconds are those of the JVM and of its
Python processes.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import pyarrow as pa
import pyspark
from confluent_kafka import Producer
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.functions import count, lit
from pyspark.sql.types import StructType
from rich.console import Console
from rich.table import Table

from bench.ending import run
from bench.offsets import EARLIEST, LATEST, list_offsets
from pipeline.decode.arrow_records import warm
from pipeline.decode.record_columns import KAFKA_COLUMNS, MAX_ARROW_BYTES
from pipeline.source.columns import spark_schema
from pipeline.source.datasource import register_data_sources
from pipeline.source.options import DEFAULT_SPLIT_BYTES
from pipeline.spark.session import open_session
from pipeline.spark.task_call import freeze_loaded_objects
from protocol.records.compression import decompress
from protocol.records.record_batch import BATCH_HEADER_BYTES, iterate_batches
from tests.support.servers import spark_kafka
from tests.support.servers.jars import ServerUnavailable
from tests.support.servers.kafka import KAFKA_VERSION, KafkaCluster
from tests.support.servers.producing import create_topic, topic_id_partition
from tests.support.servers.tidegate import tidegate_over
from tiers.broker.client import BrokerClient

PARTITIONS = 2
VALUE_BYTES = 512
BATCH_BYTES = 64_000
SEGMENTS_PER_PARTITION = 8
FIRST_TIME_MS = 1_700_000_000_000
MOVED_BEFORE_READING = 0.6
MOVE_TIMEOUT_S = 240.0
OF_PARQUET, OF_KAFKA = 0.6, 3.0

DIRECT, PARQUET, KAFKA = "kafka_tiered, direct", "Parquet", "Spark's Kafka source, broker"
KAFKA_BY_PROXY, BY_PROXY = "Spark's Kafka source, proxy", "kafka_tiered, proxy"
CEILING = "Arrow batches at hand"

FINGERPRINT = (
    "count(*)",
    "sum(length(value))",
    "bit_xor(xxhash64(key, value, partition, offset, timestamp, timestampType))",
)
CODECS = ("none", "zstd", "lz4", "snappy", "gzip")


@dataclass(frozen=True)
class Data:
    """The records that are read of one codec's topics: in each partition, the offsets below `ends`."""

    codec: str
    ends: Mapping[int, int]
    batch_bytes: int
    """The uncompressed size of the batches."""
    stored_bytes: int

    @property
    def records(self) -> int:
        return sum(self.ends.values())

    def topic(self, tier: str) -> str:
        return f"bench-{tier}-{self.codec}"

    def range_of(self, tier: str) -> dict[str, str]:
        ends = {str(partition): end for partition, end in self.ends.items()}
        topic = self.topic(tier)
        return {"startingOffsets": "earliest", "endingOffsets": json.dumps({topic: ends}), "subscribe": topic}


class BatchesAtHand(DataSource):
    """A data source of Arrow batches in memory. Its options are `records` and `tasks`."""

    @classmethod
    def name(cls) -> str:
        return "batches_at_hand"

    def schema(self) -> StructType:
        return spark_schema(KAFKA_COLUMNS.names)

    def reader(self, schema: StructType) -> BatchesAtHandReader:
        return BatchesAtHandReader(int(self.options["records"]), int(self.options["tasks"]))


class BatchesAtHandReader(DataSourceReader):
    def __init__(self, records: int, tasks: int) -> None:
        self._records = records
        self._tasks = tasks

    def partitions(self) -> Sequence[InputPartition]:
        shares = [self._records * number // self._tasks for number in range(self._tasks + 1)]
        return [InputPartition(end - start) for start, end in pairwise(shares)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        one = b"", b"\1" * VALUE_BYTES, "bench-remote", 0, 0, FIRST_TIME_MS * 1000, 0
        rows = MAX_ARROW_BYTES // VALUE_BYTES
        scalars = (pa.scalar(value, field.type) for value, field in zip(one, KAFKA_COLUMNS.schema, strict=True))
        arrays = [pa.repeat(scalar, rows) for scalar in scalars]
        batch = pa.RecordBatch.from_arrays(arrays, schema=KAFKA_COLUMNS.schema)
        for start in range(0, partition.value, rows):
            yield batch.slice(0, partition.value - start)
        freeze_loaded_objects()


@dataclass
class Way:
    name: str
    load: Callable[[Data], DataFrame]
    then: Callable[[DataFrame], DataFrame] = lambda frame: frame
    seconds: list[float] = field(default_factory=list)
    cpu_seconds: list[float] = field(default_factory=list)


class Bench:
    """`config` is the proxy's settings file. The Parquet files are in `home`."""

    def __init__(
        self, console: Console, session: SparkSession, home: Path, config: Path, broker: str, proxy: str
    ) -> None:
        self.console = console
        self.session = session
        self.home = home
        self.config = config
        self.broker = broker
        self.proxy = proxy

    def ways(self) -> list[Way]:
        return [
            Way(DIRECT, self.direct),
            Way(PARQUET, self.parquet),
            Way(KAFKA, lambda data: self.kafka(data, self.broker, "local")),
            Way(KAFKA_BY_PROXY, lambda data: self.kafka(data, self.proxy, "remote")),
            Way(BY_PROXY, self.by_proxy),
        ]

    def narrow_ways(self) -> list[Way]:
        return [
            Way("sum(length(value)), kafka_tiered", lambda data: self.direct(data, columns="value"), total),
            Way("sum(length(value)), Parquet", lambda data: self.parquet(data).select("value"), total),
            Way("offset and timestamp, kafka_tiered", lambda data: self.direct(data, columns="offset,timestamp")),
            Way("offset and timestamp, Parquet", lambda data: self.parquet(data).select("offset", "timestamp")),
        ]

    def direct(self, data: Data, **options: str) -> DataFrame:
        named = {"config": str(self.config), **data.range_of("remote"), **options}
        return self.session.read.format("kafka_tiered").options(**named).load()

    def by_proxy(self, data: Data) -> DataFrame:
        options = {"kafka.bootstrap.servers": self.proxy, **data.range_of("remote")}
        return self.session.read.format("kafka_tiered").options(**options).load()

    def kafka(self, data: Data, bootstrap_servers: str, tier: str) -> DataFrame:
        options = {"kafka.bootstrap.servers": bootstrap_servers, **data.range_of(tier)}
        return self.session.read.format("kafka").options(**options).load()

    def at_hand(self, data: Data) -> DataFrame:
        options = {"records": str(data.records), "tasks": str(-(-data.stored_bytes // DEFAULT_SPLIT_BYTES))}
        return self.session.read.format(BatchesAtHand.name()).options(**options).load()

    def parquet(self, data: Data) -> DataFrame:
        folder = self.home / f"parquet-{data.codec}"
        if not folder.exists():
            self.direct(data).write.option("compression", "zstd").parquet(str(folder))
        return self.session.read.parquet(str(folder))

    def compare(self, data: Data, ways: Sequence[Way]) -> None:
        """Raises `RuntimeError` unless all `ways` read the same records."""
        found = {way.name: tuple(way.load(data).selectExpr(*FINGERPRINT).first() or ()) for way in ways}
        if len(set(found.values())) != 1 or found[DIRECT][0] != data.records:
            raise RuntimeError(f"{data.records} records of {data.codec} are not the same everywhere: {found}")

    def measure(self, data: Data, way: Way) -> None:
        seen = Observation()
        frame = way.then(way.load(data).observe(seen, count(lit(1)).alias("records")))
        before = self.cpu_seconds()
        began = time.monotonic()
        frame.write.format("noop").mode("overwrite").save()
        way.seconds.append(time.monotonic() - began)
        way.cpu_seconds.append(self.cpu_seconds() - before)
        records = seen.get["records"]
        if records != data.records:
            raise RuntimeError(f"{way.name}: {records} of {data.records} records were read")

    def cpu_seconds(self) -> float:
        jvm = self.session.sparkContext._jvm
        assert jvm is not None
        return tree_cpu_seconds(jvm.java.lang.ProcessHandle.current().pid())

    def run(self, data: Data, rounds: int) -> None:
        ways, narrow = self.ways(), [*self.narrow_ways(), Way(CEILING, self.at_hand)]
        with self.console.status("comparing what is read"):
            self.compare(data, ways)
        for number in range(rounds):
            with self.console.status(f"{data.codec}: round {number + 1} of {rounds}"):
                for way in [*ways, *narrow]:
                    self.measure(data, way)
        self.show(data, [*ways, *narrow], rounds)

    def show(self, data: Data, ways: Sequence[Way], rounds: int) -> None:
        ratio = data.batch_bytes / data.stored_bytes
        table = Table(
            title=f"codec {data.codec}: {data.batch_bytes / 1e6:.0f} MB in {data.records} records, "
            f"{ratio:.2f} times the stored bytes; best (median) of {rounds}; load average {os.getloadavg()[0]:.1f}"
        )
        table.add_column("")
        for title in ("MB/s", "CPU s/GiB", f"of {PARQUET}", "of Kafka source", "of it by proxy"):
            table.add_column(title, justify="right")
        best = {way.name: min(way.seconds) for way in ways}
        middle = {way.name: statistics.median(way.seconds) for way in ways}
        for way in ways:
            rate, usual = (data.batch_bytes / one[way.name] / 1e6 for one in (best, middle))
            cpu = statistics.median(way.cpu_seconds) / data.batch_bytes * (1 << 30)
            columns = [f"{rate:.0f} ({usual:.0f})", f"{cpu:.1f}"]
            if way.name in (DIRECT, BY_PROXY, CEILING):
                columns += [
                    f"{best[other] / best[way.name]:.2f} ({middle[other] / middle[way.name]:.2f})"
                    for other in (PARQUET, KAFKA, KAFKA_BY_PROXY)
                ]
            table.add_row(way.name, *columns)
        self.console.print(table)
        for other, target in ((PARQUET, OF_PARQUET), (KAFKA, OF_KAFKA)):
            found = middle[other] / middle[DIRECT]
            verdict = "met" if found >= target else "NOT met"
            self.console.print(f"{DIRECT} is {found:.2f} times {other}, by medians; target {target}: {verdict}")


def total(frame: DataFrame) -> DataFrame:
    return frame.selectExpr("sum(length(value))")


def records_of(size_bytes: int) -> Iterator[tuple[int, bytes, bytes]]:
    """Yields partition, key and value. Values are JSON with repeating names, and random numbers and identifiers."""
    rng = random.Random(6)
    bits = rng.getrandbits
    for number in range(size_bytes // (VALUE_BYTES + 20)):
        items = ",".join([f'{{"sku":"{bits(48):012x}","price":{bits(20)}}}' for _ in range(13)])
        yield number % PARTITIONS, b"key-%d" % bits(16), f'{{"id":"{bits(64):016x}","items":[{items}'.encode()[:512]


def rule(codec: str, size_bytes: int) -> str:
    """Returns the proxy's settings for the remote topic of a codec."""
    expected = size_bytes / PARTITIONS * (1 if codec == "none" else 0.4)
    segment_bytes = max(1 << 20, int(expected / SEGMENTS_PER_PARTITION))
    settings = f'segment.bytes = {segment_bytes}\nsegment.ms = "1h"\nlocal.retention.bytes = 1'
    return f'[[topics]]\nname = "bench-remote-{codec}"\n{settings}\n'


def fill(bootstrap_servers: str, codecs: Sequence[str], size_bytes: int) -> None:
    topics = [f"bench-{tier}-{codec}" for codec in codecs for tier in ("local", "remote")]
    producers = {}
    for topic in topics:
        create_topic(bootstrap_servers, topic, partitions=PARTITIONS, config={"retention.ms": "-1"})
        settings = {"bootstrap.servers": bootstrap_servers, "enable.idempotence": True, "linger.ms": 100}
        producers[topic] = Producer(
            {**settings, "compression.type": topic.rpartition("-")[2], "batch.size": BATCH_BYTES}
        )
    for number, (partition, key, value) in enumerate(records_of(size_bytes)):
        for topic, producer in producers.items():
            while True:
                try:
                    producer.produce(topic, value, key, partition, timestamp=FIRST_TIME_MS + number)
                    break
                except BufferError:
                    producer.poll(0.1)
    for producer in producers.values():
        if left := producer.flush(120):
            raise RuntimeError(f"{left} records could not be produced")


def data_of(cluster: KafkaCluster, tier: Path, codec: str) -> Data:
    """Waits until most of the remote topic has left the broker."""
    partitions = range(PARTITIONS)
    topic = f"bench-remote-{codec}"
    deadline = time.monotonic() + MOVE_TIMEOUT_S
    while True:
        starts = list_offsets(cluster.address(), topic, partitions, EARLIEST)
        ends = list_offsets(cluster.address(), topic, partitions, LATEST)
        if min(starts[one] / max(1, ends[one]) for one in partitions) >= MOVED_BEFORE_READING:
            break
        if time.monotonic() > deadline:
            raise TimeoutError(f"topic {topic}: only the offsets below {starts} of {ends} have left the broker")
        time.sleep(0.5)
    topic_id = asyncio.run(_topic_id(cluster, topic))
    batch_bytes = stored_bytes = 0
    for path in tier.rglob(f"{topic_id}/*/*.log"):
        log = memoryview(path.read_bytes())
        for batch in iterate_batches(log):
            if batch.base_offset < starts[int(path.parent.name)]:
                body = log[batch.start + BATCH_HEADER_BYTES : batch.end]
                batch_bytes += BATCH_HEADER_BYTES + len(decompress(batch.codec, body))
                stored_bytes += batch.size_bytes
    return Data(codec, starts, batch_bytes, stored_bytes)


async def _topic_id(cluster: KafkaCluster, topic: str) -> uuid.UUID:
    client = BrokerClient([cluster.address()], client_id="bench")
    try:
        return (await topic_id_partition(client, topic)).topic_id
    finally:
        await client.close()


def tree_cpu_seconds(pid: int) -> float:
    """Returns the CPU seconds of a process and its descendants, also of those that have ended."""
    ticks = 0
    with contextlib.suppress(
        FileNotFoundError, ProcessLookupError
    ):  # if it has just ended, its parent's figures include it
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks = sum(map(int, fields[11:15]))
    seconds = ticks / os.sysconf("SC_CLK_TCK")
    for children in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            seconds += sum(tree_cpu_seconds(int(child)) for child in children.read_text().split())
    return seconds


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--mib", type=int, default=512, help="uncompressed size of each topic")
    arguments.add_argument("--codecs", default="none,zstd", help=f"a list of {', '.join(CODECS)}")
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--conf", action="append", default=[], metavar="KEY=VALUE", help="a setting of Spark")
    given = arguments.parse_args()
    codecs = given.codecs.split(",")

    console = Console(width=None if sys.stdout.isatty() else 130)
    home = Path(tempfile.mkdtemp(prefix="tidegate-bench-"))
    try:
        class_path = spark_kafka.spark_kafka_class_path()
        conf = {"spark.driver.extraClassPath": class_path, "spark.driver.memory": "2g"}
        conf |= dict(pair.split("=", 1) for pair in given.conf)
        warm()
        with KafkaCluster() as cluster:
            rules = "\n".join(rule(codec, given.mib << 20) for codec in codecs)
            with tidegate_over(cluster, home, more=rules) as proxy:
                with console.status("filling topics"):
                    fill(cluster.bootstrap_servers, codecs, given.mib << 20)
                    data = [data_of(cluster, home / "tier", codec) for codec in codecs]
                console.print(
                    f"Kafka {KAFKA_VERSION}, pyspark {pyspark.__version__}, local[2]; Spark's Kafka source "
                    f"{spark_kafka.VERSION} with kafka-clients {spark_kafka.CLIENTS_VERSION}; {os.cpu_count()} cores"
                )
                with open_session("local[2]", conf, "bench") as session:
                    register_data_sources(session)
                    session.dataSource.register(BatchesAtHand)
                    servers = cluster.bootstrap_servers, proxy.bootstrap_servers
                    bench = Bench(console, session, home, proxy.config, *servers)
                    for one in data:
                        bench.run(one, given.rounds)
    except (ServerUnavailable, TimeoutError, RuntimeError) as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return 0


if __name__ == "__main__":
    run(main)
