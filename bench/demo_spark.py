"""`make demo-spark`: Spark copies a topic's records into the remote tier, reads both tiers, exports and checks them.

A real Kafka runs on this machine, without a proxy. The exit code is 0 only if a query returned every produced record
with its key, value and timestamp, and every step had the expected result.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import shutil
import sys
import tempfile
import time
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient
from rich.console import Console

from bench import demo_producer
from bench.clients.librdkafka import LOG_ERRORS
from bench.demo import BROKER_SETTINGS, SMALLEST_MIB, DemoFailed, segment_bytes, size_mib
from bench.demo_records import ABORTED_PER_PARTITION, PARTITIONS, TOPIC, batches, key, records_per_partition, value
from bench.demo_view import MIB
from bench.ending import run
from bench.offsets import LATEST, list_offsets
from pipeline import cli
from pipeline.spark.session import open_session
from tests.support.servers.jars import ServerUnavailable
from tests.support.servers.kafka import KAFKA_VERSION, KafkaCluster
from tests.support.servers.tidegate import tidegate_over

FINGERPRINTS = """
    select partition, count(*) as records,
           sum(crc32(concat(key, value, cast(cast(unix_millis(timestamp) as string) as binary)))) as fingerprint
    from tiered group by partition order by partition
"""


class SparkDemo:
    def __init__(self, console: Console, cluster: KafkaCluster, config: Path, home: Path, mib: int) -> None:
        self.console = console
        self.cluster = cluster
        self.config = config
        self.home = home
        self.mib = mib
        self.records = records_per_partition(mib * MIB)
        *self.first_batches, self.last_batch = batches(self.records)
        self.first_timestamp_ms = int(time.time() * 1000) - self.records
        self.began = time.monotonic()

    def say(self, text: str) -> None:
        elapsed_s = time.monotonic() - self.began
        self.console.print(f"{elapsed_s:5.1f} s  {text}", highlight=False, markup=False, soft_wrap=True)

    def run(self) -> None:
        """Runs the whole demo. Raises `DemoFailed`."""
        self.produce()
        with open_session(name="tidegate demo"):  # the commands below run in this session
            self.trim(self.offload())
            self.produce_more()
            self.query()
            self.export()
            self.scrub()

    def command(self, name: str, *arguments: str) -> Any:
        """Runs `tidegate-pipeline NAME ... --json`, and returns its answer."""
        answer = io.StringIO()
        with contextlib.redirect_stdout(answer):
            code = cli.run([name, "--config", str(self.config), "--json", *arguments])
        if code != 0:
            raise DemoFailed(f"tidegate-pipeline {name} ended with exit code {code}: {answer.getvalue().strip()}")
        return json.loads(answer.getvalue())

    def produce(self) -> None:
        bootstrap = self.cluster.bootstrap_servers
        settings = {"segment.bytes": str(segment_bytes(self.mib)), "segment.ms": "10000"}
        demo_producer.create_topic(bootstrap, TOPIC, PARTITIONS, settings)
        produced = demo_producer.produce(bootstrap, self.first_batches, self.first_timestamp_ms, lambda _: None)
        self.say(
            f"{produced.records:,} records ({produced.value_bytes / MIB:.0f} MiB) produced to {PARTITIONS} partitions; "
            f"{produced.aborted:,} more in a transaction that was aborted"
        )

    def produce_more(self) -> None:
        """Produces records that only the broker has, so that a query needs both tiers."""
        bootstrap = self.cluster.bootstrap_servers
        produced = demo_producer.produce(bootstrap, [self.last_batch], self.first_timestamp_ms, lambda _: None)
        self.say(f"{produced.records:,} more records produced, which only the broker has")

    def offload(self) -> dict[int, int]:
        """Copies the records, and returns the exclusive end of each partition's remote tier."""
        began = time.monotonic()
        # The newest records of each partition stay on the broker, as they do while producers are running.
        found = self.command("offload", "--topics", TOPIC, "--max-age", "1h")["partitions"]
        remote = {each["partition"]: each["next_offset"] for each in found}
        if len(remote) != PARTITIONS or not all(remote.values()):
            raise DemoFailed(f"not every partition was offloaded: {remote}")
        segments, size_bytes = (sum(each[what] for each in found) for what in ("segments", "log_bytes"))
        self.say(
            f"offload: {segments} segments with {size_bytes / MIB:.0f} MiB copied and verified "
            f"({time.monotonic() - began:.1f} s)"
        )
        return remote

    def trim(self, remote: dict[int, int]) -> None:
        """Deletes the copied records from the broker, as a proxy does."""
        admin = AdminClient({"bootstrap.servers": self.cluster.bootstrap_servers, "log_level": LOG_ERRORS})
        wanted = [TopicPartition(TOPIC, partition, offset) for partition, offset in remote.items()]
        for trimmed in admin.delete_records(wanted).values():
            trimmed.result(30)
        ends = list_offsets(self.cluster.address(), TOPIC, range(PARTITIONS), LATEST)
        left = sum(ends.values()) - sum(remote.values())
        self.say(f"trimmed: {sum(remote.values()):,} offsets are only in the remote tier, {left:,} on the broker")

    def query(self) -> None:
        began = time.monotonic()
        seen = self.command(
            "sql", "--topics", TOPIC, "--option", "kafka.isolation.level=read_committed", " ".join(FINGERPRINTS.split())
        )
        seconds = time.monotonic() - began
        expected = [
            {"partition": partition, "records": self.records, "fingerprint": self.fingerprint(partition)}
            for partition in range(PARTITIONS)
        ]
        if seen != expected:
            raise DemoFailed(f"the query returned {seen} instead of {expected}")
        self.say(
            f"a DataFrame over both tiers: keys, values and timestamps of all {self.records * PARTITIONS:,} records "
            f"match; none of the {ABORTED_PER_PARTITION * PARTITIONS:,} aborted records was read ({seconds:.1f} s)"
        )

    def fingerprint(self, partition: int) -> int:
        each = (
            key(partition, number) + value(partition, number) + b"%d" % (self.first_timestamp_ms + number)
            for number in range(self.records)
        )
        return sum(map(zlib.crc32, each))

    def export(self) -> None:
        began = time.monotonic()
        target = self.home / "export"
        self.command("export", "--topic", TOPIC, "--to", str(target))
        files = sorted(target.rglob("*.parquet"))
        rows = sum(pq.read_metadata(file).num_rows for file in files)
        if rows != self.records * PARTITIONS:
            raise DemoFailed(f"{rows:,} of {self.records * PARTITIONS:,} records were exported")
        size_bytes = sum(file.stat().st_size for file in files)
        self.say(
            f"export: {rows:,} records in {len(files)} Parquet files with {size_bytes / MIB:.0f} MiB in total "
            f"({time.monotonic() - began:.1f} s)"
        )

    def scrub(self) -> None:
        began = time.monotonic()
        report = self.command("scrub", "--level", "deep")
        self.say(
            f"scrub: {report['segments']} segments, {report['batches']:,} batches, {report['records']:,} records read "
            f"back from the store, {len(report['findings'])} findings ({time.monotonic() - began:.1f} s)"
        )


@contextlib.contextmanager
def servers(console: Console, mib: int) -> Iterator[tuple[KafkaCluster, Path, Path]]:
    """Runs Kafka. Also yields the settings file that a proxy before it would use, and the remote tier's folder."""
    home = Path(tempfile.mkdtemp(prefix="tidegate-demo-"))
    try:
        console.print(f"starting Kafka {KAFKA_VERSION}", highlight=False)
        with KafkaCluster(settings=BROKER_SETTINGS) as cluster:
            proxy = tidegate_over(cluster, home, tiered=[TOPIC], segment_bytes=segment_bytes(mib))
            try:
                yield cluster, proxy.config, home
            finally:
                proxy.stop()  # the proxy was never started: this removes its file
    finally:
        shutil.rmtree(home, ignore_errors=True)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--mib", type=size_mib, default=64, help=f"how many MiB to produce, at least {SMALLEST_MIB}")
    given = arguments.parse_args()

    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        with servers(console, given.mib) as (cluster, config, home):
            SparkDemo(console, cluster, config, home, given.mib).run()
    except (ServerUnavailable, DemoFailed, TimeoutError) as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    return 0


if __name__ == "__main__":
    run(main)
