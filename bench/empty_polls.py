"""What does a poll cost that finds no new record, with many consumers of 100 partitions?

Each consumer has a fetch session (KIP-227), as Kafka's clients do, and asks again as soon as it is answered. The broker
answers after 500 ms.
"""

from __future__ import annotations

import time

from bench.clients.many_connections import ManyConnections
from bench.command import parser_of, question_of, run_scenarios
from bench.ending import run as end_with
from bench.measure.processes import Watch
from bench.measure.results import ScenarioResult, reading
from bench.measure.statistics import amount_between
from bench.rig.relays import ways
from bench.rig.stage import BROKER, Stage, processes_of

TOPIC = "polled"
PARTITIONS = 100
WINDOW_S = 4.0


def run(stage: Stage) -> ScenarioResult:
    result = ScenarioResult(__name__.rpartition(".")[2], question_of(__doc__))
    stage.topic(stage.kafka, TOPIC, PARTITIONS)
    count = stage.size.pollers
    with ways(stage, result.notes) as found:
        for number in range(min(2, stage.size.rounds)):
            for way in found:
                if way.name == BROKER:
                    continue
                with ManyConnections(way.port, count, (TOPIC, PARTITIONS)) as consumers:
                    consumers.wait_for_lines(4)
                    servers = {"relay": way.processes, "broker": processes_of(stage.kafka)}
                    began = time.monotonic()
                    with Watch(servers) as watch:
                        time.sleep(WINDOW_S)
                    ended = time.monotonic()
                    time.sleep(0.3)  # the last report
                    lines = [(line[0], line[1]) for line in consumers.take()]
                polls = amount_between(lines, began, ended)
                figures = {"polls_per_s": polls / (ended - began)}
                figures |= {f"{name}_us_per_poll": cpu_s / polls * 1e6 for name, cpu_s in watch.span.cpu_s.items()}
                result.readings.append(reading(f"{count:,} consumers", way.name, number, figures, watch.span))
    return result


def main() -> int:
    return run_scenarios([run], parser_of(__doc__).parse_args())


if __name__ == "__main__":
    end_with(main)
