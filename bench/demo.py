"""`make demo`: an unmodified consumer reads, through Tidegate, records that the broker no longer has.

Everything is real and runs on this machine: Kafka, `tidegate serve` and the consumers are processes of their own. The
exit code is 0 only if every produced record came back byte for byte, in order, exactly once.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import kafka
from rich.console import Console
from rich.table import Table

from bench import demo_producer
from bench.clients.librdkafka import Target
from bench.clients.seeks import first_records
from bench.clients.tail_probe import TailProbe
from bench.demo_reader import CLIENTS, Result
from bench.demo_records import ABORTED_PER_PARTITION, PARTITIONS, TOPIC, batches, records_per_partition
from bench.demo_view import MIB, PartitionTiers, TierState, TierView, folder_bytes
from bench.ending import run
from bench.measure.statistics import percentile
from bench.offsets import EARLIEST, LATEST, LATEST_TIERED, list_offsets
from tests.support.servers.jars import ServerUnavailable
from tests.support.servers.kafka import KAFKA_VERSION, KafkaCluster
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

TAIL_TOPIC = "tail"
SMALLEST_SEGMENT_BYTES, LARGEST_SEGMENT_BYTES = 1 * MIB, 4 * MIB
SEGMENTS = 64
SMALLEST_MIB = 24
"""With fewer MiB, too few segments of a partition are full, so too little of it can leave the broker."""
MOVED_BEFORE_READING = 0.75
MOVE_TIMEOUT_S = 180.0
QUIET_S = 2.0
SEEKS = 60
TAIL_RATE_PER_S = 100.0

BROKER_SETTINGS = {
    "log.retention.check.interval.ms": "1000",
    "log.segment.delete.delay.ms": "1000",
    "log.initial.task.delay.ms": "1000",
}


class DemoFailed(Exception):
    """The message says what was expected and what was seen."""


class Demo:
    def __init__(self, console: Console, cluster: KafkaCluster, proxy: TidegateProcess, tier: Path, mib: int) -> None:
        self.console = console
        self.cluster = cluster
        self.proxy = proxy
        self.tier = tier
        self.segment_bytes = segment_bytes(mib)
        self.records = records_per_partition(mib * MIB)
        self.first_timestamp_ms = int(time.time() * 1000) - self.records
        self.began = time.monotonic()

    def elapsed_s(self) -> float:
        return time.monotonic() - self.began

    def say(self, text: str) -> None:
        self.console.print(f"{self.elapsed_s():5.1f} s  {text}", highlight=False, markup=False, soft_wrap=True)

    def run(self) -> bool:
        """Runs the whole demo, and returns whether every record matched."""
        local_starts = self.fill_and_wait()
        self.show_out_of_range()
        with TailProbe(Target(self.proxy.bootstrap_servers, TAIL_TOPIC), TAIL_RATE_PER_S) as tail:
            tail.wait_for_lines()
            time.sleep(QUIET_S)
            quiet = tail.samples()
            results = [self.read_with(client, local_starts) for client in CLIENTS]
            busy = tail.samples()
        drawn = random.Random(917)
        places = [(p, drawn.randrange(start)) for p, start in drawn.choices(sorted(local_starts.items()), k=SEEKS + 1)]
        seeks = first_records(Target(self.proxy.bootstrap_servers, TOPIC), places)
        tails = {
            "tail, quiet": [one.consume_ms for one in quiet],
            "tail, beside the backfills": [one.consume_ms for one in busy],
        }
        self.show_figures(results, tails, seeks)
        verdicts = [self.verdict(result) for result in results]
        return all(verdicts)

    def fill_and_wait(self) -> dict[int, int]:
        """Produces the records, and waits until most of every partition has left the broker.

        Returns the broker's log start offset of each partition."""
        bootstrap = self.proxy.bootstrap_servers
        demo_producer.create_topic(bootstrap, TOPIC, PARTITIONS, {"segment.bytes": str(self.segment_bytes)})
        demo_producer.create_topic(bootstrap, TAIL_TOPIC, 1, {})
        with TierView(self.console, self.elapsed_s) as view:
            shown_at = 0.0

            def progress(produced: demo_producer.Produced) -> None:
                nonlocal shown_at
                if time.monotonic() - shown_at > 0.5:
                    view.show(self.tiers(), f"producing: {produced.value_bytes / MIB:.0f} MiB")
                    shown_at = time.monotonic()

            produced = demo_producer.produce(bootstrap, batches(self.records), self.first_timestamp_ms, progress)
            deadline = time.monotonic() + MOVE_TIMEOUT_S
            while (state := self.tiers()).least_moved < MOVED_BEFORE_READING:
                view.show(state, "waiting for segments to move")
                if time.monotonic() > deadline:
                    raise DemoFailed(f"only {state.least_moved:.0%} of a partition left the broker")
                time.sleep(0.5)
            view.show(state, "enough has moved", always=True)
        self.say(
            f"{produced.records:,} records ({produced.value_bytes / MIB:.0f} MiB) produced through the proxy, "
            f"some of them compressed; {produced.aborted:,} more in a transaction that was aborted"
        )
        return list_offsets(self.cluster.address(), TOPIC, range(PARTITIONS), EARLIEST)

    def tiers(self) -> TierState:
        partitions = range(PARTITIONS)
        ends = list_offsets(self.cluster.address(), TOPIC, partitions, LATEST)
        starts = list_offsets(self.cluster.address(), TOPIC, partitions, EARLIEST)
        remote = list_offsets(self.proxy.address, TOPIC, partitions, LATEST_TIERED)
        each = [PartitionTiers(p, ends.get(p, 0), starts.get(p, 0), remote.get(p, -1) + 1) for p in partitions]
        folders = [self.cluster.log_folder(TOPIC, partition) for partition in partitions]
        broker_bytes = sum(folder_bytes(folder, "*.log")[1] for folder in folders)
        segments, tier_bytes = folder_bytes(self.tier, "*.log")
        return TierState(each, broker_bytes, tier_bytes, segments)

    def show_out_of_range(self) -> None:
        """Shows, with a consumer that bypasses the proxy, that the broker alone does not have offset 0."""
        consumer = kafka.KafkaConsumer(bootstrap_servers=self.cluster.bootstrap_servers, auto_offset_reset="none")
        partition = kafka.TopicPartition(TOPIC, 0)
        consumer.assign([partition])
        consumer.seek(partition, 0)
        try:
            polled = consumer.poll(timeout_ms=60_000)  # returns as soon as the answer is there
        except kafka.errors.OffsetOutOfRangeError:
            self.say("the broker alone answers OFFSET_OUT_OF_RANGE for offset 0")
        else:
            raise DemoFailed(f"the broker alone still has offset 0: {polled}")
        finally:
            consumer.close()

    def read_with(self, client: str, local_starts: dict[int, int]) -> Result:
        """Runs a reader to its end, and shows its progress."""
        command = [sys.executable, "-m", "bench.demo_reader", "--client", client]
        command += ["--bootstrap", self.proxy.bootstrap_servers, "--records", str(self.records)]
        command += ["--first-timestamp-ms", str(self.first_timestamp_ms), "--local-starts", json.dumps(local_starts)]
        result = Result(client, error="the reader ended without a result")
        with (
            subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process,
            self.console.status(f"{client} reads from offset 0") as status,
        ):
            try:
                for line in process.stdout or ():
                    result = Result(**json.loads(line))
                    status.update(f"{client}: {result.read:,} of {self.records * PARTITIONS:,} records read")
            except BaseException:
                process.kill()
                raise
        if process.returncode != 0 and result.error is None:
            result.error = f"the reader ended with exit code {process.returncode}"
        self.say(f"{client} read {result.read:,} records in {result.seconds:.1f} s")
        return result

    def show_figures(self, results: list[Result], tails: dict[str, list[float]], seeks: list[float]) -> None:
        table = Table(title="Through Tidegate")
        table.add_column("")
        for title in ("records", "from remote", "MiB/s", "p50 ms", "p99 ms"):
            table.add_column(title, justify="right")
        for result in results:
            rate = result.value_bytes / MIB / result.seconds if result.seconds else 0.0
            remote = f"{result.from_remote_tier:,}"
            table.add_row(f"backfill, {result.client}", f"{result.read:,}", remote, f"{rate:.1f}", "", "")
        count = f"{len(seeks):,}"
        table.add_row("first record after a seek", count, count, "", *_percentiles(seeks))
        for name, samples in tails.items():
            table.add_row(name, f"{len(samples):,}", "0", "", *_percentiles(samples))
        table.caption = "tail: the time from producing one record to consuming it"
        self.console.print(table)

    def verdict(self, result: Result) -> bool:
        wanted = self.records * PARTITIONS
        matched = result.done and not result.mismatches and result.error is None and result.from_remote_tier > 0
        if matched:
            share = math.floor(result.from_remote_tier / wanted * 100)
            self.say(
                f"{result.client}: all {wanted:,} records match what was produced, {share}% of them from the remote "
                f"tier; none of the {ABORTED_PER_PARTITION * PARTITIONS:,} aborted records was delivered"
            )
        else:
            why = result.error or result.mismatches or f"{result.from_remote_tier:,} of them from the remote tier"
            self.say(f"{result.client} FAILED: {result.read:,} of {wanted:,} records; {why}")
        return matched


