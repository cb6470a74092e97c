"""`make bench`: measures the cost of Tidegate. Every figure through the proxy stands beside the same figure without it.

Direct and proxied runs take turns, and the table shows medians. CPU seconds per GiB are those of all processes of the
proxy. On a machine with other load they vary less than wall time. The remote tier is a folder, so its figures are those
of the page cache.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from bench import perf_tools
from bench.demo_producer import create_topic
from bench.ending import run
from bench.latency import TailProbe, percentile
from bench.offsets import EARLIEST, LATEST, list_offsets
from bench.perf_tools import MIB, Rate
from tests.support.servers.jars import ServerUnavailable
from tests.support.servers.kafka import KAFKA_VERSION, KafkaCluster
from tests.support.servers.tidegate import TidegateProcess, tidegate_over

PARTITIONS = 4
LOCAL, REMOTE, WRITTEN, TAIL = "bench-local", "bench-remote", "bench-written", "bench-tail"
SEGMENTS_PER_PARTITION = 16
MOVED_BEFORE_READING = 0.75
MOVE_TIMEOUT_S = 180.0
TAIL_S = 5.0
GIB_IN_MIB = 1024

BROKER_SETTINGS = {
    "log.retention.check.interval.ms": "1000",
    "log.segment.delete.delay.ms": "1000",
    "log.initial.task.delay.ms": "1000",
}


Work = Callable[[KafkaCluster, str, str, int], Rate]
"""Takes the cluster, the bootstrap servers, the topic and the size in MiB."""


@dataclass(slots=True)
class Case:
    """One line of the table: the same work, directly and through the proxy."""

    name: str
    direct: list[float] = field(default_factory=list)
    proxied: list[float] = field(default_factory=list)
    cpu_s_per_gib: list[float] = field(default_factory=list)

    def row(self) -> tuple[str, str, str, str, str]:
        direct, proxied = statistics.median(self.direct), statistics.median(self.proxied)
        cpu = statistics.median(self.cpu_s_per_gib)
        return self.name, f"{direct:.0f}", f"{proxied:.0f}", f"{proxied / direct:.2f}", f"{cpu:.2f}"


class Bench:
    def __init__(self, console: Console, cluster: KafkaCluster, proxy: TidegateProcess, mib: int, rounds: int) -> None:
        self.console = console
        self.cluster = cluster
        self.proxy = proxy
        self.mib = mib
        self.rounds = rounds
        self.moved_share = 0.0

    def run(self) -> None:
        cases = [
            Case(f"produce, {PARTITIONS} partitions"),
            Case("consume, local tier"),
            Case("consume, remote tier, against the broker's local"),
        ]
        with self.console.status("filling topics"):
            self.fill()
        for number in range(self.rounds):
            with self.console.status(f"round {number + 1} of {self.rounds}"):
                self.measure(cases[0], perf_tools.produce, WRITTEN, WRITTEN)
                self.measure(cases[1], perf_tools.consume, LOCAL, LOCAL)
                self.measure(cases[2], perf_tools.consume, LOCAL, REMOTE)
        with self.console.status("tail latency"):
            tails = self.tail_latencies()
        self.show(cases, tails)

    def fill(self) -> None:
        direct = self.cluster.bootstrap_servers
        for name in (LOCAL, REMOTE, WRITTEN):
            create_topic(direct, name, PARTITIONS, {"segment.bytes": str(segment_bytes(self.mib))})
        create_topic(direct, TAIL, 1, {})
        for name in (LOCAL, REMOTE):
            perf_tools.produce(self.cluster, direct, name, self.mib)
        deadline = time.monotonic() + MOVE_TIMEOUT_S
        while (moved := self.moved()) < MOVED_BEFORE_READING:
            if time.monotonic() > deadline:
                raise TimeoutError(f"only {moved:.0%} of a partition of the remote topic left the broker")
            time.sleep(0.5)
        self.moved_share = moved

    def moved(self) -> float:
        """Returns the share of the remote topic that has left the broker, for the partition with the smallest share."""
        partitions = range(PARTITIONS)
        starts = list_offsets(self.cluster.address(), REMOTE, partitions, EARLIEST)
        ends = list_offsets(self.cluster.address(), REMOTE, partitions, LATEST)
        return min(starts[partition] / max(1, ends[partition]) for partition in partitions)

    def measure(
        self, case: Case, work: Callable[[KafkaCluster, str, str, int], Rate], direct: str, proxied: str
    ) -> None:
        case.direct.append(work(self.cluster, self.cluster.bootstrap_servers, direct, self.mib).mib_per_s)
        before = self.proxy.cpu_seconds()
        rate = work(self.cluster, self.proxy.bootstrap_servers, proxied, self.mib)
        case.proxied.append(rate.mib_per_s)
        case.cpu_s_per_gib.append((self.proxy.cpu_seconds() - before) / rate.mib * GIB_IN_MIB)

    def tail_latencies(self) -> dict[str, list[float]]:
        tails: dict[str, list[float]] = {}
        for name, bootstrap in (("direct", self.cluster.bootstrap_servers), ("proxy", self.proxy.bootstrap_servers)):
            probe = TailProbe(bootstrap, TAIL)
            probe.start()
            try:
                time.sleep(TAIL_S)
                tails[f"{name}, quiet"] = probe.take()
                source = LOCAL if name == "direct" else REMOTE
                perf_tools.consume(self.cluster, bootstrap, source, self.mib)
                tails[f"{name}, beside a backfill"] = probe.take()
            finally:
                probe.stop()
            if probe.error is not None:
                raise RuntimeError(f"reading the tail failed: {probe.error}")
        return tails

    def show(self, cases: list[Case], tails: dict[str, list[float]]) -> None:
        table = Table(title=f"Kafka {KAFKA_VERSION}, {self.mib} MiB of 1 KiB records, medians of {self.rounds}")
        table.add_column("")
        for title in ("direct MiB/s", "Tidegate MiB/s", "ratio", "Tidegate CPU s/GiB"):
            table.add_column(title, justify="right")
        for case in cases:
            table.add_row(*case.row())
        self.console.print(table)
        self.console.print(
            f"At least {self.moved_share:.0%} of each partition of the remote topic had left the broker."
        )
        latency = Table(title="Tail: the time from producing one record to consuming it")
        latency.add_column("")
        for title in ("samples", "p50 ms", "p99 ms"):
            latency.add_column(title, justify="right")
        for name, samples in tails.items():
            p50, p99 = percentile(samples, 0.5), percentile(samples, 0.99)
            latency.add_row(name, str(len(samples)), f"{p50:.2f}", f"{p99:.2f}")
        self.console.print(latency)


def segment_bytes(mib: int) -> int:
    return max(mib * MIB // PARTITIONS // SEGMENTS_PER_PARTITION, MIB)


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__)
    arguments.add_argument("--mib", type=int, default=512, help="size of each topic, and of each run")
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--quick", action="store_true", help="run one round with 128 MiB")
    given = arguments.parse_args()
    mib, rounds = (128, 1) if given.quick else (given.mib, given.rounds)

    console = Console(width=None if sys.stdout.isatty() else 120)
    home = Path(tempfile.mkdtemp(prefix="tidegate-bench-"))
    try:
        with KafkaCluster(settings=BROKER_SETTINGS) as cluster:
            process = tidegate_over(cluster, home, tiered=[REMOTE], segment_bytes=segment_bytes(mib))
            with process as proxy:
                Bench(console, cluster, proxy, mib, rounds).run()
    except (ServerUnavailable, TimeoutError, RuntimeError) as error:
        console.print(str(error), style="red", highlight=False, markup=False, soft_wrap=True)
        return 1
    finally:
        shutil.rmtree(home, ignore_errors=True)
    return 0


if __name__ == "__main__":
    run(main)
