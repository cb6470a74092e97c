"""What does it cost to pass an answer of 100 partitions through, by the size of each partition's records?

`Fetch` is a client that looks at no record, so that its rate is that of what answers it. `consume` and `ShareFetch` are
Kafka's own tools (`kafka-consumer-perf-test`, `kafka-share-consumer-perf-test`). All read a topic that is not tiered.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from bench.clients.fetch_reader import FetchReader
from bench.clients.java_tools import MIB, Rate, new_group
from bench.command import parser_of, question_of, run_scenarios
from bench.ending import run as end_with
from bench.measure.processes import Watch, machine
from bench.measure.results import ScenarioResult, reading
from bench.measure.statistics import amount_between
from bench.rig.relays import Way, ways
from bench.rig.stage import BROKER, Stage, processes_of
from tests.support.clients.share_member import start_at_earliest

GIB = 1024.0
TOPIC = "sizes"
PARTITIONS = 100
PARTITION_BYTES = (8_000, 30_000, 60_000, MIB)
TOPIC_MIB = 120
"""A partition has more than 1 MiB."""
SHARED_MIB = 40
"""A share group gets about 15 MiB/s."""
SMALL_BATCHES = {"acks": "1", "linger.ms": "20", "batch.size": "4096"}
"""A broker sends no part of the first batch of a partition, so a batch must be smaller than what is asked for."""
WARM_UP_S = 0.5
WINDOW_S = 2.0

Measured = tuple[Rate, Watch]


def fetch(stage: Stage, way: Way, partition_bytes: int) -> Measured:
    with FetchReader(way.port, TOPIC, PARTITIONS, partition_bytes) as reader:
        reader.wait_for_lines()
        time.sleep(WARM_UP_S)
        began = time.monotonic()
        with Watch({"relay": way.processes, "broker": processes_of(stage.kafka)}) as watch:
            time.sleep(WINDOW_S)
        ended = time.monotonic()
        reader.wait_for_lines()
        time.sleep(0.2)  # the reports of the last tenth of a second
        lines = [(line[0], line[1]) for line in reader.take()]
    return Rate(amount_between(lines, began, ended) / MIB, ended - began), watch


def consume(stage: Stage, way: Way, partition_bytes: int) -> Measured:
    asked = {"max.partition.fetch.bytes": partition_bytes, "fetch.max.bytes": PARTITIONS * partition_bytes}
    with Watch({"relay": way.processes, "broker": processes_of(stage.kafka)}) as watch:
        rate = stage.java.consume(way.bootstrap, TOPIC, TOPIC_MIB, {key: str(value) for key, value in asked.items()})
    return rate, watch


def share_fetch(stage: Stage, way: Way, partition_bytes: int) -> Measured:
    group = new_group()
    start_at_earliest(stage.kafka.bootstrap_servers, group)
    with Watch({"relay": way.processes, "broker": processes_of(stage.kafka)}) as watch:
        rate = stage.java.consume_shared(way.bootstrap, TOPIC, SHARED_MIB, group, PARTITIONS * partition_bytes)
    return rate, watch


APIS: dict[str, Callable[[Stage, Way, int], Measured]] = {"Fetch": fetch, "consume": consume, "ShareFetch": share_fetch}


def run(stage: Stage) -> ScenarioResult:
    result = ScenarioResult(__name__.rpartition(".")[2], question_of(__doc__))
    stage.topic(stage.kafka, TOPIC, PARTITIONS)
    stage.java.produce(stage.kafka.bootstrap_servers, TOPIC, TOPIC_MIB, SMALL_BATCHES)
    with ways(stage, result.notes) as found:
        for api, measure in APIS.items():
            for number in range(min(2, stage.size.rounds)):
                for partition_bytes in PARTITION_BYTES:
                    case = f"{api}, {'1 MiB' if partition_bytes == MIB else f'{partition_bytes // 1000} kB'}"
                    add_round(result, case, number, {way.name: measure(stage, way, partition_bytes) for way in found})
    result.notes.append(
        "ShareFetch: a relay's CPU seconds have those of joining the group, and of several seconds of idling."
    )
    here = machine()
    result.notes.append(f"The machine: {here['processor']}, {here['cores']} cores.")
    return result


def add_round(result: ScenarioResult, case: str, number: int, measured: dict[str, Measured]) -> None:
    direct_mib_per_s = measured[BROKER][0].mib_per_s
    for name, (rate, watch) in measured.items():
        cpu_s = watch.span.cpu_s
        figures = {"mib_per_s": rate.mib_per_s, "broker_cpu_s_per_gib": cpu_s["broker"] / rate.mib * GIB}
        if name != BROKER:
            figures["relay_cpu_s_per_gib"] = cpu_s["relay"] / rate.mib * GIB
            figures["rate_of_direct"] = rate.mib_per_s / direct_mib_per_s
        result.readings.append(reading(case, name, number, figures, watch.span))


def main() -> int:
    return run_scenarios([run], parser_of(__doc__).parse_args())


if __name__ == "__main__":
    end_with(main)
