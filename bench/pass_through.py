"""What does it cost to pass records through, by the relay: CPU seconds per GiB, plain text and TLS?

The Java tools (`kafka-producer-perf-test`, `kafka-consumer-perf-test`) write and read a topic of four partitions that
is not tiered. Eight consumers are librdkafka, each in a process of its own. With TLS, a relay decrypts and encrypts on
both sides, with the same cipher. haproxy looks at no byte, so it is the floor.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import ExitStack

from bench.clients.backfill_reader import BackfillReader, Range
from bench.clients.java_tools import MEASURED, MIB, Rate
from bench.clients.librdkafka import Target
from bench.command import parser_of, question_of, run_scenarios
from bench.ending import run as end_with
from bench.measure.processes import Watch, resident_mib, tree
from bench.measure.results import ScenarioResult, reading
from bench.measure.statistics import amount_between, spread_begin
from bench.rig.relays import CIPHER_NOTE, Way, ways
from bench.rig.stage import BROKER, Stage, end_offset, processes_of

GIB = 1024.0
PARTITIONS = 4
CONSUMERS = 8
WRITTEN = "written"
WARM_UP_S = 0.5
WINDOW_S = 2.0


def produce(stage: Stage, way: Way) -> Callable[[], Rate]:
    return lambda: stage.java.produce(way.bootstrap, WRITTEN, stage.size.passed_mib, {**MEASURED, **way.java})


def consume(stage: Stage, way: Way) -> Callable[[], Rate]:
    return lambda: stage.java.consume(way.bootstrap, stage.passed_topic, stage.size.passed_mib, way.java)


def measure(result: ScenarioResult, stage: Stage, case: str, way: Way, number: int, work: Callable[[], Rate]) -> None:
    """Adds the rate of a work and the CPU seconds that it took, of the relay, the broker and the client."""
    servers = {"relay": way.processes, "broker": processes_of(stage.kafka), "client": lambda: tree(stage.java.pid)}
    with Watch(servers) as watch:
        rate = work()
    add(result, case, way, number, watch, rate)


def measure_eight(result: ScenarioResult, stage: Stage, case: str, way: Way, number: int) -> None:
    """The same for consumers that run for a while. They start before the measurement."""
    with ExitStack() as stack:
        readers = []
        for index in range(CONSUMERS):
            partition = index % PARTITIONS
            over = Range(partition, 0, end_offset(stage.kafka, stage.passed_topic, partition))
            target = Target(way.bootstrap, stage.passed_topic, way.librdkafka)
            reader = BackfillReader(target, over, spread_begin(index // PARTITIONS))
            readers.append(stack.enter_context(reader))
        for reader in readers:
            reader.wait_for_lines()
        time.sleep(WARM_UP_S)
        servers = {
            "relay": way.processes,
            "broker": processes_of(stage.kafka),
            "client": lambda: [reader.pid for reader in readers],
        }
        began = time.monotonic()
        with Watch(servers) as watch:
            time.sleep(WINDOW_S)
        ended = time.monotonic()
        time.sleep(0.2)  # the reports of the last tenth of a second
        progress = [[(line[0], line[1]) for line in reader.take()] for reader in readers]
    done = sum(amount_between(one, began, ended) for one in progress)
    add(result, case, way, number, watch, Rate(done / MIB, ended - began))


def add(result: ScenarioResult, case: str, way: Way, number: int, watch: Watch, rate: Rate) -> None:
    figures = {"mib_per_s": rate.mib_per_s}
    for name, cpu_s in watch.span.cpu_s.items():
        if way.name != BROKER or name != "relay":
            figures[f"{name}_cpu_s_per_gib"] = cpu_s / rate.mib * GIB
    if way.name != BROKER:
        figures["relay_mib"] = resident_mib(way.processes())
    result.readings.append(reading(case, way.name, number, figures, watch.span))


def run(stage: Stage) -> ScenarioResult:
    result = ScenarioResult(__name__.rpartition(".")[2], question_of(__doc__))
    stage.topic(stage.kafka, WRITTEN, PARTITIONS)
    for tls in (False, True):
        kind = ", TLS" if tls else ""
        with ways(stage, result.notes, tls=tls) as found:
            for work in (produce, consume):  # Java compiles its hot paths
                work(stage, found[0])()
            for number in range(stage.size.long_rounds):
                for way in found:
                    measure(result, stage, f"produce{kind}", way, number, produce(stage, way))
                for way in found:
                    measure(result, stage, f"consume{kind}", way, number, consume(stage, way))
                for way in found:
                    measure_eight(result, stage, f"{CONSUMERS} consumers{kind}", way, number)
    result.notes = [*dict.fromkeys(result.notes), CIPHER_NOTE]
    return result


def main() -> int:
    return run_scenarios([run], parser_of(__doc__).parse_args())


if __name__ == "__main__":
    end_with(main)