def kept_running(cluster: KafkaCluster, proxy: TidegateProcess) -> str:
    """Returns what a user can try while the demo runs. The command runs from any folder."""
    program = Path(sys.executable).with_name("tidegate")
    return (
        f"Point any client at {proxy.bootstrap_servers} (topic {TOPIC}). The broker alone listens at "
        f"{cluster.bootstrap_servers}.\n"
        f"Look at both tiers in a browser: http://{proxy.admin[0]}:{proxy.admin[1]}/\n"
        f"The configuration file of Tidegate: {proxy.config}\n"
        f"Look at the tiers: {program} tier bounds {TOPIC} --config {proxy.config}\n"
        "Ctrl-C ends the demo."
    )


def segment_bytes(mib: int) -> int:
    """Returns a segment size at which most of every partition can leave the broker, which keeps the newest segment."""
    return min(max(mib * MIB // SEGMENTS, SMALLEST_SEGMENT_BYTES), LARGEST_SEGMENT_BYTES)


def size_mib(text: str) -> int:
    """Returns the number of MiB of an option. Raises `argparse.ArgumentTypeError`."""
    if not text.isdecimal() or int(text) < SMALLEST_MIB:
        raise argparse.ArgumentTypeError(f"expected a number of MiB from {SMALLEST_MIB} on, not {text!r}")
    return int(text)


def _percentiles(samples: list[float]) -> tuple[str, str]:
    return f"{percentile(samples, 0.5):.1f}", f"{percentile(samples, 0.99):.1f}"


@contextlib.contextmanager
def servers(console: Console, mib: int) -> Iterator[tuple[KafkaCluster, TidegateProcess, Path]]:
    """Runs Kafka, and Tidegate with a file-system tier. Also yields the tier's folder."""
    home = Path(tempfile.mkdtemp(prefix="tidegate-demo-"))
    try:
        console.print(f"starting Kafka {KAFKA_VERSION} and Tidegate", highlight=False)
        with KafkaCluster(settings=BROKER_SETTINGS) as cluster:
            size = segment_bytes(mib)
            # The broker keeps a little, so that every read crosses from the remote tier to the local tier.
            process = tidegate_over(cluster, home, tiered=[TOPIC], segment_bytes=size, local_retention_bytes=size // 4)
            with process as proxy:
                yield cluster, proxy, home / "tier"
    finally:
        shutil.rmtree(home, ignore_errors=True)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument(
        "--mib", type=size_mib, default=256, help=f"how many MiB to produce, at least {SMALLEST_MIB}"
    )
    arguments.add_argument("--keep", action="store_true", help="leave everything running until Ctrl-C")
    given = arguments.parse_args()

    console = Console(width=None if sys.stdout.isatty() else 120)
    try:
        with servers(console, given.mib) as (cluster, proxy, tier):
            matched = Demo(console, cluster, proxy, tier, given.mib).run()
            if given.keep:
                console.print(kept_running(cluster, proxy), highlight=False, markup=False, soft_wrap=True)
                with contextlib.suppress(KeyboardInterrupt):
                    while True:
                        time.sleep(3600)
    except (ServerUnavailable, DemoFailed, TimeoutError) as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    return 0 if matched else 1


if __name__ == "__main__":
    run(main)
