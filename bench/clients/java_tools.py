"""Runs Kafka's own performance tools, and parses their output.

A `JavaTools` is one Java process that runs them one after the other. So the start of a process and of Java's compiler
does not count, as it would not in a consumer that runs for hours.
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass

from tests.support.clients.kafka_tools import KafkaTools
from tests.support.servers.kafka import FULLY_COMPILED

MIB = 1 << 20
RECORD_BYTES = 1024
HEAP_MIB = 1024
FILL = {"acks": "1", "linger.ms": "20", "batch.size": str(256 << 10)}
"""The settings of a producer that fills a topic, which is not measured."""
MEASURED = {"acks": "all", "linger.ms": "5", "batch.size": str(64 << 10)}


@dataclass(frozen=True, slots=True)
class Rate:
    mib: float
    seconds: float

    @property
    def mib_per_s(self) -> float:
        return self.mib / self.seconds


class JavaTools(KafkaTools):
    """A context manager would be too much: the process ends with this one, or with `stop`."""

    def __init__(self) -> None:
        super().__init__(options=FULLY_COMPILED, heap_mib=HEAP_MIB)

    def produce(self, bootstrap: str, topic: str, mib: float, settings: Mapping[str, str] = MEASURED) -> Rate:
        """Writes uncompressed records of 1 KiB as fast as the Java producer can."""
        records = int(mib * MIB) // RECORD_BYTES
        # This tool takes all properties behind one option, and ignores all but the last option.
        properties = ["--command-property", *(f"{key}={value}" for key, value in settings.items())]
        sizes = ("--num-records", str(records), "--record-size", str(RECORD_BYTES), "--throughput", "-1")
        done = self.run("kafka-producer-perf-test", bootstrap, "--topic", topic, *sizes, *properties)
        # "524288 records sent, 81234.5 records/sec (79.33 MB/sec), 12.34 ms avg latency, ..."
        found = re.findall(r"^(\d+) records sent, ([\d.]+) records/sec", done.output, re.MULTILINE)
        if not found or int(found[-1][0]) != records:
            raise RuntimeError(f"the producer did not send all {records} records: {done.output[-500:]}{done.errors}")
        return Rate(records * RECORD_BYTES / MIB, records / float(found[-1][1]))

    def consume(self, bootstrap: str, topic: str, mib: float, settings: Mapping[str, str] | None = None) -> Rate:
        """Reads with the Java consumer from the earliest offset. The time to join the group does not count."""
        return self._consume("kafka-consumer-perf-test", bootstrap, topic, mib, new_group(), settings or {})

    def consume_shared(self, bootstrap: str, topic: str, mib: float, group: str, fetch_bytes: int) -> Rate:
        """Reads with a Java share consumer that asks for so many bytes at a time, of all partitions alike."""
        asked = {"fetch.max.bytes": str(fetch_bytes), "max.poll.records": str(fetch_bytes // RECORD_BYTES)}
        return self._consume("kafka-share-consumer-perf-test", bootstrap, topic, mib, group, asked)

    def _consume(
        self, tool: str, bootstrap: str, topic: str, mib: float, group: str, settings: Mapping[str, str]
    ) -> Rate:
        records = int(mib * MIB) // RECORD_BYTES
        options = ("--num-records", str(records), "--group", group, "--timeout", "60000")
        properties = [word for key, value in settings.items() for word in ("--command-property", f"{key}={value}")]
        done = self.run(tool, bootstrap, "--topic", topic, *options, *properties)
        lines = [line.split(", ") for line in done.output.splitlines() if ", " in line]
        if len(lines) < 2:
            raise RuntimeError(f"the consumer failed: {done.output[-500:]}{done.errors[-1500:]}")
        seen = dict(zip(*lines[-2:], strict=True))
        if int(seen["data.consumed.in.nMsg"]) < records:
            raise RuntimeError(f"only {seen['data.consumed.in.nMsg']} of {records} records arrived: {done.errors}")
        return Rate(float(seen["data.consumed.in.MB"]), int(seen["fetch.time.ms"]) / 1000)


def new_group() -> str:
    """Returns the name of a group that no other run has."""
    return f"bench-{uuid.uuid4().hex[:8]}"
