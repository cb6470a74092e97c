"""Runs Kafka's own performance tools as processes, and parses their output."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass

from tests.support.servers.kafka import CONSUMER_PERFORMANCE, PRODUCER_PERFORMANCE, KafkaCluster

MIB = 1 << 20
RECORD_BYTES = 1024
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class Rate:
    mib: float
    seconds: float

    @property
    def mib_per_s(self) -> float:
        return self.mib / self.seconds


def produce(cluster: KafkaCluster, bootstrap: str, topic: str, mib: int) -> Rate:
    """Writes uncompressed records of 1 KiB with acks=all, as fast as the Java producer can."""
    records = mib * MIB // RECORD_BYTES
    done = cluster.run_tool(
        PRODUCER_PERFORMANCE,
        *("--topic", topic, "--num-records", str(records), "--record-size", str(RECORD_BYTES), "--throughput", "-1"),
        *("--producer-props", f"bootstrap.servers={bootstrap}", "acks=all", "linger.ms=5", "batch.size=65536"),
        timeout_s=TIMEOUT_S,
    )
    # "524288 records sent, 81234.5 records/sec (79.33 MB/sec), 12.34 ms avg latency, ..."
    found = re.findall(r"^(\d+) records sent, ([\d.]+) records/sec", done.stdout, re.MULTILINE)
    if not found or int(found[-1][0]) != records:
        raise RuntimeError(f"the producer did not send all {records} records: {done.stdout[-500:]}{done.stderr[-500:]}")
    return Rate(float(mib), records / float(found[-1][1]))


def consume(cluster: KafkaCluster, bootstrap: str, topic: str, mib: int) -> Rate:
    """Reads with the Java consumer from the earliest offset. The time to join the group does not count."""
    records = mib * MIB // RECORD_BYTES
    done = cluster.run_tool(
        CONSUMER_PERFORMANCE,
        *("--bootstrap-server", bootstrap, "--topic", topic, "--num-records", str(records)),
        *("--group", f"bench-{uuid.uuid4().hex[:8]}", "--timeout", "60000"),
        timeout_s=TIMEOUT_S,
    )
    header, values = [line.split(", ") for line in done.stdout.splitlines() if ", " in line][-2:]
    seen = dict(zip(header, values, strict=True))
    if int(seen["data.consumed.in.nMsg"]) < records:
        raise RuntimeError(f"only {seen['data.consumed.in.nMsg']} of {records} records arrived: {done.stderr[-500:]}")
    return Rate(float(seen["data.consumed.in.MB"]), int(seen["fetch.time.ms"]) / 1000)
