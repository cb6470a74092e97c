"""What does it cost to copy a topic to S3, with every segment read back and verified?

A producer writes a new topic directly to the broker, as fast as it can, and Tidegate copies it at the same time. A
round ends when most of the topic has left the broker. So the CPU seconds are those of all that copying needs: reading
from the broker, building and uploading segments, reading them back, the metadata, and the trim.
"""

from __future__ import annotations

import time

from bench.clients.java_tools import FILL, MIB
from bench.command import parser_of, question_of, run_scenarios
from bench.ending import run as end_with
from bench.measure.processes import Watch, resident_mib
from bench.measure.results import ScenarioResult, reading
from bench.offsets import EARLIEST, list_offsets
from bench.rig.stage import MOVE_TIMEOUT_S, SEGMENT_BYTES, STAYING_RECORDS, TIDEGATE, Stage, processes_of
from tests.support.servers.producing import create_topic

PATTERN = "copied-*"
IDLE_S = 3.0
GIB = 1024.0


def run(stage: Stage) -> ScenarioResult:
    result = ScenarioResult(__name__.rpartition(".")[2], question_of(__doc__))
    mib = stage.size.passed_mib
    brokers = stage.kafka.bootstrap_servers
    with stage.tidegate("s3", PATTERN) as proxy:
        servers = {"tidegate": processes_of(proxy), "broker": processes_of(stage.kafka), "s3": processes_of(stage.s3)}
        with Watch(servers) as idle:
            time.sleep(IDLE_S)
        for number in range(stage.size.rounds):
            topic = PATTERN.replace("*", str(number))
            create_topic(brokers, topic, config={"segment.bytes": str(SEGMENT_BYTES)})
            with Watch(servers) as watch:
                began = time.monotonic()
                stage.java.produce(brokers, topic, mib, FILL)
                moved_mib = _wait_until_moved(stage, topic, mib)
                seconds = time.monotonic() - began
            figures = {"mib_per_s": moved_mib / seconds, "tidegate_mib": resident_mib(servers["tidegate"]())}
            for name, cpu_s in watch.span.cpu_s.items():
                at_rest = idle.span.cpu_s[name] / idle.span.seconds * watch.span.seconds if name == "tidegate" else 0.0
                figures[f"{name}_cpu_s_per_gib"] = max(0.0, cpu_s - at_rest) / moved_mib * GIB
            result.readings.append(reading("copy to S3", TIDEGATE, number, figures, watch.span))
    result.notes.append(
        f"Tidegate at rest takes {idle.span.cpu_s['tidegate'] / idle.span.seconds * 100:.1f}% of a core, which is "
        "subtracted. The broker's CPU seconds include the producer's requests."
    )
    return result


def _wait_until_moved(stage: Stage, topic: str, mib: int) -> float:
    """Returns how many MiB have left the broker, once that is most of them."""
    records = mib * MIB // 1024
    deadline = time.monotonic() + MOVE_TIMEOUT_S
    while (moved := list_offsets(stage.kafka.address(), topic, [0], EARLIEST).get(0, 0)) < records - STAYING_RECORDS:
        if time.monotonic() > deadline:
            raise TimeoutError(f"only {moved / records:.0%} of {topic} left the broker")
        time.sleep(0.1)
    return moved * 1024 / MIB


def main() -> int:
    return run_scenarios([run], parser_of(__doc__).parse_args())


if __name__ == "__main__":
    end_with(main)
