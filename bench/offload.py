"""Measures how many megabytes of log per second an offload copies on one core, and how much a second core adds:

    python -m bench.offload [--mib 512] [--batch-kib 64]

The benchmark uses one broker, a topic with four partitions, and a folder as the store. An offload reads the log, builds
segments, stores them and reads them back. The broker runs on the same cores and takes a part of the wall time, so the
benchmark also shows the CPU time of the Python processes that copy.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from confluent_kafka import Producer

from bench.ending import run
from pipeline.config import parse_pipeline_config
from pipeline.offload.driver import OffloadOptions
from pipeline.offload.job import run_offload
from pipeline.offload.task import OffloadResult, OffloadTask, copy_tiles
from pipeline.spark.job import run_tasks
from pipeline.spark.session import open_session
from tests.support.pipeline.offload_rig import offload_rig
from tests.support.servers.kafka import KafkaCluster
from tests.support.servers.producing import create_topic

PARTITIONS = 4
TARGET_MB_PER_CORE = 250
TARGET_EFFICIENCY = 0.8


@dataclass(frozen=True)
class Measured:
    log_bytes: int
    seconds: float
    cpu_seconds: float
    whole_seconds: float

    @property
    def rate(self) -> float:
        return self.log_bytes / self.seconds / 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--batch-kib", type=int, default=64)
    options = parser.parse_args()
    with KafkaCluster() as kafka, tempfile.TemporaryDirectory(prefix="bench-offload-") as name:
        create_topic(kafka.bootstrap_servers, "orders", partitions=PARTITIONS)
        fill(kafka, options.mib << 20, options.batch_kib << 10)
        print(f"load average {os.getloadavg()[0]:.1f}, {os.cpu_count()} cores, {options.mib} MiB of log")
        print(f"{'master':10} {'MB/s':>7} {'MB per CPU second':>18} {'whole run s':>12}")
        measured = {}
        for cores in (1, 2):
            one = measured[cores] = measure(kafka, Path(name), cores)
            cpu_rate = one.log_bytes / one.cpu_seconds / 1e6
            print(f"{f'local[{cores}]':10} {one.rate:7.0f} {cpu_rate:18.0f} {one.whole_seconds:12.1f}")
        efficiency = measured[2].rate / measured[1].rate / 2
        by_cpu = measured[1].cpu_seconds / measured[2].cpu_seconds
        print(f"efficiency from one to two cores: {efficiency:.2f} by the clock, {by_cpu:.2f} by CPU time")
        print(f"targets: {TARGET_MB_PER_CORE} MB per core and second, {TARGET_EFFICIENCY}")


def fill(kafka: KafkaCluster, size_bytes: int, batch_bytes: int) -> None:
    settings = {"bootstrap.servers": kafka.bootstrap_servers, "linger.ms": 1000, "batch.size": batch_bytes}
    producer = Producer({**settings, "queue.buffering.max.kbytes": 256 << 10, "acks": "1"})
    value = os.urandom(1 << 20)
    for number in range(size_bytes >> 10):
        start = number % 1023 << 10
        while True:
            try:
                producer.produce("orders", value[start : start + 1024], partition=number % PARTITIONS)
                break
            except BufferError:
                producer.poll(0.1)
    producer.flush(120)


def measure(kafka: KafkaCluster, home: Path, cores: int) -> Measured:
    folder = home / f"local-{cores}"
    folder.mkdir()
    rig = offload_rig(kafka, folder, f"orders{cores}")
    text = rig.text.replace(f'name = "orders{cores}*"', 'name = "orders"').replace("= 60000", '= "64MiB"')
    seconds = 0.0
    with open_session(f"local[{cores}]") as session:
        run_tasks(session, "start", list(range(cores)), warmed)

        def run(tasks: Sequence[OffloadTask]) -> list[OffloadResult]:
            nonlocal seconds
            began_s = time.monotonic()
            results = run_tasks(session, "offload", tasks, copy_tiles)
            seconds += time.monotonic() - began_s
            return results

        report = run_offload(parse_pipeline_config(text), OffloadOptions(max_age_ms=0), run, cores)
    shutil.rmtree(folder)
    return Measured(report.log_bytes, seconds, report.cpu_seconds, report.seconds)


def warmed(number: int) -> int:
    """A task that only imports the modules that an offload task needs."""
    return number + len(copy_tiles.__name__)


if __name__ == "__main__":
    run(main)
